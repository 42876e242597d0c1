"""State that layers keep between steps: its declaration in a Program, its grouping, and the reference's form of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one attention layer, in pages. `window`: keys further back than this many positions are never
    read again (position p reads p-window+1 .. p), so their pages may be freed; None keeps all."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    paged: ClassVar[bool] = True

    def page_shapes(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        """Neutral shapes of one page: keys and values, [page_size, kv_heads, head_dim] each."""
        return ((page_size, self.kv_heads, self.head_dim),) * 2


@dataclass(frozen=True)
class LatentKV:
    """Compressed keys and values of one MLA layer: `rank` latent and `rope_dim` rotated numbers a token, in pages."""

    rank: int
    rope_dim: int
    paged: ClassVar[bool] = True
    window: ClassVar[int | None] = None

    def page_shapes(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        """Neutral shapes of one page: latent [page_size, rank] and rotated [page_size, rope_dim]."""
        return (page_size, self.rank), (page_size, self.rope_dim)


@dataclass(frozen=True)
class Recurrent:
    """A fixed-size float32 state of one layer and sequence (linear attention, SSM, short convolution): one page a sequence."""

    shape: tuple[int, ...]
    paged: ClassVar[bool] = False
    window: ClassVar[int | None] = None

    def page_shapes(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        """Neutral shape of one page: the state itself, whatever the page size."""
        return (self.shape,)


StateSpec = PagedKV | LatentKV | Recurrent


class Group(NamedTuple):
    """Layers that share one block table: `states[i]` is the Program's state that lives in layer slot i of each page."""

    spec: StateSpec
    states: tuple[int, ...]


class KVSpec(NamedTuple):
    """What a backend must store. One pool of pages serves all groups: a page belongs to one group at a time and holds
    `page_size` tokens of each of its layer slots (for Recurrent: one sequence's state of each). `dtype`: a KV format: a float type
    (numbers are rounded to nearest, ties to even) or "int8", see kv_int8(); recurrent states are float32 whatever it is."""

    page_size: int
    dtype: str
    groups: tuple[Group, ...]

    def group_of(self, state: int) -> tuple[int, int]:
        """(group, layer slot) of a state."""
        return next((g, group.states.index(state)) for g, group in enumerate(self.groups) if state in group.states)


def kv_int8(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The numbers that a KV format of int8 keeps of x[..., n]: each row (of a token and head) is whole numbers within -127..127
    times a scale, largest size / 127 rounded to bfloat16: all products are exact, and a row that was read is written again as
    it is. Both roundings go to the nearest, ties to even; a row of zeros has the scale 0."""
    bits = (np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)).view(np.uint32)
    scale = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    whole = np.rint(np.clip(x / np.where(scale == 0, np.float32(np.inf), scale), -127, 127))
    kept: npt.NDArray[np.float32] = whole * scale
    return kept


class Pages(NamedTuple):
    """Neutral content of some pages of one group, as numpy. `tensors[i]` belongs to layer slot i and holds one
    float32[pages, *shape] for each shape of the spec's page_shapes(page_size): PagedKV (k, v), LatentKV (latent, rope), Recurrent
    (state,). A KV dtype below float32 must survive export and import bit for bit. `group` is the Group of the KVSpec that the
    pages belong to."""

    group: Group
    page_size: int
    dtype: str
    tensors: tuple[tuple[npt.NDArray[np.float32], ...], ...]


@dataclass(eq=False)
class PagedState:
    """One PagedKV or LatentKV layer as the reference sees it in one step.

    k, v: float[pages, page_size, kv_heads, head_dim]; LatentKV: k [pages, page_size, 1, rank], v [pages, page_size, 1, rope_dim].
    block_table: int32[seqs, blocks], entry b of a row holds positions b*page_size ..; -1 where no page is needed any more.
    slots: int64[tokens], page*page_size+offset of each token of the step; -1: the token is not stored.
    """

    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]
    block_table: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]


@dataclass(eq=False)
class RecurrentState:
    """One Recurrent layer as the reference sees it. data: float32[pages, *shape]; table: int32[seqs], the page of each sequence.
    A sequence whose context starts in this step (context length == query length) starts from zeros, whatever the page holds."""

    data: npt.NDArray[np.float32]
    table: npt.NDArray[np.int32]


def state_of(
    spec: StateSpec, arrays: Sequence[npt.NDArray[np.float32]], table: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]
) -> PagedState | RecurrentState:
    """The reference's form of a state: `arrays` have the neutral shapes of spec.page_shapes; nothing is copied."""
    if isinstance(spec, Recurrent):
        return RecurrentState(arrays[0], table[:, 0])
    k, v = (a[:, :, None] for a in arrays) if isinstance(spec, LatentKV) else arrays
    return PagedState(k, v, table, slots)
