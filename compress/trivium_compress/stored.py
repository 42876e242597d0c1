"""Codes and scales as files hold them: compressed-tensors' packed words, and GGML's blocks.

Sources: the packages compressed-tensors (its pack-quantized format) and gguf (its block types).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium_compress.floats import FLOATS, bits
from trivium_compress.grids import Affine, Grid, Steps, SuperBlocks, Symmetric, ZeroPoint

Array = npt.NDArray[Any]


class Stored(NamedTuple):
    """One tensor of a file: its bytes as an array, and how it is called there (a dtype of safetensors, or a type of GGML)."""

    array: Array
    kind: str

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


class Later(NamedTuple):
    """As Stored, made when it is written: its shape, what a file calls its dtype, its bytes, and what makes the array."""

    shape: tuple[int, ...]
    kind: str
    nbytes: int
    make: Callable[[], Array]


def packed(codes: Array, width: int) -> Array:
    """int32[rows, ceil(columns * width / 32)] of codes[rows, columns] from 0 to 2**width - 1, the first in the lowest bits."""
    per = 32 // width
    rows, columns = codes.shape
    fields = np.zeros((rows, -(-columns // per) * per), np.uint32)
    fields[:, :columns] = codes
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(width)
    words = np.bitwise_or.reduce(fields.reshape(rows, -1, per) << shifts, axis=-1)
    return np.asarray(words.view(np.int32))


def packed_tensors(codes: Array, steps: Steps, grid: Symmetric | ZeroPoint, width: int) -> dict[str, Stored]:
    """The tensors of a projection in the format pack-quantized, by the part of the name after the module's."""
    half = 1 << (width - 1)
    shape = Stored(np.array(codes.shape, np.int64), "I64")
    parts = {
        "weight_packed": Stored(packed(codes.astype(np.int64) + half, width), "I32"),
        "weight_scale": Stored(bits(steps.scale, grid.dtype), FLOATS[grid.dtype]), "weight_shape": shape,
    }  # fmt: skip
    if isinstance(grid, ZeroPoint):
        zeros = grid.zeros(steps).astype(np.int64) + half
        parts["weight_zero_point"] = Stored(np.ascontiguousarray(packed(zeros.T, width).T), "I32")
    return parts


def q4_0(codes: Array, steps: Steps) -> Array:
    """float16 scale, then 32 codes plus 8."""
    return np.concatenate([_halves(steps.scale), _nibbles(codes + 8)], axis=-1)


def q4_1(codes: Array, steps: Steps) -> Array:
    """float16 scale, float16 offset, then 32 codes."""
    return np.concatenate([_halves(steps.scale), _halves(steps.offset), _nibbles(codes)], axis=-1)


def q8_0(codes: Array, steps: Steps) -> Array:
    """float16 scale, then 32 codes."""
    blocks = codes.astype(np.int8).view(np.uint8).reshape(len(codes), -1, 32)
    return np.concatenate([_halves(steps.scale), blocks], axis=-1)


def q4_k(codes: Array, steps: Steps) -> Array:
    """float16 scale of the scales and of the offsets, 8 of each in 6 bits, then 256 codes: 32 in the low halves of the bytes, the
    next 32 in the high ones."""
    scale, whole, least, negative = steps.parts
    s, m = whole.astype(np.uint8), negative.astype(np.uint8)
    low, high = (s[..., :4], m[..., :4]), (s[..., 4:], m[..., 4:])
    six = [low[0] | high[0] >> 4 << 6, low[1] | high[1] >> 4 << 6, (high[0] & 15) | (high[1] & 15) << 4]
    pairs = codes.astype(np.uint8).reshape(len(codes), -1, 4, 2, 32)
    quads = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(len(codes), -1, 128)
    return np.concatenate([_halves(scale), _halves(least), *six, quads], axis=-1)


def _halves(numbers: Array) -> Array:
    """float16 numbers[rows, blocks] as uint8[rows, blocks, 2]."""
    return numbers.astype("<f2").view(np.uint8).reshape(*numbers.shape, 2)


def _nibbles(codes: Array) -> Array:
    """Blocks of 32 codes[rows, columns] from 0 to 15 as uint8[rows, blocks, 16]: the first 16 in the low halves."""
    pairs = codes.astype(np.uint8).reshape(len(codes), -1, 2, 16)
    return pairs[..., 0, :] | pairs[..., 1, :] << 4


class Block(NamedTuple):
    """A GGML block type: its grid, what a row must be a multiple of, and how codes become bytes[rows, blocks, bytes a block]."""

    grid: Grid
    multiple: int
    write: Callable[[Array, Steps], Array]


BLOCKS: Mapping[str, Block] = {
    "q4_0": Block(Symmetric(32, -8, 7, dtype="float16", signed=True), 32, q4_0),
    "q4_1": Block(Affine(32, 0, 15), 32, q4_1),
    "q8_0": Block(Symmetric(32, -127, 127, shrinks=6, least=0.97, dtype="float16"), 32, q8_0),
    "q4_k": Block(SuperBlocks(32, 0, 15), 256, q4_k),
}
"""The block types that can be written, by the name that Weight.format has."""


def block_tensor(codes: Array, steps: Steps, kind: str) -> Stored:
    """A whole matrix: uint8[rows, bytes of a row]."""
    return Stored(np.ascontiguousarray(BLOCKS[kind].write(codes, steps).reshape(len(codes), -1)), kind)
