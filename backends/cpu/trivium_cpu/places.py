"""Where values lie during a step, and when threads must wait for each other."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALIGN = 16
"""Numbers: places start at cache lines."""


class Place(NamedTuple):
    """A piece of an arena or a constant. space: "tokens", "rows", "pooled" (`offset` and `width` in numbers a row of the step),
    "fixed" (numbers), "constant", "input" or "kv" (offset: the state's index). `ref`: the native form of it."""

    space: str
    offset: int
    width: int
    ref: Any


@dataclass
class Arena:
    """First-fit allocation in numbers; `size` is the high-water mark."""

    size: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, width: int) -> int:
        """Offset of `width` numbers."""
        width = _rounded(width)
        for i, (offset, length) in enumerate(self._free):
            if length >= width:
                self._free[i : i + 1] = [(offset + width, length - width)] if length > width else []
                return offset
        if self._free and sum(self._free[-1]) == self.size:
            offset, _ = self._free.pop()
        else:
            offset = self.size
        self.size = offset + width
        return offset

    def release(self, offset: int, width: int) -> None:
        """Gives `width` numbers at `offset` back."""
        width = _rounded(width)
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and offset + width == self._free[i][0]:
            width += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset, before = self._free.pop(i - 1)
            width += before
            i -= 1
        self._free.insert(i, (offset, width))


def _rounded(width: int) -> int:
    return -(-max(width, 1) // ALIGN) * ALIGN


class Barriers:
    """Finds where threads must meet: where an operation touches what another wrote since they last met, or writes what it read."""

    def __init__(self) -> None:
        self._read: list[Place] = []
        self._written: list[Place] = []

    def needed(self, reads: Iterable[Place], writes: Iterable[Place]) -> bool:
        """Whether the operation that comes next must wait; notes what it touches."""
        reads, writes = [p for p in reads if _moves(p)], [p for p in writes if _moves(p)]
        wait = any(_overlap(a, b) for a in (*reads, *writes) for b in self._written) or any(
            _overlap(a, b) for a in writes for b in self._read
        )
        if wait:
            self.reset()
        self._read += reads
        self._written += writes
        return wait

    def reset(self) -> None:
        """All threads have met."""
        self._read.clear()
        self._written.clear()


def _moves(place: Place) -> bool:
    return place.space not in ("constant", "input")


def _overlap(a: Place, b: Place) -> bool:
    return a.space == b.space and a.offset < b.offset + b.width and b.offset < a.offset + a.width
