"""Weights that a checkpoint cuts otherwise than the Program: an expert a tensor, where `moe_experts` wants one tensor for all.

They are read when a backend asks for their data, and not kept: between opening and loading, a model takes no memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError
from trivium.models import RawConfig
from trivium.ops import Weight
from trivium_formats.lazy import Lazy, Parts

Make = Callable[[], Weight]
Array = npt.NDArray[Any]
PLAIN = ("float32", "float16", "bfloat16")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


class Stacked(Lazy):
    """Weights of one shape and format as one with a new first dimension."""

    def __init__(self, name: str, parts: Sequence[Weight]) -> None:
        first = parts[0]
        if odd := [p for p in parts if (p.shape, p.format) != (first.shape, first.format)]:
            raise CheckpointError(f"{odd[0].name} is {odd[0].format}{list(odd[0].shape)}, but {first.name} is "
                                  f"{first.format}{list(first.shape)}; they must agree")  # fmt: skip
        origin = "".join(f"({p.origin})" for p in parts) if all(p.origin for p in parts) else ""
        nbytes = sum(p.nbytes for p in parts)
        super().__init__(name, (len(parts), *first.shape), first.format, self._stack, self._decode, origin, nbytes)
        object.__setattr__(self, "_members", parts)

    _members: Sequence[Weight]

    def parts(self) -> Parts | None:
        """Those of the weights, each array with the new first dimension; None where one has none."""
        found = [p.parts() if isinstance(p, Lazy) else None for p in self._members]
        whole = [parts for parts in found if parts is not None]
        if len(whole) < len(found):
            return None
        return {name: _together([parts[name] for parts in whole]) for name in whole[0]}

    def _stack(self) -> Array:
        return np.stack([p.data for p in self._members])

    def _decode(self, data: Array) -> npt.NDArray[np.float32]:
        decode, shape = self._members[0].decoder, self._members[0].shape
        return np.stack([decode(one).reshape(shape) for one in data])


def _together(values: Sequence[Any]) -> Any:
    """Arrays stacked; what is no array (None, a block's shape) is of all alike."""
    return np.stack(values) if isinstance(values[0], np.ndarray) else values[0]


class Rearranged(Lazy):
    """The numbers of a weight in another order, or some of them: `take` of its array[shape]. A plain float stays what it is, and so
    does any format where `take` leaves rows (the last dimension) whole and that is one array; of others the decoded float32
    numbers are taken."""

    def __init__(self, name: str, weight: Weight, take: Callable[[Array], Array], *, whole_rows: bool = False) -> None:
        kept = weight.format in PLAIN or (whole_rows and not (isinstance(weight, Lazy) and weight.in_parts))
        shape = take(np.broadcast_to(np.int8(0), weight.shape)).shape
        count = math.prod(shape)
        size = weight.nbytes * count // max(math.prod(weight.shape), 1) if kept else count * 4
        format, decoder = (weight.format, weight.decoder) if kept else ("float32", _same)
        origin = weight.origin and f"{weight.origin} as {name}"
        super().__init__(name, shape, format, self._taken, decoder, origin, size)
        vars(self).update(_source=weight, _take=take, _kept_as_stored=kept)

    _source: Weight
    _take: Callable[[Array], Array]
    _kept_as_stored: bool

    def _taken(self) -> Array:
        source = self._source
        return np.ascontiguousarray(self._take(source.data if self._kept_as_stored else source.decode()))


def _same(data: Array) -> npt.NDArray[np.float32]:
    return data


def stack_experts(config: RawConfig, tensors: Mapping[str, Make], *, names: Mapping[str, str] | None = None) -> Mapping[str, Make]:
    """The tensors with PREFIX.experts.0.NAME, PREFIX.experts.1.NAME, ... as one, PREFIX.experts.NAME. `names`: parts of NAME that
    are called otherwise in the Program. Raises CheckpointError if an expert lacks a tensor that another has."""
    stacks: dict[str, dict[int, Make]] = {}
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        if found := _EXPERT.fullmatch(name):
            prefix, expert, rest = found.groups()
            stem, dot, suffix = rest.partition(".")
            stacks.setdefault(f"{prefix}.{(names or {}).get(stem, stem)}{dot}{suffix}", {})[int(expert)] = make
        else:
            arranged[name] = make
    for name, makers in stacks.items():
        if sorted(makers) != list(range(len(makers))):
            missing = next(i for i in range(len(makers)) if i not in makers)
            raise CheckpointError(f"the checkpoint lacks {name.replace('.experts.', f'.experts.{missing}.')}")
        arranged[name] = partial(_stacked, name, [makers[i] for i in range(len(makers))])
    return arranged


def _stacked(name: str, makers: Sequence[Make]) -> Weight:
    return Stacked(name, [make() for make in makers])
