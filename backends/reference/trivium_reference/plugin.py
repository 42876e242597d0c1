"""The backend: the numpy references of the operator set and nothing else. The whole engine runs on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError, InvalidRequestError
from trivium.ops import OPERATORS, Batch, Group, KVSpec, PagedKV, PagedState, Pages, Program, RecurrentState, StateSpec, Weight
from trivium.ops.state import kv_int8, state_of
from trivium.plugin import (
    API_VERSION,
    Backend,
    Capabilities,
    Device,
    EagerExecutable,
    Executable,
    Kernel,
    Memory,
    Probe,
    Session,
    Tensor,
    WeightFormat,
    hookimpl,
)  # fmt: skip
from trivium.plugin.hostinfo import available_memory, total_memory

F32 = npt.NDArray[np.float32]
_OPTIONS = frozenset({"dtype", "max_batched_tokens", "max_seqs", "max_model_len", "strict"})


class ReferenceSession(Session):
    """Plain numpy arrays in the shapes of ops/state.py."""

    def __init__(self, kernels: Sequence[Kernel], *, strict: bool) -> None:
        self._kernels = kernels
        self._strict = strict
        self._weight_bytes = 0
        self._spec = KVSpec(1, "float32", ())
        self._pool: dict[tuple[int, StateSpec], tuple[F32, ...]] = {}

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return np.array(array)

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        return np.asarray(tensor)

    def load(self, weight: Weight, format: str) -> Tensor:
        if format != "float32":
            raise InvalidRequestError(f"the reference backend keeps weights as float32, not {format}", param="quantize")
        array = np.array(weight.decode())
        self._weight_bytes += array.nbytes
        return array

    def read_weight(self, tensor: Tensor) -> F32:
        return np.asarray(tensor, np.float32)

    def assign(self, tensor: Tensor, index: int, array: F32) -> None:
        tensor[index] = array

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        need = pages * self.page_bytes(spec)
        if need > total_memory():
            raise CapacityError(f"{pages} pages of {self.page_bytes(spec)} bytes need {need} bytes; there are {total_memory()}")
        self._spec = spec
        for slot, state in _places(spec):
            self._pool[slot, state] = tuple(np.zeros((pages, *shape), np.float32) for shape in state.page_shapes(spec.page_size))

    def page_bytes(self, spec: KVSpec) -> int:
        return sum(4 * math.prod(shape) for _, state in _places(spec) for shape in state.page_shapes(spec.page_size))

    def memory(self) -> Memory:
        kv = sum(a.nbytes for arrays in self._pool.values() for a in arrays)
        return Memory(total_memory(), available_memory(), self._weight_bytes, kv)

    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        return EagerExecutable(self, program, weights, self._kernels, self._spec, backend="reference", strict=self._strict)

    def step_state(self, state: int, batch: Batch) -> PagedState | RecurrentState:
        group, slot = self._spec.group_of(state)
        which, table = self._spec.groups[group], batch.block_tables[group]
        return state_of(which.spec, self._arrays(which, slot), table, batch.slot_mapping[group])

    def _arrays(self, group: Group, slot: int) -> tuple[F32, ...]:
        return self._pool[slot, _geometry(group.spec)]

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        which = self._spec.groups[group]
        tensors = tuple(tuple(a[list(ids)] for a in self._arrays(which, s)) for s in range(len(which.states)))
        return Pages(which, self._spec.page_size, self._spec.dtype, tensors)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        for slot, tensors in enumerate(pages.tensors):
            for mine, theirs in zip(self._arrays(self._spec.groups[group], slot), tensors, strict=True):
                mine[list(ids)] = self.kept(theirs, group)

    def kept(self, numbers: F32, group: int = -1) -> F32:
        """What the KV dtype keeps of keys, values or pages; recurrent states stay."""
        paged = group < 0 or self._spec.groups[group].spec.paged
        return kv_int8(numbers) if self._spec.dtype == "int8" and paged else numbers

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for arrays in self._pool.values():
            for a in arrays:
                a[list(dst)] = a[list(src)]

    def close(self) -> None:
        self._pool.clear()


class ReferenceBackend(Backend):
    """Correct, slow, everywhere."""

    name = "reference"
    api_version = API_VERSION
    version = "1"
    priority = -100

    def probe(self) -> Probe:
        return Probe((Device(0, "numpy", total_memory(), {"numpy": np.__version__}),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(
            dtypes=("float32",), weight_formats=(WeightFormat("float32", 32.0, frozenset({"float32", "float16", "bfloat16"})),),
            kv_dtypes=("float32", "int8"), page_sizes=(16, *(n for n in range(1, 257) if n != 16)),
            unsupported={"bfloat16": "the reference computes in float32", "float16": "the reference computes in float32"},
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        return [Kernel(name, _runner(name), f"numpy {name}") for name in OPERATORS]

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        if unknown := options.keys() - _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise InvalidRequestError(f"the reference backend has no option {', '.join(sorted(unknown))}; it has {known}")
        return ReferenceSession(self.kernels(device), strict=bool(options.get("strict")))


def _runner(name: str) -> Any:
    if name in ("kv_write", "latent_write"):
        return lambda session, args, attrs: OPERATORS[name](args[0], *map(session.kept, args[1:]), **attrs)
    return lambda session, args, attrs: OPERATORS[name](*args, **attrs)


def _places(spec: KVSpec) -> set[tuple[int, StateSpec]]:
    return {(slot, _geometry(group.spec)) for group in spec.groups for slot in range(len(group.states))}


def _geometry(spec: StateSpec) -> StateSpec:
    """Groups whose layers differ only in their window share the pool's arrays."""
    return dataclasses.replace(spec, window=None) if isinstance(spec, PagedKV) else spec


@hookimpl
def trivium_backend() -> Backend:
    return ReferenceBackend()
