"""One ONNX model under construction: a stretch of a Program's calls.

Inside, a value of the step's tokens is a tensor [B, S, numbers]: a rectangle of B sequences by S columns (see rectangles.py) with
all inner dimensions as one; a value of chosen rows is [rows, numbers]. A model over pages (see paged.py) has the whole step in one
row: B is 1, S its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from trivium.ops import KVSpec, PagedKV, Program, Value
from trivium_onnxruntime.formats import BLOCK, Resident, joined, numbers_in

CONTRIB = "com.microsoft"
_OPSETS = {"": 23, CONTRIB: 1}
_TYPES = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
}  # fmt: skip
KV_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


class Common:
    """What all models of one Program share: weights, joined weights, tables of angles. `dtype`: of what is computed inside.
    `paged`: attention reads and writes pages, in that dtype, instead of rows."""

    def __init__(
        self, program: Program, weights: Mapping[str, Resident], spec: KVSpec, *, positions: int, accuracy: int,
        dtype: str = "float32", paged: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.spec, self.positions, self.accuracy = program, spec, positions, accuracy
        self.dtype, self.paged = dtype, paged
        self.weights = {c.value: weights[c.value.name] for c in program.constants}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.state_of = _state_indices(program)
        self._joined: dict[tuple[Value, ...], Resident | None] = {}

    def join(self, values: tuple[Value, ...]) -> Resident | None:
        """One weight made of several, if they are alike."""
        if values not in self._joined:
            self._joined[values] = joined([self.weights[v] for v in values])
        return self._joined[values]


class Graph:
    """Nodes, inputs, outputs and weights of one model. Lowering functions call `tensor`, `set`, `node` and the rest."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.type = _TYPES[common.dtype]
        self.inputs: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self.values: dict[str, Value] = {}
        self.initializers: dict[str, npt.NDArray[Any]] = {}
        self.variables: dict[str, npt.NDArray[Any]] = {}
        self.states: set[int] = set()
        self.from_pages: set[int] = set()
        self._env: dict[Value, str] = {}
        self._nodes: list[Any] = []
        self._shaped: dict[Any, str] = {}
        self.pending: dict[int, tuple[str, str]] = {}
        self.latest: dict[tuple[int, str], str] = {}

    def node(self, op: str, *args: str, domain: str = "", **attrs: Any) -> str:
        """Appends a node and returns its first output."""
        return self.nodes(op, args, 1, domain=domain, **attrs)[0]

    def nodes(self, op: str, args: Sequence[str], count: int, *, domain: str = "", **attrs: Any) -> list[str]:
        names = [f"{op}.{len(self._nodes)}.{i}" for i in range(count)]
        self.node_to(op, args, names, domain=domain, **attrs)
        return names

    def node_to(self, op: str, args: Sequence[str], names: Sequence[str], *, domain: str = "", **attrs: Any) -> None:
        self._nodes.append(helper.make_node(op, list(args), list(names), f"{op}.{len(self._nodes)}", domain=domain, **attrs))

    def contrib(self, op: str, *args: str, **attrs: Any) -> str:
        return self.node(op, *args, domain=CONTRIB, **attrs)

    def tensor(self, value: Value) -> str:
        """The flat tensor of a value: made in this model, a constant, or an input."""
        if value in self._env:
            return self._env[value]
        if value.kind == "constant":
            name = self.constant(value.name, self.common.weights[value].numbers())
        else:
            name = value.name
            lead: tuple[Any, ...] = ("B", "S") if value.shape[:1] == ("tokens",) else (str(value.shape[0]),)
            inner = () if value.kind == "input" else (int(np.prod([int(n) for n in value.shape[1:]], dtype=np.int64)),)
            self.input(name, self.common.dtype if value.dtype == "float" else "int32", (*lead, *inner))
            self.values[name] = value
        self._env[value] = name
        return name

    def set(self, value: Value, name: str) -> None:
        """The flat tensor that a result is."""
        self._env[value] = name

    def made(self, value: Value) -> bool:
        return value in self._env

    def by_head(self, value: Value) -> str:
        """The tensor with its last dimension apart: [.., numbers / last, last]."""
        return self.split(self.tensor(value), value) if len(value.shape) > 2 else self.tensor(value)

    def split(self, name: str, value: Value) -> str:
        """A flat tensor with the inner dimensions of `value`."""
        lead = 2 if value.shape[0] == "tokens" else 1
        return self.reshape(name, (*(0,) * lead, *(int(n) for n in value.shape[1:])))

    def set_by_head(self, value: Value, name: str) -> None:
        """A result whose inner dimensions are apart."""
        lead = 2 if value.shape[0] == "tokens" else 1
        self.set(value, self.reshape(name, (*(0,) * lead, -1)) if len(value.shape) > 2 else name)

    def reshape(self, name: str, shape: tuple[int, ...]) -> str:
        key = name, shape
        if key not in self._shaped:
            self._shaped[key] = self.node("Reshape", name, self.constant(f"shape{shape}", np.array(shape, np.int64)))
        return self._shaped[key]

    def constant(self, name: str, array: npt.NDArray[Any], *, exact: bool = False) -> str:
        """Numbers in the dtype of the model; `exact`: in their own."""
        rounds = not exact and np.issubdtype(array.dtype, np.floating) and array.dtype != self.common.dtype
        self.initializers[name] = numbers_in(array, self.common.dtype, name) if rounds else array
        return name

    def exact(self, value: Value) -> str:
        """A value in float32, whatever the dtype of the model: a constant unrounded."""
        if self.common.dtype == "float32":
            return self.tensor(value)
        if value.kind == "constant":
            return self.constant(f"{value.name} exact", self.common.weights[value].numbers(), exact=True)
        return self.node("Cast", self.tensor(value), to=TensorProto.FLOAT)

    def cast(self, name: str) -> str:
        """A float32 or float16 tensor in the dtype of the model."""
        return name if self.common.dtype == "float32" else self.node("Cast", name, to=self.type)

    def scalar(self, number: float) -> str:
        return self.constant(f"number {number!r}", np.array(number, np.float32))

    def input(self, name: str, dtype: str, shape: tuple[Any, ...]) -> str:
        self.inputs[name] = dtype, shape
        return name

    def variable(self, value: Value) -> str:
        """A weight that may be assigned to between steps: an input that is bound to the memory of the loaded array."""
        array = self.common.weights[value].array
        assert array is not None
        self.variables[value.name] = array
        name = self.input(value.name, str(array.dtype), array.shape)
        return name if str(array.dtype) == self.common.dtype else self.once(("cast", name), lambda: self.cast(name))

    def once(self, key: Any, make: Any) -> str:
        """A tensor that several calls share."""
        if key not in self._shaped:
            self._shaped[key] = make()
        return self._shaped[key]

    def project(self, x: str, weight: Resident, name: str, bias: str = "") -> str:
        """x · weightᵀ + bias. With a minimum: the whole numbers count from 8, what is left of the minimum, m + 8 d, is multiplied
        by the sums of x over blocks. Over pages the bias is added apart: MatMulNBits has fast kernels for CUDA that take none."""
        if weight.array is not None:
            y = self.product("FusedMatMul", x, name, weight.array, transB=1, domain=CONTRIB)
            return self.node("Add", y, bias) if bias else y
        assert weight.q is not None and weight.d is not None
        out, width = weight.shape
        inside = bool(bias) and not self.common.paged
        args = [x, self.constant(f"{name} q", weight.q), self.constant(f"{name} d", weight.d.reshape(out, -1)), "", "", bias]
        y = self.contrib(
            "MatMulNBits", *args[: 6 if inside else 3], K=width, N=out, bits=weight.bits, block_size=BLOCK,
            accuracy_level=self.common.accuracy,
        )  # fmt: skip
        y = self.node("Add", y, bias) if bias and not inside else y
        if weight.m is None:
            return y
        rest = self.constant(f"{name} m", weight.m.reshape(out, -1) + np.float32(8) * weight.d.reshape(out, -1))
        return self.node("Add", y, self.contrib("FusedMatMul", self._block_sums(x, width), rest, transB=1))

    def product(self, op: str, x: str, name: str, weight: npt.NDArray[Any], **attrs: Any) -> str:
        """A product with a plain weight, in float32 if that is how the weight is kept."""
        if str(weight.dtype) == self.common.dtype:
            return self.node(op, x, self.constant(name, weight), **attrs)
        wide = self.once(("wide", x), lambda: self.node("Cast", x, to=TensorProto.FLOAT))
        return self.cast(self.node(op, wide, self.constant(f"{name} exact", weight, exact=True), **attrs))

    def _block_sums(self, x: str, width: int) -> str:
        ones = np.repeat(np.eye(width // BLOCK, dtype=np.float32), BLOCK, axis=0)
        return self.once(("sums", x), lambda: self.node("MatMul", x, self.constant(f"block sums {width}", ones)))

    def output(self, name: str, source: str, shape: tuple[Any, ...]) -> None:
        """A result, in float32."""
        if self.common.dtype != "float32":
            self.node_to("Cast", [source], [name], to=TensorProto.FLOAT)
        elif source != name:
            self.node_to("Identity", [source], [name])
        self.outputs[name] = shape

    def state_input(self, state: int, part: str) -> str:
        spec = self.common.program.states[state].spec
        assert isinstance(spec, PagedKV)
        self.states.add(state)
        return self.input(f"{part}.{state}", self.common.dtype, self.state_shape(spec))

    def state_shape(self, spec: PagedKV) -> tuple[Any, ...]:
        """Of a state's keys, and of its values: rows, or pages."""
        if self.common.paged:
            return "P", self.common.spec.page_size, spec.kv_heads, spec.head_dim
        return "B", spec.kv_heads, "C", spec.head_dim

    def model(self) -> bytes:
        """The serialised model; its weights are named as external data and handed over by address."""
        constants = [_external(name, array) for name, array in self.initializers.items() if not _small(array)]
        constants += [
            helper.make_tensor(n, _TYPES[str(a.dtype)], a.shape, a.ravel()) for n, a in self.initializers.items() if _small(a)
        ]
        graph = helper.make_graph(
            self._nodes, "program",
            [helper.make_tensor_value_info(name, _TYPES[dtype], shape) for name, (dtype, shape) in self.inputs.items()],
            [helper.make_tensor_value_info(name, self._output_type(name), shape) for name, shape in self.outputs.items()],
            constants,
        )  # fmt: skip
        opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()  # type: ignore[no-any-return]

    def _output_type(self, name: str) -> int:
        return self.type if name.startswith(("keys.", "values.")) else TensorProto.FLOAT

    def external(self) -> dict[str, npt.NDArray[Any]]:
        """The weights that the model only names."""
        return {name: np.ascontiguousarray(a) for name, a in self.initializers.items() if not _small(a)}


def _small(array: npt.NDArray[Any]) -> bool:
    return array.nbytes < 1024


def _external(name: str, array: npt.NDArray[Any]) -> Any:
    tensor = TensorProto(name=name, data_type=_TYPES[str(array.dtype)], dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights"), ("offset", "0"), ("length", str(array.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def _state_indices(program: Program) -> dict[Value, int]:
    """The index of the state that each state value is a version of."""
    index = {s.value: i for i, s in enumerate(program.states)}
    for call in program.calls:
        arguments = [v for v in call.args if v is not None and v.kind == "state"]
        results = [v for v in call.results if v.kind == "state"]
        index.update((r, index[a]) for r, a in zip(results, arguments, strict=False))
    return index
