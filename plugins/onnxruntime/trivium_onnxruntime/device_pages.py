"""The page pool on a device: PagedAttention's own layout, moved by small models that run where the pages lie.

onnxruntime gives a Python program no slices of a device's memory; Gather and ScatterND do. ScatterND's result is bound to its
input, so nothing but the pages named is copied. Nothing here was run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from trivium.errors import CapacityError
from trivium.ops import Group, KVSpec, Recurrent
from trivium.plugin import Pages

Array = npt.NDArray[Any]
Place = Callable[[Array], Any]
"""An array on the device, as an OrtValue."""
Open = Callable[[bytes], Any]
"""An InferenceSession of a model, on the device."""


def page_bytes(spec: KVSpec) -> int:
    """Bytes of one page: a place for every state."""
    layouts = (_layout(spec, group) for group in spec.groups for _ in group.states)
    return sum(math.prod(shape) * dtype.itemsize for layout in layouts for shape, dtype in layout)


def _layout(spec: KVSpec, group: Group) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of each part of a state's page: the neutral ones, which are PagedAttention's too."""
    dtype = np.dtype("float32" if isinstance(group.spec, Recurrent) else spec.dtype)
    return [(shape, dtype) for shape in group.spec.page_shapes(spec.page_size)]


class DevicePool:
    """All pages. values[state]: its parts, OrtValues [pages, ..]; keys and values are [pages, page_size, kv_heads, head_dim] in the
    KV format."""

    def __init__(self, spec: KVSpec, pages: int, *, free: int, place: Place, open_model: Open) -> None:
        self.spec, self.nbytes = spec, pages * page_bytes(spec)
        if self.nbytes > free:
            raise CapacityError(f"{pages} pages need {self.nbytes} bytes of the device; {free} are free")
        if pages * spec.page_size > np.iinfo(np.int32).max:
            raise CapacityError(f"{pages} pages of {spec.page_size} tokens: PagedAttention counts slots in 32 bits")
        self._open = open_model
        self._sessions: dict[tuple[str, int, np.dtype[Any]], Any] = {}
        self.values: dict[int, list[Any]] = {}
        for group in spec.groups:
            for state in group.states:
                self.values[state] = [place(np.zeros((pages, *shape), dtype)) for shape, dtype in _layout(spec, group)]

    def export(self, group: int, ids: Sequence[int]) -> Pages:
        which = self.spec.groups[group]
        layout = _layout(self.spec, which)
        tensors = [tuple(self._read(v, ids, *at) for v, at in zip(self.values[state], layout)) for state in which.states]
        return Pages(which, self.spec.page_size, self.spec.dtype, tuple(tensors))

    def import_(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        which = self.spec.groups[group]
        layout = _layout(self.spec, which)
        for state, tensors in zip(which.states, pages.tensors, strict=True):
            for value, tensor, (shape, dtype) in zip(self.values[state], tensors, layout, strict=True):
                numbers = np.ascontiguousarray(tensor, dtype).reshape(len(ids), *shape)
                self._run("write", value, value, dtype, len(shape), target=_column(ids), numbers=numbers)

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for group in self.spec.groups:
            for state in group.states:
                for value, (shape, dtype) in zip(self.values[state], _layout(self.spec, group)):
                    self._run("copy", value, value, dtype, len(shape), source=_column(src)[:, 0], target=_column(dst))

    def _read(self, value: Any, ids: Sequence[int], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[np.float32]:
        import onnxruntime

        found = np.empty((len(ids), *shape), dtype)
        self._run("read", value, onnxruntime.OrtValue.ortvalue_from_numpy(found), dtype, len(shape), ids=_column(ids)[:, 0])
        return found.astype(np.float32)

    def _run(self, name: str, value: Any, result: Any, dtype: np.dtype[Any], rank: int, **feeds: Array) -> None:
        """Runs one of _MODELS on pages of so many dimensions."""
        session = self._session(name, rank, dtype)
        binding = session.io_binding()
        binding.bind_ortvalue_input("pages", value)
        for feed, array in feeds.items():
            binding.bind_cpu_input(feed, np.ascontiguousarray(array))
        binding.bind_ortvalue_output("result", result)
        session.run_with_iobinding(binding)

    def _session(self, *key: Any) -> Any:
        if key not in self._sessions:
            self._sessions[key] = self._open(_model(*key))
        return self._sessions[key]


def _column(ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """[n, 1], as ScatterND takes them."""
    return np.asarray(ids, np.int64).reshape(-1, 1)


_MODELS: Mapping[str, tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]]] = {
    "read": ((("Gather", ("pages", "ids")),), ("ids",)),
    "write": ((("ScatterND", ("pages", "target", "numbers")),), ("target", "numbers")),
    "copy": ((("Gather", ("pages", "source")), ("ScatterND", ("pages", "target", "taken"))), ("source", "target")),
}
"""Nodes, the last of which makes "result" and one before it "taken", and what is fed beside the pages."""


def _model(name: str, rank: int, dtype: np.dtype[Any]) -> bytes:
    nodes, feeds = _MODELS[name]
    kind, page = helper.np_dtype_to_tensor_dtype(dtype), [f"d{i}" for i in range(rank)]
    shapes: dict[str, list[str | int]] = {"ids": ["n"], "source": ["n"], "target": ["n", 1], "numbers": ["n", *page]}
    inputs = [helper.make_tensor_value_info("pages", kind, ["P", *page])]
    inputs += [helper.make_tensor_value_info(f, kind if f == "numbers" else TensorProto.INT64, shapes[f]) for f in feeds]
    result = helper.make_tensor_value_info("result", kind, ["n" if name == "read" else "P", *page])
    outputs = [*["taken"] * (len(nodes) - 1), "result"]
    made = [helper.make_node(op, args, [output]) for (op, args), output in zip(nodes, outputs)]
    graph = helper.make_graph(made, "pages", inputs, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()  # type: ignore[no-any-return]
