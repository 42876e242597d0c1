"""Program: a model as a small SSA graph over the operator set, with symbolic sizes; and Weight, what its constants come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.ops.schema import MakeCases, Operator, Shape
from trivium.ops.state import StateSpec

# The inputs every Program may name; they are the fields of Batch. Symbols: tokens and seqs of the step, rows sampled, rows pooled.
INPUTS: Mapping[str, tuple[Shape, str]] = {
    "token_ids": (("tokens",), "int32"), "positions": (("tokens",), "int32"), "query_starts": (("seqs+1",), "int32"),
    "context_lens": (("seqs",), "int32"), "sample_rows": (("rows",), "int32"), "pool_rows": (("pooled",), "int32"),
    "adapters": (("tokens",), "int32"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value. `kind`: "input", "constant", "state" or "call". Values are compared by identity."""

    name: str
    shape: Shape
    dtype: str
    kind: str

    def __repr__(self) -> str:
        return f"%{self.name}[{', '.join(map(str, self.shape))}]"

    @property
    def used(self) -> str:
        """How a printed Program names it where it is read."""
        return repr(self).replace("%", "@", 1) if self.kind == "constant" else f"{'$' if self.kind == 'state' else '%'}{self.name}"


@dataclass(frozen=True, eq=False)
class Constant:
    """A weight by name. `source` is the checkpoint tensor it comes from and `rows` the range of its first dimension
    (None: all of it). `array` holds a value computed by the model file instead (rope frequencies)."""

    value: Value
    source: str
    rows: tuple[int, int] | None = None
    array: npt.NDArray[np.float32] | None = None


class InputScale(NamedTuple):
    """How a checkpoint rounds a matrix' inputs to 8 bits, those of all tokens alike: x becomes the whole number nearest to
    x / scale + offset (of two, the even one) within -128..127, which stands for scale * (whole - offset). scale > 0; offset: within
    -128..127."""

    scale: float
    offset: int


@dataclass(frozen=True)
class Weight:
    """One checkpoint tensor on its way to a backend, as it is stored.

    shape: logical, e.g. (out, in). format: "float32", "float16", "bfloat16" or a block format's name in lower case
    ("q4_1", "q6_k", ...). data: for the float formats an array of `shape` (bfloat16 as uint16 bit patterns); for block formats
    uint8[rows, bytes per row]. It may be a memory map: don't write to it. `decoder(data)` gives float32[shape], exactly.
    origin: where the data comes from, equal only for equal data; "" where nobody knows. inputs: how the checkpoint means the
    matrix' inputs to be rounded; a resident format decides, and one that leaves them as they are is more exact.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: npt.NDArray[Any]
    decoder: Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
    origin: str = ""
    inputs: InputScale | None = None

    def decode(self) -> npt.NDArray[np.float32]:
        """The exact numbers, float32[shape]."""
        return self.decoder(self.data).reshape(self.shape)

    def slice_rows(self, start: int, stop: int) -> Weight:
        """Rows start..stop of the first dimension, without a copy."""
        origin = self.origin and f"{self.origin}[{start}:{stop}]"
        return replace(self, shape=(stop - start, *self.shape[1:]), data=self.data[start:stop], origin=origin)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True, eq=False)
class StateDecl:
    """A state of the Program: the initial SSA value and what it needs. Its index in Program.states is its identity."""

    value: Value
    spec: StateSpec


@dataclass(frozen=True, eq=False)
class Call:
    """One application of an operator or of a fused pattern. `args` follow the signature; None where an optional one is absent."""

    op: Operator | Pattern
    args: tuple[Value | None, ...]
    attrs: Mapping[str, Any]
    results: tuple[Value, ...]

    @property
    def name(self) -> str:
        return self.op.name

    def __str__(self) -> str:
        """The right-hand side of a line of a printed Program."""
        name, defaults = (f"[{self.name}]", {}) if isinstance(self.op, Pattern) else (self.name, self.op.attrs)
        attrs = [f"{k}={v!r}" for k, v in self.attrs.items() if k not in defaults or defaults[k] != v]
        return f"{name}({', '.join([*('none' if v is None else v.used for v in self.args), *attrs])})"


@dataclass(frozen=True)
class Program:
    """inputs, constants (weights by name), states (one a layer), calls in SSA order, outputs by name: "logits" of the sampled rows,
    "hidden" of the pooled ones."""

    inputs: tuple[Value, ...]
    constants: tuple[Constant, ...]
    states: tuple[StateDecl, ...]
    calls: tuple[Call, ...]
    outputs: Mapping[str, Value]
    vocab_size: int = 0

    def only(self, *names: str) -> Program:
        """The Program with these of its outputs, and nothing that none of them needs. States all stay."""
        outputs = {name: self.outputs[name] for name in names}
        needed, calls = set(outputs.values()), list[Call]()
        for call in reversed(self.calls):
            if not needed.isdisjoint(call.results):
                needed.update(v for v in call.args if v is not None)
                calls.append(call)
        inputs = tuple(v for v in self.inputs if v in needed)
        constants = tuple(c for c in self.constants if c.value in needed)
        return replace(self, inputs=inputs, constants=constants, calls=tuple(reversed(calls)), outputs=outputs)

    def __str__(self) -> str:
        """SSA form: %value, @constant, $state; attributes that differ from their default; fused calls in brackets."""
        lines = ["inputs " + ", ".join(f"{v!r}: {v.dtype}" for v in self.inputs), f"constants {len(self.constants)}"]
        lines += [f"state ${s.value.name}: {s.spec}" for s in self.states]
        for call in self.calls:
            made = [v.used if v.kind == "state" else repr(v) for v in call.results]
            lines.append(f"{', '.join(made)} = {call}")
        return "\n".join([*lines, *(f"output {name} = {value.used}" for name, value in self.outputs.items())])


class Pattern(NamedTuple):
    """A fused kernel's specification: an ordinary function over the Builder.

    `fn(b, *values, **attributes)`: positional parameters are the fused call's arguments, keyword-only ones its attributes
    (bound by name from the calls inside, so `b.rms_norm(x, w, eps=eps)` captures eps; an attribute the function does not mention
    must have the operator's default). It returns one Value or a tuple of them: every other value made inside must have no
    reader outside for the pattern to match. A parameter named in `optional` may be absent. `cases` makes example calls, as an
    operator's does; without it the conformance kit takes examples from Programs that contain the pattern.
    """

    name: str
    fn: Callable[..., Any]
    optional: frozenset[str] = frozenset()
    cases: MakeCases | None = None
