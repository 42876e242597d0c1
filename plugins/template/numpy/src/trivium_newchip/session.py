"""An opened newchip: its memory. A tensor is a numpy array here; it can be any object, as trivium only passes it around."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError, UnsupportedError
from trivium.ops import Batch, KVSpec, Pages, Program, Weight
from trivium.plugin import Device, EagerExecutable, Executable, Kernel, Memory, Session

F32 = npt.NDArray[np.float32]


@dataclass
class Layer:
    """What a kernel receives for a layer's state in one step. parts: the arrays of all pages, for attention keys and values
    float32[pages, page_size, heads, head_dim]. table: int32[seqs, blocks]. slots: int64[tokens], page * page_size + offset."""

    parts: tuple[F32, ...]
    table: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]


class NewChipSession(Session):
    def __init__(self, device: Device, kernels: Sequence[Kernel], *, strict: bool) -> None:
        self._device, self._kernels, self._strict = device, kernels, strict
        self._spec = KVSpec(1, "float32", ())
        self._pool: list[F32] = []
        self._weight_bytes = 0

    def put(self, array: npt.NDArray[Any]) -> Any:
        return np.array(array)  # a copy: the caller may overwrite its array

    def get(self, tensor: Any) -> npt.NDArray[Any]:
        return np.asarray(tensor)

    def load(self, weight: Weight, format: str) -> Any:
        if format != "float32":
            raise UnsupportedError(f"newchip keeps weights as float32, not {format}", param="quantize")
        array = np.array(weight.decode())  # repack into the device's own layout here, once
        self._weight_bytes += array.nbytes
        return array

    def read_weight(self, tensor: Any) -> F32:
        return np.asarray(tensor, np.float32)

    def assign(self, tensor: Any, index: int, array: F32) -> None:
        tensor[index] = array

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        need, free = pages * self.page_bytes(spec), self.memory().free
        if need > free:
            raise CapacityError(f"{pages} pages of {self.page_bytes(spec)} bytes need {need} bytes; {free} are free")
        self._spec = spec
        slots = max((len(group.states) for group in spec.groups), default=0)
        self._pool = [np.zeros((pages, self.page_bytes(spec) // 4 // slots), np.float32) for _ in range(slots)]

    def page_bytes(self, spec: KVSpec) -> int:
        """A page belongs to one group at a time, so it is as large as that of the largest, for the most layers that one has."""
        largest = max((sum(map(math.prod, g.spec.page_shapes(spec.page_size))) for g in spec.groups), default=0)
        return 4 * largest * max((len(group.states) for group in spec.groups), default=0)

    def memory(self) -> Memory:
        total, kv = self._device.memory_bytes, sum(array.nbytes for array in self._pool)
        return Memory(total, total - kv - self._weight_bytes, self._weight_bytes, kv)

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        return EagerExecutable(self, program, weights, self._kernels, self._spec, backend="newchip", strict=self._strict)

    def step_state(self, state: int, batch: Batch) -> Layer:
        group, slot = self._spec.group_of(state)
        return Layer(self._views(group, slot), batch.block_tables[group], batch.slot_mapping[group])

    def _views(self, group: int, slot: int) -> tuple[F32, ...]:
        """A layer's part of the pool in the neutral shapes, without a copy."""
        views, start = [], 0
        for shape in self._spec.groups[group].spec.page_shapes(self._spec.page_size):
            end = start + math.prod(shape)
            views.append(self._pool[slot][:, start:end].reshape(-1, *shape))
            start = end
        return tuple(views)

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        which = self._spec.groups[group]
        tensors = tuple(tuple(v[list(ids)] for v in self._views(group, slot)) for slot in range(len(which.states)))
        return Pages(which, self._spec.page_size, self._spec.dtype, tensors)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        for slot, tensors in enumerate(pages.tensors):
            for mine, theirs in zip(self._views(group, slot), tensors, strict=True):
                mine[list(ids)] = theirs

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for array in self._pool:
            array[list(dst)] = array[list(src)]

    def close(self) -> None:
        self._pool.clear()
