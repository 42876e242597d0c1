"""A step cut into rectangles: sequences of like query length, one below the other, padded on the right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trivium.ops import Batch

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
_WORTH = 24
"""Tokens of padding that cost about what one more run costs (it reads all weights once more)."""


@dataclass
class Rectangle:
    """`seqs` int64[B] of the step, in the order of their rows from row `base` on. queries, past: int64[B], tokens of the step and
    tokens before it. grid: int64[B, S], the step's token in each cell; padding repeats a sequence's last token."""

    seqs: I64
    base: int
    queries: I64
    past: I64
    grid: I64
    real: npt.NDArray[np.bool_]

    @property
    def tokens(self) -> I64:
        """The tokens, cell by cell without padding."""
        return self.grid[self.real]

    def places(self) -> tuple[I64, I64]:
        """Row and position of each of `tokens`."""
        at, column = np.nonzero(self.real)
        return at + self.base, self.past[at] + column

    def cells(self) -> tuple[I64, I64]:
        """Row and position of every cell; padding repeats a sequence's last one."""
        column = np.minimum(np.arange(self.grid.shape[1]), self.queries[:, None] - 1)
        row = np.broadcast_to(np.arange(len(self.seqs))[:, None] + self.base, column.shape)
        return row.reshape(-1), (self.past[:, None] + column).reshape(-1)


def rectangle(batch: Batch, seqs: I64, base: int) -> Rectangle:
    """The rectangle of some sequences of a step."""
    starts = batch.query_starts.astype(np.int64)
    queries = (starts[1:] - starts[:-1])[seqs]
    past = batch.context_lens.astype(np.int64)[seqs] - queries
    column = np.arange(int(queries.max()))
    grid = starts[seqs, None] + np.minimum(column, queries[:, None] - 1)
    return Rectangle(seqs, base, queries, past, grid, column < queries[:, None])


def cut(batch: Batch) -> list[I64]:
    """The sequences that have tokens, shortest first, in groups whose padding is worth less than another run."""
    lengths = np.diff(batch.query_starts)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups: list[list[int]] = []
    for seq in order.tolist():
        if groups and len(groups[-1]) * (lengths[seq] - lengths[groups[-1][-1]]) <= _slack(groups[-1], lengths):
            groups[-1].append(seq)
        else:
            groups.append([seq])
    return [np.array(group, np.int64) for group in groups]


def _slack(group: list[int], lengths: npt.NDArray[np.int32]) -> int:
    """What a group may still grow by in padding."""
    longest = int(lengths[group[-1]])
    return _WORTH - sum(longest - int(lengths[seq]) for seq in group)
