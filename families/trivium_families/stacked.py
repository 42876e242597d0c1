"""Weights that a checkpoint cuts otherwise than the Program: an expert a tensor, where `moe_experts` wants one tensor for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError
from trivium.models import RawConfig
from trivium.ops import Weight

Make = Callable[[], Weight]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


class Stacked(Weight):
    """Weights of one shape and format as one with a new first dimension. Their data is read and joined when it is asked for, and
    not kept: between opening and loading, a model takes no memory."""

    def __init__(self, name: str, parts: Sequence[Weight]) -> None:
        first = parts[0]
        if odd := [p for p in parts if (p.shape, p.format) != (first.shape, first.format)]:
            raise CheckpointError(f"{odd[0].name} is {odd[0].format}{list(odd[0].shape)}, but {first.name} is "
                                  f"{first.format}{list(first.shape)}; they must agree")  # fmt: skip
        origin = "".join(f"({p.origin})" for p in parts) if all(p.origin for p in parts) else ""
        fields = {
            "name": name,
            "shape": (len(parts), *first.shape),
            "format": first.format,
            "decoder": self._decode,
            "origin": origin,
        }
        for field, value in {**fields, "parts": parts}.items():
            object.__setattr__(self, field, value)

    parts: Sequence[Weight]

    @property
    def data(self) -> npt.NDArray[Any]:
        return np.stack([p.data for p in self.parts])

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def slice_rows(self, start: int, stop: int) -> Weight:
        return Stacked(self.name, self.parts[start:stop])

    def _decode(self, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return np.stack([part.decoder(one).reshape(part.shape) for part, one in zip(self.parts, data, strict=True)])


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
