"""An opened OpenVINO device: weights, the page pool, and compiling Programs to OpenVINO models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from trivium.errors import CapacityError, InvalidRequestError, UnsupportedError
from trivium.ops import Group, KVSpec, PagedKV, Program, StateSpec, Weight
from trivium.plugin import Executable, Kernel, Memory, Pages, Session, Tensor, announce_fallbacks, select_kernels
from trivium.plugin.hostinfo import available_memory, total_memory
from trivium_openvino.executable import OvExecutable, OvStep
from trivium_openvino.formats import FORMATS
from trivium_openvino.lowering import Lowering
from trivium_openvino.pages import KV_DTYPES, decode, encode, width
from trivium_openvino.weights import Resident, load

F32 = npt.NDArray[np.float32]
_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "u8": "u8"}


class OvSession(Session):
    """See plugin.Session. `device`: OpenVINO's name; `options`: those of OpenVinoBackend.open, checked."""

    def __init__(self, device: str, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        self._core = ov.Core()
        self._device = device
        self._kernels = kernels
        self._options = options
        self._spec = KVSpec(32, "u8", ())
        self._pool: dict[tuple[int, StateSpec], tuple[npt.NDArray[Any], ...]] = {}
        self._weight_bytes = 0
        self.flying: OvStep | None = None

    def settle(self) -> None:
        """Waits for the step that was started: whatever is asked for now takes effect after it."""
        if (step := self.flying) is not None:
            self.flying = None
            step.land()

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return np.array(array, np.float32 if np.issubdtype(array.dtype, np.floating) else array.dtype)

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        return self.read_weight(tensor) if isinstance(tensor, Resident) else np.asarray(tensor)

    def load(self, weight: Weight, format: str) -> Tensor:
        names = [f.name for f in FORMATS]
        if format not in names:
            raise InvalidRequestError(f"weights can't be {format} here; {', '.join(names)} are possible", param="quantize")
        resident = load(weight, format)
        self._weight_bytes += resident.nbytes
        return resident

    def read_weight(self, tensor: Tensor) -> F32:
        return np.asarray(tensor.numbers(), np.float32)

    def assign(self, tensor: Tensor, index: int, array: F32) -> None:
        self.settle()
        tensor.array[index] = array

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        need = pages * self.page_bytes(spec)
        if need > total_memory():
            raise CapacityError(f"{pages} pages of {self.page_bytes(spec)} bytes need {need} bytes; there are {total_memory()}")
        self._spec = spec
        for slot, state in _places(spec):
            self._pool[slot, state] = tuple(np.zeros((pages, *shape), dtype) for shape, dtype in _layout(spec, state))

    def page_bytes(self, spec: KVSpec) -> int:
        sizes = (np.dtype(d).itemsize * math.prod(shape) for _, state in _places(spec) for shape, d in _layout(spec, state))
        return sum(sizes)

    def memory(self) -> Memory:
        kv = sum(a.nbytes for arrays in self._pool.values() for a in arrays)
        return Memory(total_memory(), available_memory(), self._weight_bytes, kv)

    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        choices = select_kernels(program, self._kernels)
        host = [c for c in choices if c.kernel is None]
        missing = [(c.call.name, "; ".join(reason for _, reason in c.refused) or "no kernel") for c in host]
        announce_fallbacks("openvino", missing, strict=bool(self._options.get("strict")))
        low = Lowering(program, weights, self._spec, self._arrays)
        low.run(choices)
        self._weight_bytes += sum(resident.nbytes for resident in low.kept)
        return OvExecutable(self, low)

    def compiled(self, model: ov.Model) -> Any:
        """The model for this device, with this session's precision, KV format and threads."""
        config: dict[str, Any] = {"PERFORMANCE_HINT": self._options.get("hint", "LATENCY").upper(), "NUM_STREAMS": 1}
        config["INFERENCE_PRECISION_HINT"] = _PRECISIONS[self._options.get("dtype", "float32")]
        if self._device == "CPU":
            config |= {"KV_CACHE_PRECISION": _PRECISIONS[self._spec.dtype], "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
                       "VALUE_CACHE_QUANT_MODE": "BY_TOKEN"}  # fmt: skip
        if threads := self._options.get("threads"):
            config["INFERENCE_NUM_THREADS"] = threads
        if folder := self._options.get("cache_dir"):
            config["CACHE_DIR"] = str(folder)
        return self._core.compile_model(model, self._device, config | dict(self._options.get("properties") or {}))

    def _arrays(self, state: int) -> tuple[npt.NDArray[Any], ...]:
        """The pool's arrays of a state of the Program."""
        group, slot = self._spec.group_of(state)
        return self._pool[slot, _geometry(self._spec.groups[group].spec)]

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        self.settle()
        which = self._spec.groups[group]
        tensors = tuple(tuple(self._read(which, a[list(ids)]) for a in self._arrays(state)) for state in which.states)
        return Pages(which, self._spec.page_size, self._spec.dtype, tensors)

    def _read(self, group: Group, rows: npt.NDArray[Any]) -> F32:
        if not isinstance(group.spec, PagedKV):
            return rows
        return np.ascontiguousarray(decode(rows, self._spec.dtype).transpose(0, 2, 1, 3))

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        self.settle()
        which = self._spec.groups[group]
        for state, tensors in zip(which.states, pages.tensors, strict=True):
            for mine, theirs in zip(self._arrays(state), tensors, strict=True):
                numbers = np.asarray(theirs, np.float32).reshape(len(ids), *_shape(which, self._spec, mine))
                mine[list(ids)] = self._rows(which, numbers)

    def _rows(self, group: Group, numbers: F32) -> npt.NDArray[Any]:
        if not isinstance(group.spec, PagedKV):
            return numbers if not group.spec.paged else _rounded(numbers, self._spec.dtype)
        return encode(np.ascontiguousarray(numbers.transpose(0, 2, 1, 3)), self._spec.dtype)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.settle()
        for arrays in self._pool.values():
            for a in arrays:
                a[list(dst)] = a[list(src)]

    def close(self) -> None:
        self.settle()
        self._pool.clear()


def _shape(group: Group, spec: KVSpec, array: npt.NDArray[Any]) -> tuple[int, ...]:
    """The neutral shape of one page of an array of the pool."""
    if isinstance(group.spec, PagedKV):
        return group.spec.page_shapes(spec.page_size)[0]
    return tuple(array.shape[1:])


def _rounded(numbers: F32, dtype: str) -> F32:
    """What a KV format keeps of pages that only the host reads: they lie there as float32."""
    return decode(encode(numbers, dtype), dtype)


def _places(spec: KVSpec) -> list[tuple[int, StateSpec]]:
    """Layers of groups that differ only in their window share memory: a page belongs to one group at a time."""
    found = ((slot, _geometry(group.spec)) for group in spec.groups for slot in range(len(group.states)))
    return list(dict.fromkeys(found))


def _geometry(spec: StateSpec) -> StateSpec:
    return dataclasses.replace(spec, window=None) if isinstance(spec, PagedKV) else spec


def _layout(spec: KVSpec, state: StateSpec) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and numpy type of each array of a layer's page. Other states than PagedKV are plain float32: the host reads them."""
    if spec.dtype not in KV_DTYPES:
        raise UnsupportedError(f"pages can't be {spec.dtype} here; {', '.join(KV_DTYPES)} are possible", param="kv_dtype")
    if isinstance(state, PagedKV):
        row = width(state.head_dim, spec.dtype)
        return [((state.kv_heads, spec.page_size, row), KV_DTYPES[spec.dtype])] * 2
    return [(shape, np.float32) for shape in state.page_shapes(spec.page_size)]
