"""What an operator is: a typed signature with named dimensions, a numpy reference, example inputs and tolerances.

A signature reads ``x[..., hidden], weight[hidden], bias[hidden]? -> y[..., hidden]``. A dimension is a name (equal names must
have equal sizes), an integer, or ``...`` in front for any leading dimensions. ``:int32`` after the bracket gives an integer
dtype, ``:weight`` a constant in any resident weight format, ``?`` an argument that may be absent; ``kv:PagedKV`` without a
bracket is a state. Tensors without a suffix are activations: the backend chooses their dtype. ``*`` at the end: a matrix of a
product, so that rounding it (``quantize=``) costs a little noise; ``!``: an activation that decides, on which experts are asked or
how much of a state is kept, so that what is rounded on its way costs more.
Attributes are the reference's keyword-only parameters; one without a default is required.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from trivium.errors import ProgramError

OPSET = 1
REQUIRED: Any = inspect.Parameter.empty
Dim = int | str
Shape = tuple[Dim, ...]


class Arg(NamedTuple):
    """One tensor, weight or state in a signature. `dtype` is "float", "int32", "int64", "weight" or a state's class name."""

    name: str
    dims: tuple[str, ...] | None
    dtype: str
    optional: bool
    mark: str = ""

    @property
    def is_state(self) -> bool:
        return self.dims is None


class Signature(NamedTuple):
    args: tuple[Arg, ...]
    results: tuple[Arg, ...]


class Tolerance(NamedTuple):
    """`abs(got - want) <= atol + rtol * abs(want)`, elementwise, as numpy.allclose."""

    rtol: float
    atol: float


class Case(NamedTuple):
    """One example call: positional arguments (arrays, None, or reference states) and attributes."""

    args: tuple[Any, ...]
    attrs: Mapping[str, Any] = MappingProxyType({})


_ARG = re.compile(r"\s*(\w+)(?:\[([^\]]*)\])?(?::(\w+))?(\?)?([*!]?)\s*(?:,|$)")


def _parse_args(text: str) -> tuple[Arg, ...]:
    args, at = [], 0
    while at < len(text.rstrip()):
        m = _ARG.match(text, at)
        if m is None:
            raise ProgramError(f"operator signature: can't read {text[at:]!r}")
        name, dims, dtype, optional, mark = m.groups()
        parsed = None if dims is None else tuple(d.strip() for d in dims.split(",") if d.strip())
        args.append(Arg(name, parsed, dtype or "float", bool(optional), mark))
        at = m.end()
    return tuple(args)


def parse_signature(text: str) -> Signature:
    """Reads a signature; raises ProgramError on a malformed one."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ProgramError(f"operator signature {text!r} has no '->'")
    return Signature(_parse_args(left.strip()), _parse_args(right.strip()))


InferResults = Callable[[Sequence[Shape | None], Mapping[str, Any]], tuple[Shape, ...]]
MakeCases = Callable[["np.random.Generator"], Iterable[Case]]


class Operator(NamedTuple):
    """One member of the operator set. Calling it runs the numpy reference (float32 arithmetic)."""

    name: str
    signature: Signature
    reference: Callable[..., Any]
    cases: MakeCases
    tolerances: Mapping[str, Tolerance]
    attrs: Mapping[str, Any] = MappingProxyType({})
    infer: InferResults | None = None

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return self.reference(*args, **attrs)

    def result_shapes(self, shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
        """Shapes of the results from the arguments' (None: absent or a state); ProgramError where dimensions disagree."""
        if self.infer is not None:
            return self.infer(shapes, attrs)
        bound = self._bind(shapes)
        return tuple(self._resolve(r, bound, attrs) for r in self.signature.results if not r.is_state)

    def _bind(self, shapes: Sequence[Shape | None]) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for arg, shape in zip(self.signature.args, shapes, strict=True):
            if arg.dims is None or shape is None:
                continue
            dims = arg.dims
            if dims[:1] == ("...",):
                dims, lead = dims[1:], shape[: len(shape) - len(dims) + 1]
                if bound.setdefault("...", lead) != lead:
                    raise ProgramError(f"{self.name}: leading dimensions of {arg.name} are {lead}, not {bound['...']}")
                shape = shape[len(lead) :]
            if len(dims) != len(shape):
                raise ProgramError(f"{self.name}: {arg.name}{list(shape)} should have the dimensions {list(dims)}")
            for dim, size in zip(dims, shape, strict=True):
                want = int(dim) if dim.isdigit() else bound.setdefault(dim, size)
                if want != size:
                    raise ProgramError(f"{self.name}: dimension {dim} of {arg.name} is {size}, elsewhere {want}")
        return bound

    def _resolve(self, result: Arg, bound: Mapping[str, Any], attrs: Mapping[str, Any]) -> Shape:
        shape: list[Dim] = []
        for dim in result.dims or ():
            if dim == "...":
                shape.extend(bound["..."])
            elif dim.isdigit():
                shape.append(int(dim))
            elif dim in bound or dim in attrs:
                shape.append(bound[dim] if dim in bound else attrs[dim])
            else:
                raise ProgramError(f"{self.name}: nothing gives the dimension {dim} of {result.name}")
        return tuple(shape)


def collect(*modules: ModuleType) -> Mapping[str, Operator]:
    """All operators defined in `modules`, by name."""
    found = {v.name: v for m in modules for v in vars(m).values() if isinstance(v, Operator)}
    return MappingProxyType(found)
