"""Collectives of tensor and pipeline parallelism. The references are those of a group of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivium.errors import ProgramError, UnsupportedError
from trivium.ops.examples import Array, operator
from trivium.ops.schema import Shape


@operator("x[..., n] -> y[..., n]")
def all_reduce(x: Array) -> Array:
    """The sum of x over the ranks of the tensor-parallel group."""
    return x


def _infer_gather(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    shape, dim = list(shapes[0] or ()), attrs["dim"]
    size = shape[dim] if -len(shape) <= dim < len(shape) else None
    if not isinstance(size, int):
        raise ProgramError(f"all_gather: dimension {dim} of {shape} has no fixed size")
    shape[dim] = size * attrs["ranks"]
    return (tuple(shape),)


@operator("x[..., n] -> y[..., m]", {"dim": -1}, infer=_infer_gather)
def all_gather(x: Array, *, dim: int, ranks: int = 1) -> Array:
    """The x of all `ranks` ranks of the tensor-parallel group, in order of rank, one after the other along `dim`."""
    if ranks != 1:
        raise UnsupportedError(f"the reference of all_gather has one rank; {ranks} were asked for")
    return x


@operator("x[..., n] -> y[..., n]", {"rank": 0})
def send(x: Array, *, rank: int) -> Array:
    """Sends x to a rank of the pipeline; the result is x itself."""
    return x


@operator("like[..., n] -> y[..., n]", {"rank": 0})
def recv(like: Array, *, rank: int) -> Array:
    """What a rank of the pipeline sends, of like's shape. A group of one rank receives `like` itself."""
    return like
