"""What a prompt shows beside tokens: tiles of images, where they stand, and the operators that bring their rows in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import ProgramError
from trivium.ops.examples import Array, Draw, normal, operator
from trivium.ops.schema import Shape


@dataclass(frozen=True, eq=False)
class Tile:
    """One input of a vision tower. data: uint8[patches, numbers a patch], as the model's image processor leaves them but for their
    normalisation. digest: 32 bytes, equal only for tiles of which the tower makes the same."""

    digest: bytes
    data: npt.NDArray[np.uint8]


class Span(NamedTuple):
    """Tokens start..stop-1 of a prompt stand for what the tower makes of `tile`, from its `row` on."""

    start: int
    stop: int
    tile: Tile
    row: int

    def cut(self, start: int, stop: int) -> Span | None:
        """What of it lies in start..stop-1; None: nothing."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Span(first, last, self.tile, self.row + first - self.start) if first < last else None


def _distinct(d: Draw, more: int) -> Array:
    """Different ids below their number and `more`."""
    return d.rng.permutation(d.shape[0] + more)[: d.shape[0]]


@operator("token_ids[tokens]:int32 -> y[tokens]:int32", {"token_ids": lambda d: _distinct(d, 20), "vocab": 11})
def text_ids(token_ids: Array, *, vocab: int) -> Array:
    """The ids that a table of `vocab` rows has, others as the nearest of them: what stands for an image is looked up elsewhere."""
    return np.clip(token_ids, 0, vocab - 1)


@operator(
    "token_ids[tokens]:int32, media[slots, rows, hidden]:weight, x[tokens, hidden]? -> y[tokens, hidden]", {"first": 5},
    {"first": 0, "x": None}, {"first": 1000}, sizes={"slots": (3, 1, 2, 3, 2, 1, 3)},
    draw={"token_ids": lambda d: _distinct(d, min(d.call["first"], 5) + (d.call["slots"] - 1) * d.call["rows"])},
)  # fmt: skip
def media_rows(token_ids: Array, media: Array, x: Array | None = None, *, first: int) -> Array:
    """y[t] = row token_ids[t] - first of media[slots * rows, hidden] where token_ids[t] >= first, else x[t]; without x all ids are
    at least `first`. media is written between steps, slot by slot: see Session.assign."""
    rows = media.reshape(-1, media.shape[-1])
    if x is None:
        return np.array(rows[token_ids - first])
    y = x.copy()
    y[token_ids >= first] = rows[token_ids[token_ids >= first] - first]
    return y


def _infer_blocks(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, rows = shapes[0] or (), shapes[1] or ()
    if len(x) != 2 or len(rows) != 1 or not isinstance(x[1], int) or attrs["count"] < 1:
        raise ProgramError(f"gather_blocks: x{list(x)} and rows{list(rows)} must be [tokens, n] and [rows], and count at least 1")
    return ((rows[0], attrs["count"] * x[1]),)


@operator(
    "x[tokens, n], rows[rows]:int32 -> y[rows, m]", {"count": 4}, {"count": 1}, infer=_infer_blocks,
    draw={"x": lambda d: normal(d.rng, d.shape[0] + 3, d.shape[1]), "rows": lambda d: np.sort(d.integers(d.call["tokens"]))},
)  # fmt: skip
def gather_blocks(x: Array, rows: Array, *, count: int) -> Array:
    """y[r] = rows rows[r] .. rows[r]+count-1 of x, side by side. With the patches of an image ordered block by block this is pixel
    shuffle (space to depth; Shi et al., "Real-Time Single Image and Video Super-Resolution", 2016)."""
    return np.asarray(x[rows[:, None] + np.arange(count)].reshape(len(rows), count * x.shape[1]))
