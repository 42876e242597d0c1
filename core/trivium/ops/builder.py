"""The operator set, and Builder: model files and patterns call operators on it; it records the calls and infers shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import ProgramError
from trivium.ops import attention, collective, dense, media, moe, recurrent, sample
from trivium.ops.program import INPUTS, Call, Constant, Program, StateDecl, Value
from trivium.ops.schema import REQUIRED, Arg, Operator, Shape, collect
from trivium.ops.state import StateSpec

OPERATORS: Mapping[str, Operator] = collect(dense, attention, moe, recurrent, media, collective, sample)
"""The operator set, by name."""


class Recorder(ABC):
    """Records calls: `b.rms_norm(x, w, eps=1e-6)` appends one and returns its result (a tuple where there are several).

    Any operator of the set is a method; a missing optional argument may be left out or None.
    """

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self._operators = operators
        self.calls: list[Call] = []

    def call(self, name: str, *args: Value | None, **attrs: Any) -> Any:
        """Appends a call of operator `name`; raises ProgramError if arguments, attributes or dimensions don't fit."""
        op = self._operators.get(name)
        if op is None:
            raise ProgramError(f"no operator is called {name!r} in this operator set")
        bound, attrs = self._bind_args(op, args), bind_attrs(op, attrs)
        results = self._results(op, bound, attrs)
        self.calls.append(Call(op, bound, attrs, results))
        return results[0] if len(results) == 1 else results

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **attrs: self.call(name, *args, **attrs)

    def _bind_args(self, op: Operator, args: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        want = op.signature.args
        if len(args) > len(want):
            raise ProgramError(f"{op.name} takes {len(want)} arguments, {len(args)} were given")
        bound = args + (None,) * (len(want) - len(args))
        for arg, value in zip(want, bound, strict=True):
            if value is None and not arg.optional:
                raise ProgramError(f"{op.name}: the argument {arg.name} is missing")
            if value is not None and value.kind != "param" and arg.is_state != (value.kind == "state"):
                raise ProgramError(f"{op.name}: {arg.name} {'must' if arg.is_state else 'must not'} be a state")
        return bound

    @abstractmethod
    def _results(self, op: Operator, args: Sequence[Value | None], attrs: Mapping[str, Any]) -> tuple[Value, ...]:
        """New values for the results of a call."""


class Builder(Recorder):
    """Traces a Program, with shapes."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        super().__init__(operators)
        self._inputs: dict[str, Value] = {}
        self._constants: dict[str, Constant] = {}
        self._states: list[StateDecl] = []
        self._version: dict[str, int] = {}

    def input(self, name: str) -> Value:
        """One of the step's integer arrays (see program.INPUTS)."""
        if name not in INPUTS:
            raise ProgramError(f"no input is called {name!r}; there are {', '.join(INPUTS)}")
        shape, dtype = INPUTS[name]
        return self._inputs.setdefault(name, Value(name, shape, dtype, "input"))

    def weight(self, name: str, shape: Shape, *, source: str | None = None, rows: tuple[int, int] | None = None) -> Value:
        """A constant `name` of `shape`, read from the checkpoint tensor `source` (default: `name`), rows start..stop of it."""
        if name not in self._constants:
            self._constants[name] = Constant(Value(name, shape, "weight", "constant"), source or name, rows)
        constant = self._constants[name]
        if constant.value.shape != shape:
            raise ProgramError(f"constant {name} is {constant.value.shape}, asked for as {shape}")
        return constant.value

    def array(self, name: str, array: np.ndarray[Any, Any]) -> Value:
        """A float32 constant computed by the model file; the same name must always carry the same numbers."""
        array = np.ascontiguousarray(array, np.float32)
        if name not in self._constants:
            self._constants[name] = Constant(Value(name, array.shape, "float", "constant"), name, None, array)
        known = self._constants[name].array
        if known is None or not np.array_equal(known, array):
            raise ProgramError(f"constant {name} is defined twice with different contents")
        return self._constants[name].value

    def state(self, name: str, spec: StateSpec) -> Value:
        """Declares the state of one layer and returns its first SSA value."""
        value = Value(name, (), type(spec).__name__, "state")
        self._states.append(StateDecl(value, spec))
        return value

    def finish(self, outputs: Mapping[str, Value], *, vocab_size: int = 0) -> Program:
        """The finished Program."""
        return Program(
            tuple(self._inputs.values()), tuple(self._constants.values()), tuple(self._states),
            tuple(self.calls), dict(outputs), vocab_size,
        )  # fmt: skip

    def _results(self, op: Operator, args: Sequence[Value | None], attrs: Mapping[str, Any]) -> tuple[Value, ...]:
        shapes = iter(op.result_shapes([None if v is None or v.kind == "state" else v.shape for v in args], attrs))
        return tuple(self._result(r, args, () if r.is_state else next(shapes)) for r in op.signature.results)

    def _result(self, result: Arg, args: Sequence[Value | None], shape: Shape) -> Value:
        """A new value: name1, name2, ...; the versions of a state are name'1, name'2, ..."""
        stem, dtype = result.name, result.dtype
        if result.is_state:
            before = next(v for v in args if v is not None and v.kind == "state")
            stem, dtype = before.name.partition("'")[0] + "'", before.dtype
        self._version[stem] = self._version.get(stem, 0) + 1
        return Value(f"{stem}{self._version[stem]}", shape, dtype, "state" if result.is_state else "call")


def bind_attrs(op: Operator, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes of a call, defaults filled in; ProgramError for an unknown or a missing one."""
    if unknown := attrs.keys() - op.attrs.keys():
        raise ProgramError(f"{op.name} has no attribute {', '.join(sorted(unknown))}; it has {', '.join(op.attrs) or 'none'}")
    bound = {**op.attrs, **attrs}
    if missing := [k for k, v in bound.items() if v is REQUIRED]:
        raise ProgramError(f"{op.name}: the attribute {', '.join(missing)} must be given")
    return bound


def new_builder() -> Builder:
    """A Builder over the whole operator set."""
    return Builder(OPERATORS)
