"""Which device entry points are emulated: operators (aclnn...) by name and signature, plain runtime functions by their C types."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Arguments = SimpleNamespace
Body = Callable[[Any], None]


class LimitError(ValueError):
    """A documented limit of an operator was violated. torch-npu shows the text in the RuntimeError of the call."""


class UnemulatedError(NotImplementedError):
    """A documented use of an operator for which the emulation has no reference."""


@dataclass(frozen=True)
class Operator:
    """`signature` names the C arguments in order, without the two of GetWorkspaceSize's outputs: "x gamma epsilon:d y rstd".
    The letter after the colon is a key of objects.ARGUMENTS, T (tensor) where none is given."""

    name: str
    signature: str
    compute: Body
    check: Body | None
    inspect: Body | None
    any_format: tuple[str, ...]

    @property
    def parameters(self) -> list[tuple[str, str]]:
        pairs = (p.partition(":") for p in self.signature.split())
        return [(name, letter or "T") for name, _, letter in pairs]


@dataclass(frozen=True)
class Function:
    types: tuple[Any, ...]
    body: Callable[..., int]


OPERATORS: dict[str, Operator] = {}
FUNCTIONS: dict[str, Function] = {}


def operator(
    name: str, signature: str, check: Body | None = None, inspect: Body | None = None, *, any_format: tuple[str, ...] = ()
) -> Callable[[Body], Body]:
    """Declares the emulation of an aclnn operator; its body reads and writes the tensors of `a`.

    Both checks raise LimitError: check(a) when the host calls (shapes, dtypes, host numbers), inspect(a) when the device runs
    (what only the data says: under capture, the data of the moment is nobody's). `any_format`: arguments that may be in
    FRACTAL_NZ."""

    def declare(compute: Body) -> Body:
        OPERATORS[name] = Operator(name, signature, compute, check, inspect, any_format)
        return compute

    return declare


def function(*types: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Declares a C function of the runtime by the name of its Python body, which returns an aclError."""

    def declare(body: Callable[..., int]) -> Callable[..., int]:
        FUNCTIONS[body.__name__] = Function(types, body)
        return body

    return declare


def need(condition: bool, limit: str) -> None:
    if not condition:
        raise LimitError(limit)


POINTER, SIZE, INT = c.c_void_p, c.c_size_t, c.c_int
