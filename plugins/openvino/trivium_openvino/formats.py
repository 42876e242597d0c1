"""Resident weight formats and how checkpoint tensors become integers, scales and minima.

A packed weight is x = whole * scale + minimum with one scale (and minimum, where the source has one) for a group of numbers of a
row. Blocks of the storage formats in `lossless_from` are only rearranged. Whoever asks for plain numbers gets the checkpoint's own;
the model holds the minimum as the zero point -minimum / scale in float32, which is within a unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.ops import Weight
from trivium.plugin import WeightFormat

F32 = npt.NDArray[np.float32]
GROUP = 32
PLAIN = frozenset({"float32", "float16", "bfloat16"})
_BLOCKS_4 = frozenset({"q4_0"})
_BLOCKS_4_ASYM = frozenset({"q4_0", "q4_1", "q4_k"})
_BLOCKS_8 = frozenset({"q4_0", "q8_0", "q6_k"})

FORMATS = (
    WeightFormat("int4", bits=5, lossless_from=_BLOCKS_4, error_budget=0.12),
    WeightFormat("int4_g64", bits=4.5, error_budget=0.13),
    WeightFormat("int4_g128", bits=4.25, error_budget=0.15),
    WeightFormat("int4_asym", bits=6, lossless_from=_BLOCKS_4_ASYM, error_budget=0.11),
    WeightFormat("int8", bits=9, lossless_from=_BLOCKS_8, error_budget=0.01),
    WeightFormat("int8_channel", bits=8, error_budget=0.02),
    WeightFormat("bfloat16", bits=16, lossless_from=frozenset({"bfloat16"}), error_budget=0.002),
    WeightFormat("float16", bits=16, lossless_from=frozenset({"float16"}), error_budget=0.0005),
    WeightFormat("float32", bits=32, lossless_from=PLAIN | _BLOCKS_4_ASYM | _BLOCKS_8),
)
"""Best first. `bits` counts the float32 scales that a compiled model keeps."""

_GROUPS: Mapping[str, tuple[int, int]] = {
    "int4": (4, 32), "int4_g64": (4, 64), "int4_g128": (4, 128), "int4_asym": (4, 32), "int8": (8, 32), "int8_channel": (8, 0),
}  # fmt: skip
"""Bits and group size of the formats of integers; 0: a whole row."""


class Packed(NamedTuple):
    """x = whole * scale (+ minimum), a scale and a minimum for each group: float32[rows, groups, 1]. dims: rows, groups, numbers of
    a group. raw: the whole numbers as they come, 8 bits each (signed) or 4 (two a byte, the first in the low half; signed, or
    unsigned if there is a minimum)."""

    bits: int
    dims: tuple[int, int, int]
    raw: npt.NDArray[np.uint8]
    scale: F32
    minimum: F32 | None = None

    def numbers(self) -> F32:
        """float32[rows, columns], each product and each sum rounded by itself, as the storage formats are defined."""
        x = self._whole().reshape(self.dims).astype(np.float32) * self.scale
        x = x if self.minimum is None else x + self.minimum
        return np.asarray(x.reshape(len(x), -1), np.float32)

    def _whole(self) -> npt.NDArray[Any]:
        if self.bits == 8:
            return self.raw.view(np.int8)
        halves = np.stack([self.raw & 15, self.raw >> 4], axis=-1).reshape(-1)[: math.prod(self.dims)]
        return halves if self.minimum is not None else (halves ^ 8).view(np.int8) - np.int8(8)


def packed(bits: int, whole: npt.NDArray[Any], scale: F32, minimum: F32 | None = None) -> Packed:
    """Of whole[rows, groups, numbers of a group]."""
    raw = np.ascontiguousarray(whole).view(np.uint8).reshape(-1)
    if bits == 4:
        even = np.append(raw, np.uint8(0)) if len(raw) % 2 else raw
        raw = even[0::2] & 15 | even[1::2] << 4
    return Packed(bits, whole.shape, raw, scale, minimum)


def is_packed(format: str) -> bool:
    """Whether a resident format holds integers."""
    return format in _GROUPS


def pack(weight: Weight, format: str) -> Packed:
    """A weight in one of the formats of integers: as its blocks are, where the format takes them, else rounded."""
    resident = next(f for f in FORMATS if f.name == format)
    bits, size = _GROUPS[format]
    if weight.format in resident.lossless_from:
        whole, scale, minimum = _BLOCKS[weight.format](np.ascontiguousarray(weight.data))
        rows = math.prod(weight.shape[:-1])
        parts = (a if a is None else a.reshape(rows, -1, a.shape[-1]) for a in (whole, scale, minimum))
        return packed(bits, *parts)  # type: ignore[arg-type]
    x = np.ascontiguousarray(weight.decode()).reshape(-1, weight.shape[-1])
    size = size if size and x.shape[1] % size == 0 else x.shape[1]
    grouped = x.reshape(len(x), -1, size)
    return _round_from_minimum(grouped) if format == "int4_asym" else _round(grouped, bits)


def _round(x: F32, bits: int) -> Packed:
    """4 bits: the number of the largest size becomes -8; 8 bits: largest size / 127."""
    if bits == 4:
        at = np.abs(x).argmax(axis=-1, keepdims=True)
        scale = np.take_along_axis(x, at, axis=-1) / np.float32(-8)
    else:
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scale = scale.astype(np.float16).astype(np.float32)
    limits = (-8, 7) if bits == 4 else (-127, 127)
    whole = np.clip(np.rint(x / np.where(scale == 0, np.float32(np.inf), scale)), *limits).astype(np.int8)
    return packed(bits, whole, np.asarray(scale, np.float32))


def _round_from_minimum(x: F32) -> Packed:
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale, low = (a.astype(np.float16).astype(np.float32) for a in ((high - low) / np.float32(15), low))
    whole = np.clip(np.rint((x - low) / np.where(scale == 0, np.float32(np.inf), scale)), 0, 15).astype(np.uint8)
    return packed(4, whole, scale, low)


Parts = tuple[npt.NDArray[Any], F32, F32 | None]


def _halves(raw: npt.NDArray[np.uint8], first: int, count: int = 1) -> F32:
    """`count` float16 numbers from byte `first` of each block."""
    return np.ascontiguousarray(raw[:, first : first + 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """bytes[n, m] -> uint8[n, 2m]: all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _q4_0(data: npt.NDArray[np.uint8]) -> Parts:
    raw = data.reshape(-1, 18)
    return _nibbles(raw[:, 2:]).astype(np.int8) - np.int8(8), _halves(raw, 0), None


def _q4_1(data: npt.NDArray[np.uint8]) -> Parts:
    raw = data.reshape(-1, 20)
    return _nibbles(raw[:, 4:]), _halves(raw, 0), _halves(raw, 2)


def _q8_0(data: npt.NDArray[np.uint8]) -> Parts:
    raw = data.reshape(-1, 34)
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8), _halves(raw, 0), None


def _q4_k(data: npt.NDArray[np.uint8]) -> Parts:
    """Blocks of 256: float16 d and dmin, eight scales and minima of 6 bits in 12 bytes, then 8 x 32 numbers of 4 bits."""
    raw = data.reshape(-1, 144)
    s = raw[:, 4:16]
    scale = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6 << 4)], axis=1).astype(np.float32)
    least = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6 << 4)], axis=1).astype(np.float32)
    quarters = raw[:, 16:].reshape(-1, 4, 32)
    whole = np.stack([quarters & 15, quarters >> 4], axis=2).reshape(-1, 32)
    return whole, (scale * _halves(raw, 0)).reshape(-1, 1), -(least * _halves(raw, 2)).reshape(-1, 1)


def _q6_k(data: npt.NDArray[np.uint8]) -> Parts:
    """Blocks of 256: 128 bytes of low halves, 64 of high pairs of bits, 16 scales of 8 bits, float16 d; groups of 16."""
    raw = data.reshape(-1, 210)
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    four = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    two = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    whole = (four | two << 4).astype(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32) * _halves(raw, 208)
    return whole.reshape(-1, 16), scale.reshape(-1, 1), None


_BLOCKS: Mapping[str, Callable[[npt.NDArray[np.uint8]], Parts]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0, "q4_k": _q4_k, "q6_k": _q6_k,
}  # fmt: skip
