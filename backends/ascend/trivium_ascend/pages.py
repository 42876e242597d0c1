"""The page pool as Ascend's attention reads it: token after token, [pages, page_size, heads, n], which is the neutral layout.

trivium_torch's kernels see the same memory as [heads, rows, n], a view, so that whatever has no fused kernel runs on it
unchanged. Two kinds of pages follow the pool's own: one of zeros, from which padding is read (see trivium_torch.pages), and
scratch pages, into which the padding of a captured step is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import CapacityError, ProgramError
from trivium.ops import StateSpec
from trivium_torch.pages import Bytes, GroupStep, Layer, Paged, rows_of

PAGE = 128
"""Tokens a page. Of all sizes only this one satisfies every rule of npu_fused_infer_attention_score_v2."""


LARGEST = 2**31 - 1
"""Numbers of a layer's keys, or values, that the attention operator can address."""


class Scaled(Bytes):
    """int8 rows whose scales lie as attention reads them, float32[blocks, heads, page_size]. Each is a bfloat16 number, so that
    pages mean what they mean everywhere (ops.state.kv_int8)."""

    def read(self, index: Tensor) -> Tensor:
        scales = self.parts[1]
        size = scales.shape[2]
        found = scales[index // size, :, index % size].permute(2, 0, 1)[..., None]
        return self._rows(0, index).to(torch.float32) * found

    def write(self, slots: Tensor, rows: Tensor) -> None:
        whole, scale = self.rounded(rows)
        numbers, scales = self.parts
        at, (_, heads, size) = slots.to(torch.int64), scales.shape
        places = (at // size * heads * size + at % size) + size * torch.arange(heads, device=at.device)[:, None]
        numbers.index_copy_(1, at, whole)
        scales.view(-1).index_copy_(0, places.flatten(), scale.to(torch.float32).flatten())


class TokenMajor(Layer):
    """A layer's memory. blocks: its paged tensors, [pages + 1 + scratch, page_size, heads, n]; none of a recurrent state. scales:
    those of int8 blocks, see Scaled."""

    def __init__(
        self, spec: StateSpec, page_size: int, dtype: str, pages: int, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
        scratch: int,
    ) -> None:  # fmt: skip
        self.blocks: list[Tensor] = []
        self.scales: list[Tensor] = []

        def token_major(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
            heads, rows, n = shape
            if dtype == "int8" and kind != torch.int8:
                self.scales.append(allocate((rows // page_size + scratch, heads, page_size), torch.float32))
                return self.scales[-1]
            blocks = rows // page_size + scratch, page_size, heads, n
            if math.prod(blocks) > LARGEST:
                raise CapacityError(f"{pages} pages are {math.prod(blocks)} numbers a layer; attention can address {LARGEST}")
            self.blocks.append(allocate(blocks, kind))
            stored = self.blocks[-1].flatten(0, 1).transpose(0, 1)
            return stored if dtype == "int8" else stored[:, :rows]  # torch writes int8, a captured step's padding too

        super().__init__(spec, page_size, dtype, pages, token_major if spec.paged else allocate)
        if self.scales:
            self.stores = tuple(Scaled(store.parts) for store in self.stores)

    def tensors(self) -> Iterator[Tensor]:
        if not self.scales:
            yield from super().tensors()
        else:
            yield from (t.transpose(0, 1)[:, : self.pages + 1] for t in self.scales)
            yield from (t[None, : self.pages + 1] for t in self.blocks)


def scale_bytes(spec: StateSpec, page_size: int) -> int:
    """Bytes by which the scales of a page of int8 are wider here than bfloat16."""
    return 2 * page_size * sum(heads for heads, _ in rows_of(spec)) if spec.paged else 0


@dataclass(frozen=True)
class Blocks(Paged):
    """A paged state of one step; `blocks` and `scales` as in TokenMajor."""

    blocks: tuple[Tensor, ...] = field(default=())
    scales: tuple[Tensor, ...] = field(default=())


class Cut(NamedTuple):
    """Pieces of sequences, int64[P] each: of which sequence, the tokens of the step from `starts` to before `stops`, and how
    many keys the last of them sees."""

    seqs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]

    def only(self, which: slice | npt.NDArray[np.bool_]) -> Cut:
        return Cut(*(a[which] for a in self))


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


def whole(step: GroupStep, window: int | None) -> list[Reads]:
    """All sequences of a step, without pages before the window; worked out once for all layers alike. One call's worth, but where
    sequences share so many pages that all their tables together are longer than the pool."""
    return step.once(("whole", window), lambda: list(_reads(step, _present(step), window)))  # type: ignore[no-any-return]


def by_length(step: GroupStep, window: int | None) -> list[Reads]:
    """Those with equally many queries together."""
    return step.once(("by length", window), lambda: list(_by_length(step, window)))  # type: ignore[no-any-return]


def pieces(step: GroupStep, queries: int) -> list[Reads]:
    """All sequences, each cut into pieces of so many queries; a piece sees the keys up to its own last query."""
    return step.once(("pieces", queries), lambda: list(_reads(step, _pieces(step, queries), None)))  # type: ignore[no-any-return]


def _present(step: GroupStep) -> Cut:
    """Every sequence that has queries."""
    seqs = np.flatnonzero(np.diff(step.starts))
    return Cut(
        seqs, step.starts[seqs].astype(np.int64), step.starts[seqs + 1].astype(np.int64), step.contexts[seqs].astype(np.int64)
    )


def _by_length(step: GroupStep, window: int | None) -> Iterator[Reads]:
    found = _present(step)
    counts = found.stops - found.starts
    for count in np.unique(counts):
        yield from _reads(step, found.only(counts == count), window)


def _pieces(step: GroupStep, queries: int) -> Cut:
    rows: list[tuple[int, int, int, int]] = []
    for seq, start, stop, context in zip(*(a.tolist() for a in _present(step)), strict=True):
        for end in [*range(start + queries, stop, queries), stop]:
            rows.append((seq, rows[-1][2] if rows and rows[-1][0] == seq else start, end, context - (stop - end)))
    return Cut(*np.array(rows, np.int64).reshape(-1, 4).T)


def _reads(step: GroupStep, cut: Cut, window: int | None) -> Iterator[Reads]:
    """One call's worth after the other: the operator wants no more pages in all tables together than there are in the pool."""
    first = np.zeros_like(cut.contexts)
    if window is not None:
        first = np.maximum(0, cut.contexts - (cut.stops - cut.starts) - window + 1)
    pages = -(-cut.contexts // step.page_size) - first // step.page_size
    limit, begin = step.zero // step.page_size + 1, 0
    everything = int(step.starts[-1])
    while begin < len(pages):
        fits = int(np.searchsorted(np.cumsum(pages[begin:]), limit, side="right"))
        some = slice(begin, begin + max(fits, 1))
        yield _call(step, cut.only(some), first[some], everything)
        begin = some.stop


def _call(step: GroupStep, cut: Cut, first: npt.NDArray[np.int64], everything: int) -> Reads:
    queries, hidden = cut.stops - cut.starts, first % step.page_size
    rows = None
    if int(queries.sum()) < everything:
        rows = step.upload(np.concatenate([np.arange(a, b) for a, b in zip(cut.starts, cut.stops, strict=True)]))
    return Reads(
        rows, np.cumsum(queries).tolist(), (cut.contexts - first // step.page_size * step.page_size).tolist(),
        step.upload(host_table(step, cut.seqs, first, cut.contexts)),
        step.upload(hidden.astype(np.int32)) if hidden.any() else None, int(queries.max()),
    )  # fmt: skip


def host_table(
    step: GroupStep, seqs: npt.NDArray[np.int64], first: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]
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
