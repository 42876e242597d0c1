"""How much memory a layer will take, from the shapes alone, so that a bound can be kept or refused before anything is read.

Counted is what is held at a time: the layer's weights in float32, what all windows carry from layer to layer, what is known of the
inputs (float64), one window's values on their way through, and what the search for codes needs. Not counted: the interpreter with
its libraries, and pages of the checkpoint, which the system may drop at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trivium_compress.grids import CHUNK
from trivium_compress.layer import ROWS, Target
from trivium_compress.recipe import Recipe
from trivium_compress.source import Source
from trivium_compress.structure import Projection
from trivium_compress.walk import Segment, Walk

BASE = 64 * CHUNK + (16 << 20)
"""Of the search for scales, and of small things."""


@dataclass(frozen=True)
class Need:
    """Bytes, but for what the windows carry."""

    weights: int
    inputs: int
    run: int
    work: int

    @property
    def total(self) -> int:
        return BASE + self.weights + self.inputs + max(self.run, self.work)


def of_layer(
    walk: Walk | None, segment: Segment | None, source: Source, targets: Mapping[str, Target],
    projections: Mapping[str, Projection], recipe: Recipe, names: Iterable[str],
) -> Need:  # fmt: skip
    """What the layer with the tensors `names` needs. walk, segment None: there is no text, and matrices are rounded one after
    another."""
    shapes = {name: source.checkpoint.tensor(name).shape for name in names}
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if name in targets}
    largest = max(matrices.values(), default=0)
    if walk is None or segment is None:
        # one matrix: its numbers, codes, what codes mean, the error, and a mask with its scores
        return Need(0, 0, 0, 24 * largest + sum(matrices.values()))
    weights = 4 * (sum(map(math.prod, shapes.values())) + sum(matrices.values()) // 4)
    readers = {projections[n].input: n for n in matrices if n in projections}
    widths = [shapes[name][1] for name in readers.values()]
    whole = whole_moments(recipe)
    inputs = sum(8 * (width * width + width if whole else 2 * width) for width in widths)
    square = max(widths, default=0) ** 2 if whole else 0
    run = walk.bytes_of_a_run(segment, frozenset(readers)) + 4 * square
    work = 44 * largest + (12 if recipe.method == "awq" else 72) * square  # gptq: the Hessian, its factor, and what makes that
    return Need(weights, inputs, run, work)


def of_table(source: Source, name: str) -> int:
    """Bytes to round a table by blocks of rows."""
    shape = source.checkpoint.tensor(name).shape
    rows = min(ROWS, shape[0])
    return BASE + 24 * rows * shape[1] + 2 * math.prod(shape)


def whole_moments(recipe: Recipe) -> bool:
    """Whether products of different inputs matter, or squares alone."""
    return recipe.method != "rtn"


def carried(walk: Walk, lengths: Iterable[int]) -> int:
    """Bytes that the windows carry between layers at most: what one layer has left while the next is leaving its own."""
    found = list(lengths)
    most = max((walk.bytes_kept(s, found) for s in walk.segments), default=0)
    return 2 * most + 4 * 8 * sum(found)
