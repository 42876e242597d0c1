"""Scales that blocks of a matrix share: one for the whole, for a row, for a group of a row's inputs, or for a rectangle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.lazy import FLOATS, Array, Floats
from trivium_formats.modules import Module


@dataclass(frozen=True)
class Grid:
    """A stored tensor[ceil(rows / block rows), ceil(columns / block columns)] of one number a block. `shape`: the matrix'."""

    weight: Weight
    shape: tuple[int, int]
    block: tuple[int, int]

    def rows(self, start: int, stop: int, of: Array | None = None) -> Floats:
        """Each number's own of the matrix' rows start..stop, float32[stop - start, columns]. `of`: the column of blocks to which
        each column of the matrix belongs, where they are not in order."""
        columns = np.arange(self.shape[1]) // self.block[1] if of is None else of
        return self.table(start, stop)[:, columns]

    def table(self, start: int, stop: int) -> Floats:
        """What is stored for the matrix' rows start..stop, float32[stop - start, blocks across]."""
        down = self.block[0]
        first = start // down
        table = self.weight.data.reshape(grid_shape(self.shape, self.block))[first : -(-stop // down)]
        return self.weight.decoder(table)[np.arange(start, stop) // down - first]


def grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks, the last ones of which need not be whole."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def block_of(value: Any, what: str) -> tuple[int, int]:
    """Rows and columns of a block from a configuration; CheckpointError if `value` is anything else."""
    if not (isinstance(value, list) and [type(n) for n in value] == [int, int] and min(value) > 0):
        raise CheckpointError(f"{what} must be the rows and columns of a block, not {value!r}")
    return value[0], value[1]


def find_grid(
    module: Module, part: str, shape: tuple[int, int], block: tuple[int, int], formats: tuple[str, ...] = FLOATS
) -> Grid:  # fmt: skip
    """The grid that is stored as `part`; where it has one column, or one number, dimensions may be left off. CheckpointError if it
    isn't there or has another shape."""
    weight, wanted = module.need(part, None, formats), grid_shape(shape, block)
    if weight.shape not in {wanted, wanted[:1] if wanted[1] == 1 else wanted, () if wanted == (1, 1) else wanted}:
        module.need(part, wanted)
    return Grid(weight, shape, block)
