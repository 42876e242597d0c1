"""The page pool as Ascend's attention reads it: token after token, [pages, page_size, heads, n], which is the neutral layout.

trivium_torch's kernels see the same memory as [heads, rows, n], a view, so that whatever has no fused kernel runs on it
unchanged. Two kinds of pages follow the pool's own: one of zeros, from which padding is read (see trivium_torch.pages), and
scratch pages, into which the padding of a captured step is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import CapacityError, ProgramError
from trivium.ops import StateSpec
from trivium_torch.pages import GroupStep, Layer, Paged

PAGE = 128
"""Tokens a page. Of all sizes only this one satisfies every rule of npu_fused_infer_attention_score_v2."""


LARGEST = 2**31 - 1
"""Numbers of a layer's keys, or values, that the attention operator can address."""


class TokenMajor(Layer):
    """A layer's memory. blocks: its paged tensors, [pages + 1 + scratch, page_size, heads, n]; none of a recurrent state."""

    def __init__(
        self, spec: StateSpec, page_size: int, dtype: str, pages: int, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
        scratch: int,
    ) -> None:  # fmt: skip
        self.blocks: list[Tensor] = []

        def token_major(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
            heads, rows, n = shape
            blocks = rows // page_size + scratch, page_size, heads, n
            if math.prod(blocks) > LARGEST:
                raise CapacityError(f"{pages} pages are {math.prod(blocks)} numbers a layer; attention can address {LARGEST}")
            self.blocks.append(allocate(blocks, kind))
            return self.blocks[-1].flatten(0, 1)[:rows].transpose(0, 1)

        super().__init__(spec, page_size, dtype, pages, token_major if spec.paged else allocate)


@dataclass(frozen=True)
class Blocks(Paged):
    """A paged state of one step; `blocks` as in TokenMajor."""

    blocks: tuple[Tensor, ...] = field(default=())


@dataclass(frozen=True)
class Reads:
    """What attention is told of S sequences that have queries.

    rows: int64[tokens], their tokens in the step, None: all of it in order. ends: cumulative numbers of queries; lengths: keys
    of each sequence, from the first page of its row of `table` on; both on the host, where the operator wants them. table:
    int32[S, pages] on the device. hidden: int32[S], how many of the first keys lie before the window of its first query; None:
    none does. widest: the most queries of a sequence."""

    rows: Tensor | None
    ends: list[int]
    lengths: list[int]
    table: Tensor
    hidden: Tensor | None
    widest: int


def whole(step: GroupStep, window: int | None) -> Reads:
    """All sequences of a step, without pages before the window; worked out once for all layers alike."""
    return step.once(("whole", window), lambda: _reads(step, _present(step), window))  # type: ignore[no-any-return]


def by_length(step: GroupStep, window: int | None) -> list[Reads]:
    """Those with equally many queries together."""
    return step.once(("by length", window), lambda: list(_by_length(step, window)))  # type: ignore[no-any-return]


def pieces(step: GroupStep, queries: int) -> Reads:
    """All sequences, each cut into pieces of so many queries; a piece sees the keys up to its own last query."""
    return step.once(("pieces", queries), lambda: _pieces(step, queries))  # type: ignore[no-any-return]


def _pieces(step: GroupStep, queries: int) -> Reads:
    seqs, ends, lengths = [], [], []
    for s in _present(step).tolist():
        start, stop, context = int(step.starts[s]), int(step.starts[s + 1]), int(step.contexts[s])
        for end in [*range(start + queries, stop, queries), stop]:
            seqs.append(s)
            ends.append(end)
            lengths.append(context - (stop - end))
    keys = np.array(lengths)
    table = step.upload(host_table(step, np.array(seqs), np.zeros_like(keys), keys))
    return Reads(None, ends, lengths, table, None, int(np.diff(ends, prepend=0).max()))


def _present(step: GroupStep) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.diff(step.starts))


def _by_length(step: GroupStep, window: int | None) -> Iterator[Reads]:
    seqs = _present(step)
    counts = np.diff(step.starts)[seqs]
    for count in np.unique(counts):
        yield _reads(step, seqs[counts == count], window)


def _reads(step: GroupStep, seqs: npt.NDArray[np.intp], window: int | None) -> Reads:
    queries, contexts = np.diff(step.starts)[seqs].astype(np.int64), step.contexts[seqs].astype(np.int64)
    first = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - queries - window + 1)
    lengths, hidden = contexts - first // step.page_size * step.page_size, first % step.page_size
    rows = None
    if len(seqs) < len(_present(step)):
        rows = step.upload(np.concatenate([np.arange(step.starts[s], step.starts[s + 1], dtype=np.int64) for s in seqs]))
    return Reads(
        rows, np.cumsum(queries).tolist(), lengths.tolist(), step.upload(host_table(step, seqs, first, contexts)),
        step.upload(hidden.astype(np.int32)) if hidden.any() else None, int(queries.max()),
    )  # fmt: skip


def host_table(
    step: GroupStep, seqs: npt.NDArray[np.intp], first: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """int32[S, pages]: each sequence's pages from that of position `first` to its last; beyond, the page of zeros: the operator
    doesn't look, but a number that is no page must not stand there. ProgramError if a page is missing."""
    start, stop = first // step.page_size, -(-contexts // step.page_size)
    at = start[:, None] + np.arange(int((stop - start).max(initial=0)))
    wanted = at < stop[:, None]
    found = step.table[seqs[:, None], np.where(wanted, at, 0)]
    if (wanted & (found < 0)).any():
        raise ProgramError("a position is read for which the block table has no page")
    return np.where(wanted, found, step.zero // step.page_size).astype(np.int32)
