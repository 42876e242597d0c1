"""The page pool as torch tensors, and where a step's tokens lie in it.

Keys and values are kept head by head, [heads, pages * page_size, n], so that what a step gathers is at once the batch of a matrix
product. One page more than asked for stays zero: padding is read from there, so that nothing stale can reach a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import ProgramError
from trivium.ops import Batch, StateSpec

E4M3_MAX = 448.0
LANES = 16
"""Keys are padded to a multiple of this, and sequences of like length go together."""


class Floats:
    """Rows of numbers in a float dtype: [heads, rows, n]."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self.parts = parts

    def read(self, index: Tensor) -> Tensor:
        """The rows index[sequences, keys], [heads, sequences, keys, n], in float32 or the KV dtype."""
        return self._rows(0, index)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Stores rows[tokens, heads, n] at slots[tokens]."""
        self.parts[0].index_copy_(1, slots, rows.transpose(0, 1).to(self.parts[0].dtype))

    def _rows(self, part: int, index: Tensor) -> Tensor:
        found = self.parts[part].index_select(1, index.flatten())
        return found.view(found.shape[0], *index.shape, found.shape[-1])

    @staticmethod
    def dtypes(n: int, dtype: str) -> tuple[tuple[int, torch.dtype], ...]:
        """(numbers a row, dtype) of each part."""
        return ((n, getattr(torch, dtype)),)


class Bytes(Floats):
    """int8 with a bfloat16 scale for each row of a token and head, as ops.state.kv_int8 defines it."""

    def read(self, index: Tensor) -> Tensor:
        return self._rows(0, index).to(torch.float32) * self._rows(1, index).to(torch.float32)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        for part, new in zip(self.parts, self.rounded(rows), strict=True):
            part.index_copy_(1, slots, new)

    @staticmethod
    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        """What rows[tokens, heads, n] are stored as: int8[heads, tokens, n] and bfloat16[heads, tokens, 1]."""
        x = rows.transpose(0, 1).to(torch.float32)
        scale = (x.abs().amax(dim=-1, keepdim=True) / 127).to(torch.bfloat16)
        divisor = torch.where(scale == 0, torch.inf, scale.to(torch.float32))
        return torch.round((x / divisor).clamp(-127, 127)).to(torch.int8), scale

    @staticmethod
    def dtypes(n: int, dtype: str) -> tuple[tuple[int, torch.dtype], ...]:
        return (n, torch.int8), (1, torch.bfloat16)


class Eights(Bytes):
    """float8_e4m3, kept as its bits, with a bfloat16 scale for each row of a token and head: largest size / 448."""

    def read(self, index: Tensor) -> Tensor:
        return self._rows(0, index).view(torch.float8_e4m3fn).to(torch.float32) * self._rows(1, index).to(torch.float32)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        x = rows.transpose(0, 1).to(torch.float32)
        scale = (x.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).to(torch.bfloat16)
        divisor = torch.where(scale == 0, torch.inf, scale.to(torch.float32))
        near = (x / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        for part, new in zip(self.parts, (near.view(torch.uint8), scale), strict=True):
            part.index_copy_(1, slots, new)

    @staticmethod
    def dtypes(n: int, dtype: str) -> tuple[tuple[int, torch.dtype], ...]:
        return (n, torch.uint8), (1, torch.bfloat16)


def store_class(dtype: str) -> type[Floats]:
    """How a KV dtype is kept."""
    return {"int8": Bytes, "fp8": Eights}.get(dtype, Floats)


def rows_of(spec: StateSpec) -> tuple[tuple[int, int], ...]:
    """(heads, n) of what a token has in each tensor of a paged state."""
    return tuple((math.prod(shape[1:-1]), shape[-1]) for shape in spec.page_shapes(1))


def token_bytes(spec: StateSpec, dtype: str) -> int:
    """Bytes of a token in one layer of a paged state."""
    parts = [(heads, *part) for heads, n in rows_of(spec) for part in store_class(dtype).dtypes(n, dtype)]
    return sum(heads * n * torch.empty((), dtype=kind).element_size() for heads, n, kind in parts)


def page_bytes(spec: StateSpec, page_size: int, dtype: str) -> int:
    """Bytes of a page in one layer."""
    if spec.paged:
        return page_size * token_bytes(spec, dtype)
    return 4 * math.prod(spec.page_shapes(page_size)[0])


class Layer:
    """What one layer slot keeps in the pool's pages: key and value rows, or a float32 state a page."""

    def __init__(
        self, spec: StateSpec, page_size: int, dtype: str, pages: int, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        self.spec, self.page_size, self.dtype, self.pages = spec, page_size, dtype, pages
        self.stores: tuple[Floats, ...] = ()
        self.data: Tensor | None = None
        if not spec.paged:
            self.data = allocate((pages, *spec.page_shapes(page_size)[0]), torch.float32)
            return
        make, rows = store_class(dtype), (pages + 1) * page_size
        self.stores = tuple(
            make(tuple(allocate((heads, rows, size), kind) for size, kind in make.dtypes(n, dtype))) for heads, n in rows_of(spec)
        )

    def tensors(self) -> Iterator[Tensor]:
        """All memory, with the pages in dimension 0 (states) or 1 (rows)."""
        if self.data is not None:
            yield self.data[None]
        for part in (part for store in self.stores for part in store.parts):
            yield part.view(part.shape[0], self.pages + 1, self.page_size, part.shape[-1])

    def slots(self, ids: Tensor) -> Tensor:
        """Rows of the tokens of pages: [pages, page_size]."""
        return ids[:, None] * self.page_size + torch.arange(self.page_size, device=ids.device)

    def read(self, ids: Tensor) -> tuple[Tensor, ...]:
        """The pages in their neutral shapes."""
        if self.data is not None:
            return (self.data[ids],)
        found = (store.read(self.slots(ids)).permute(1, 2, 0, 3) for store in self.stores)
        shapes = self.spec.page_shapes(self.page_size)
        return tuple(f.reshape(len(ids), *shape) for f, shape in zip(found, shapes, strict=True))

    def write(self, ids: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Fills pages from their neutral shapes."""
        if self.data is not None:
            self.data[ids] = tensors[0]
        for store, x, (heads, n) in zip(self.stores, tensors, rows_of(self.spec) if self.stores else (), strict=False):
            store.write(self.slots(ids).flatten(), x.reshape(-1, heads, n))


class Span(NamedTuple):
    """Sequences of a step with equally many queries and keys of like number: N sequences, Q queries, K keys (padded).

    rows: int64[N, Q], their tokens; slots: int64[N, K], rows of the pool; mask: bool[N, repeat * Q, K], whether a query of one
    of `repeat` heads sees a key, or None if all see all."""

    rows: Tensor
    slots: Tensor
    mask: Tensor | None


class Sight(NamedTuple):
    """Which positions a query sees: with `window` so many up to its own, with `chunk` those of its own chunk of so many."""

    window: int | None
    chunk: int | None
    causal: bool

    def oldest(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first position that queries at these positions see."""
        if self.window is not None:
            return np.maximum(0, at - self.window + 1)
        return np.zeros_like(at) if self.chunk is None else at // self.chunk * self.chunk


@dataclass
class GroupStep:
    """One step of one group of layers; everything is worked out once for all of them."""

    table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    page_size: int
    zero: int
    upload: Callable[[npt.NDArray[Any]], Tensor]
    _made: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, group: int, page_size: int, pages: int, upload: Callable[[npt.NDArray[Any]], Tensor]) -> GroupStep:
        return cls(
            batch.block_tables[group], batch.slot_mapping[group], batch.query_starts, batch.context_lens, page_size,
            pages * page_size, upload,
        )  # fmt: skip

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a step."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def writes(self) -> tuple[Tensor | None, Tensor]:
        """(tokens that are stored, None: all; their rows of the pool)."""
        return self.once("writes", self._writes)  # type: ignore[no-any-return]

    def _writes(self) -> tuple[Tensor | None, Tensor]:
        kept = np.flatnonzero(self.slot_mapping >= 0)
        slots = self.upload(self.slot_mapping[kept].astype(np.int64))
        return (None if len(kept) == len(self.slot_mapping) else self.upload(kept)), slots

    def spans(self, window: int | None, causal: bool, repeat: int, chunk: int | None = None) -> list[Span]:
        """The reads of attention: all, those of a window, or those of a position's own chunk."""
        seen = Sight(window, chunk, causal)
        return self.once((seen, repeat), lambda: list(self._spans(seen, repeat)))  # type: ignore[no-any-return]

    def _spans(self, seen: Sight, repeat: int) -> Iterator[Span]:
        queries, contexts = np.diff(self.starts), self.contexts.astype(np.int64)
        first = seen.oldest(contexts - queries)
        for seqs in alike(queries, contexts - first):
            yield self._span(seqs, int(queries[seqs[0]]), first[seqs], seen, repeat)

    def _span(self, seqs: npt.NDArray[np.intp], count: int, first: npt.NDArray[np.int64], sight: Sight, repeat: int) -> Span:
        context = self.contexts[seqs].astype(np.int64)[:, None]
        keys = -(-int((context[:, 0] - first).max()) // LANES) * LANES
        at = first[:, None] + np.arange(keys)
        index = self._rows_at(seqs, at, at < context)
        query = context - count + np.arange(count)
        seen = np.broadcast_to((at < context)[:, None], (len(seqs), count, keys))
        if sight.causal:
            seen = seen & (at[:, None] <= query[..., None])
        seen = seen & (at[:, None] >= sight.oldest(query)[..., None])
        rows = self.starts[seqs].astype(np.int64)[:, None] + np.arange(count)
        mask = None if seen.all() else self.upload(np.tile(seen, (1, repeat, 1)))
        return Span(self.upload(rows), self.upload(index), mask)

    def _rows_at(
        self, seqs: npt.NDArray[np.intp], at: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Rows of the pool of positions at[sequences, keys]; where not valid, a row of zeros."""
        block, offset = np.divmod(np.where(valid, at, 0), self.page_size)
        page = self.table[seqs[:, None], block].astype(np.int64)
        if (valid & (page < 0)).any():
            raise ProgramError("a position is read for which the block table has no page")
        return np.where(valid, page * self.page_size + offset, self.zero)


def alike(queries: npt.NDArray[Any], keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Indices of the sequences with queries, those together that have as many queries and, within a factor of two, keys."""
    groups: dict[tuple[int, int], list[int]] = {}
    for s, (count, size) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        if count:
            groups.setdefault((count, (-(-size // LANES) - 1).bit_length()), []).append(s)
    return [np.array(g) for g in groups.values()]


@dataclass(frozen=True)
class Paged:
    """A PagedKV or LatentKV state in one step, as kernels get it."""

    k: Floats
    v: Floats
    step: GroupStep


class Lane(NamedTuple):
    """Sequences of like length of a recurrent layer: N of them, padded to T tokens.

    pages: int64[N]; rows: int64[N, T], their tokens, at the padding any token; real: bool[N, T]; lengths: int64[N]; fresh: bool[N],
    those that start in this step."""

    pages: Tensor
    rows: Tensor
    real: Tensor
    lengths: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Carried:
    """A Recurrent state in one step. data: float32[pages, *shape]."""

    data: Tensor
    step: GroupStep

    def lanes(self) -> list[Lane]:
        """The step's sequences."""
        return self.step.once("lanes", lambda: list(_lanes(self.step)))  # type: ignore[no-any-return]


def _lanes(step: GroupStep) -> Iterator[Lane]:
    counts = np.diff(step.starts).astype(np.int64)
    for seqs in alike((counts > 0).astype(np.int64), counts * LANES):
        lengths = counts[seqs]
        at = np.arange(int(lengths.max()))
        real = at < lengths[:, None]
        rows = step.starts[seqs].astype(np.int64)[:, None] + np.where(real, at, 0)
        fresh = step.contexts[seqs] == lengths
        arrays = step.table[seqs, 0].astype(np.int64), rows, real, lengths, fresh
        yield Lane(*(step.upload(a) for a in arrays))
