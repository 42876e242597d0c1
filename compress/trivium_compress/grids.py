"""The numbers that a format can hold, and which of them stand for given weights with the least error.

A grid divides each row of a matrix into groups of consecutive inputs; all numbers of a group are `scale * code + offset` with whole
codes within bounds. Scales and offsets are what the format can store, so that errors are measured on what a reader will get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium_compress.floats import rounded

Array = npt.NDArray[Any]
CHUNK = 1 << 19
"""Numbers that are tried at a time: what the search needs beside its result stays small."""


class Steps(NamedTuple):
    """What codes of each group mean: float32[rows, groups] each. `parts`: what they are made of, where a format stores that."""

    scale: Array
    offset: Array
    parts: tuple[Array, ...] = ()

    def rows(self, start: int, stop: int) -> Steps:
        return Steps(self.scale[start:stop], self.offset[start:stop])


@dataclass(frozen=True)
class Grid(ABC):
    """`group`: inputs that share a scale, 0 for a whole row. low, high: bounds of the codes. `shrinks`: how many smaller ranges are
    tried, the least of which is `least` of the whole."""

    group: int
    low: int
    high: int
    shrinks: int = 20
    least: float = 0.4

    @property
    def holds_zero(self) -> bool:
        """Whether some code means exactly 0 whatever the scales."""
        return True

    def size(self, columns: int) -> int:
        """Inputs that share a scale in a matrix of so many columns."""
        return self.group or columns

    @abstractmethod
    def candidates(self, w: Array, shrinks: Array) -> Iterator[Steps]:
        """Scales and offsets for w[rows, groups, size], one for each of `shrinks` (1.0: the whole range)."""

    def refit(self, w: Array, codes: Array, importance: Array, steps: Steps) -> Steps:
        """Better steps for given codes: of the scale, by least squares."""
        spread = codes + _ratio(steps.offset, steps.scale)[..., None]
        scale = _ratio((importance * w * spread).sum(-1), (importance * spread * spread).sum(-1))
        return self.stored(Steps(scale, steps.offset / np.where(steps.scale == 0, 1, steps.scale) * scale))

    @abstractmethod
    def stored(self, steps: Steps) -> Steps:
        """The nearest steps that the format can hold."""

    def codes(self, w: Array, steps: Steps) -> Array:
        """The nearest codes for w[rows, groups, size], as floats."""
        inverse = _ratio(np.ones_like(steps.scale), steps.scale)[..., None]
        return np.asarray(np.clip(np.rint((w - steps.offset[..., None]) * inverse), self.low, self.high))

    def values(self, codes: Array, steps: Steps) -> Array:
        """What codes[rows, groups, size] stand for."""
        return np.asarray(codes * steps.scale[..., None] + steps.offset[..., None])

    def fit(self, w: Array, importance: Array | None = None, *, search: bool = True) -> Steps:
        """Steps for w[rows, columns] that make sum(importance * error²) small. importance: float32[columns], how much the square of
        an error in each input counts (the diagonal of a Hessian); None: all the same. search: False takes the whole range."""
        rows, columns = w.shape
        size = self.size(columns)
        weights = np.ones(columns, np.float32) if importance is None else np.asarray(importance, np.float32)
        weights = weights.reshape(1, -1, size) + np.float32(1e-12) * max(float(weights.max()), 1e-30)
        shrinks = np.linspace(1.0, self.least, self.shrinks) if search else np.ones(1)
        step = max(1, CHUNK // columns)
        parts = [
            self._fit(np.asarray(w[start : start + step], np.float32).reshape(-1, columns // size, size), weights, shrinks, search)
            for start in range(0, rows, step)
        ]
        return self.settled(Steps(np.concatenate([p.scale for p in parts]), np.concatenate([p.offset for p in parts])))

    def settled(self, steps: Steps) -> Steps:
        """What becomes of steps that were chosen group by group, where groups have something in common."""
        return steps

    def _fit(self, w: Array, importance: Array, shrinks: Array, refine: bool) -> Steps:
        """Of some rows: the best of the candidates and, of each, its refit."""
        best: Steps | None = None
        least = np.full(w.shape[:2], np.inf, np.float32)
        for steps in self.candidates(w, shrinks):
            for tried in self._tries(w, importance, steps, refine):
                error = self.error(w, importance, tried)
                better = error < least
                least = np.where(better, error, least)
                best = tried if best is None else _chosen(better, tried, best)
        assert best is not None
        return best

    def _tries(self, w: Array, importance: Array, steps: Steps, refine: bool) -> Iterator[Steps]:
        yield steps
        if refine:
            yield self.refit(w, self.codes(w, steps), importance, steps)

    def error(self, w: Array, importance: Array, steps: Steps) -> Array:
        """sum(importance * error²) of each group: float32[rows, groups]."""
        miss = self.values(self.codes(w, steps), steps) - w
        return np.asarray((importance * miss * miss).sum(-1))


@dataclass(frozen=True)
class Symmetric(Grid):
    """Codes around 0. `dtype`: of the stored scale. `signed`: scales may be negative, so that the number of largest size gets the
    bound that reaches further."""

    dtype: str = "bfloat16"
    signed: bool = False

    def candidates(self, w: Array, shrinks: Array) -> Iterator[Steps]:
        top = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)[..., 0]
        reach = top / self.low if self.signed else np.abs(top) / self.high
        for shrink in shrinks:
            scale = rounded(reach * np.float32(shrink), self.dtype)
            yield Steps(scale, np.zeros_like(scale))

    def stored(self, steps: Steps) -> Steps:
        return Steps(rounded(steps.scale, self.dtype), np.zeros_like(steps.scale))


@dataclass(frozen=True)
class ZeroPoint(Grid):
    """Codes from `low` to `high`, one of which, the zero point, means 0. `dtype`: of the stored scale."""

    dtype: str = "bfloat16"

    def candidates(self, w: Array, shrinks: Array) -> Iterator[Steps]:
        bottom, top = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        for shrink in shrinks:
            scale = rounded((top - bottom) * np.float32(shrink / (self.high - self.low)), self.dtype)
            yield self.stored(Steps(scale, bottom * np.float32(shrink) - self.low * scale))

    def stored(self, steps: Steps) -> Steps:
        scale = rounded(steps.scale, self.dtype)
        return Steps(scale, -scale * self.zeros(Steps(scale, steps.offset)))

    def zeros(self, steps: Steps) -> Array:
        """The zero points, as floats."""
        return np.clip(np.rint(-_ratio(steps.offset, steps.scale)), self.low, self.high)


@dataclass(frozen=True)
class Affine(Grid):
    """Scale and offset stored as they are, in `dtype`: no code need mean 0."""

    dtype: str = "float16"

    @property
    def holds_zero(self) -> bool:
        return False

    def candidates(self, w: Array, shrinks: Array) -> Iterator[Steps]:
        bottom, top = w.min(-1), w.max(-1)
        middle, reach = (bottom + top) / 2, (top - bottom) / 2
        for shrink in shrinks:
            low, scale = middle - reach * np.float32(shrink), reach * np.float32(2 * shrink / (self.high - self.low))
            yield self.stored(Steps(scale, low - self.low * scale))

    def stored(self, steps: Steps) -> Steps:
        return Steps(rounded(steps.scale, self.dtype), rounded(steps.offset, self.dtype))

    def refit(self, w: Array, codes: Array, importance: Array, steps: Steps) -> Steps:
        """Scale and offset by weighted least squares; where all codes are equal there is no line, and `steps` stay."""
        i, q = np.broadcast_to(importance, w.shape), codes
        total, first, second = i.sum(-1), (i * q).sum(-1), (i * q * q).sum(-1)
        both, plain = (i * q * w).sum(-1), (i * w).sum(-1)
        spread = total * second - first * first
        flat = spread <= 1e-6 * total * second
        scale = np.where(flat, steps.scale, _ratio(total * both - first * plain, np.where(flat, 1, spread)))
        offset = np.where(flat, steps.offset, (plain - scale * first) / total)
        return self.stored(Steps(scale.astype(np.float32), offset.astype(np.float32)))


@dataclass(frozen=True)
class SuperBlocks(Affine):
    """Scales and offsets of 8 groups of 32 are whole numbers from 0 to 63 times two float16 that these have in common, the offsets
    with the sign turned (GGML's Q4_K)."""

    BLOCKS = 8
    MOST = 63

    def candidates(self, w: Array, shrinks: Array) -> Iterator[Steps]:
        bottom, top = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        for shrink in shrinks:
            factor = np.float32(shrink)
            yield self.stored(Steps((top - bottom) * factor / (self.high - self.low), bottom * factor))

    def stored(self, steps: Steps) -> Steps:
        """Before they are settled only the signs count."""
        return Steps(np.maximum(steps.scale, 0), np.minimum(steps.offset, 0))

    def settled(self, steps: Steps) -> Steps:
        scale, whole = self.parts(steps.scale)
        least, negative = self.parts(-steps.offset)
        shape, parts = steps.scale.shape, (scale, whole, least, negative)
        return Steps((scale[..., None] * whole).reshape(shape), -(least[..., None] * negative).reshape(shape), parts)

    def parts(self, values: Array) -> tuple[Array, Array]:
        """(common factor float32[rows, blocks], whole numbers float32[rows, blocks, 8]) of values[rows, groups] >= 0."""
        groups = values.reshape(len(values), -1, self.BLOCKS)
        common = rounded(groups.max(-1) / np.float32(self.MOST), "float16")
        whole = np.clip(np.rint(_ratio(groups, common[..., None])), 0, self.MOST)
        return common, whole


def _chosen(where: Array, these: Steps, others: Steps) -> Steps:
    """Group by group: `these` where it says so."""
    return Steps(np.where(where, these.scale, others.scale), np.where(where, these.offset, others.offset))


def _ratio(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0, casting="same_kind")


def shaped(grid: Grid, w: Array) -> Array:
    """w[rows, columns] as [rows, groups, size]."""
    return w.reshape(len(w), -1, grid.size(w.shape[1]))


def nearest(grid: Grid, w: Array, steps: Steps) -> Array:
    """Round to nearest: int16 codes[rows, columns] of w[rows, columns]."""
    out = np.empty(w.shape, np.int16)
    step = max(1, CHUNK // w.shape[1])
    for start in range(0, len(w), step):
        part = np.asarray(w[start : start + step], np.float32)
        out[start : start + step] = grid.codes(shaped(grid, part), steps.rows(start, start + step)).reshape(part.shape)
    return out


def meant(grid: Grid, codes: Array, steps: Steps) -> Array:
    """What codes[rows, columns] stand for, float32 of the same shape."""
    out = np.empty(codes.shape, np.float32)
    step = max(1, CHUNK // codes.shape[1])
    for start in range(0, len(codes), step):
        part = codes[start : start + step].astype(np.float32)
        out[start : start + step] = grid.values(shaped(grid, part), steps.rows(start, start + step)).reshape(part.shape)
    return out
