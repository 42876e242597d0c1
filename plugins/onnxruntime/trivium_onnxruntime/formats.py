"""Resident weights: float32, and blocks of 32 whole numbers with a scale as the operator MatMulNBits reads them.

A block's weight is d * (q - 8) with 4 bits and d * (q - 128) with 8; int4_min adds a minimum: d * q + m. GGUF's Q4_0, Q8_0 and
Q4_1 are blocks of the same kind, so their bytes are only rearranged and the numbers stay what they were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import UnsupportedError
from trivium.ops import Weight
from trivium.plugin import WeightFormat

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
BLOCK = 32
_ALL = frozenset({
    "float32", "float16", "bfloat16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4",
})  # fmt: skip

FORMATS = (
    WeightFormat("int4", bits=5, lossless_from=frozenset({"q4_0"}), error_budget=0.12),
    WeightFormat("int4_min", bits=6, lossless_from=frozenset({"q4_1"}), error_budget=0.12),
    WeightFormat("int8", bits=9, lossless_from=frozenset({"q8_0"}), error_budget=0.01),
    WeightFormat("float32", bits=32, lossless_from=_ALL),
)
CUDA_FORMATS = (
    WeightFormat("int4", bits=5, lossless_from=frozenset({"q4_0"}), error_budget=0.12),
    WeightFormat("int4_min", bits=6, error_budget=0.12),
    WeightFormat("int8", bits=9, lossless_from=frozenset({"q8_0"}), error_budget=0.01),
    WeightFormat("float16", bits=16, lossless_from=frozenset({"float16"}), error_budget=2**-11),
    WeightFormat("float32", bits=32, lossless_from=_ALL),
)
"""Scales and minima in float16, the dtype of activations there. Products with float32 weights are made in float32."""
_STORED = {"q4_0": "int4", "q4_1": "int4_min", "q8_0": "int8"}


@dataclass
class Resident:
    """A loaded weight. Plain: `array` float32[shape]. In blocks: q uint8[rows, blocks, 16 or 32] (4 bits: number 2i in the low
    half of byte i, 2i+1 in the high one), d float32[rows, blocks] and, with a minimum, m likewise. After rounded_to(), array, d
    and m are in its dtype."""

    shape: tuple[int, ...]
    format: str
    array: Array | None = None
    q: U8 | None = None
    d: Array | None = None
    m: Array | None = None

    @property
    def bits(self) -> int:
        return {"int4": 4, "int4_min": 4, "int8": 8}.get(self.format, 32)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.array, self.q, self.d, self.m) if a is not None)

    def numbers(self) -> F32:
        """The plain numbers, float32[shape]."""
        if self.array is not None:
            return np.asarray(self.array, np.float32)
        assert self.q is not None and self.d is not None
        if self.bits == 8:
            whole = self.q.astype(np.float32) - np.float32(128)
        else:
            whole = np.stack([self.q & 15, self.q >> 4], axis=-1).reshape(*self.q.shape[:2], BLOCK).astype(np.float32)
            whole -= np.float32(0 if self.m is not None else 8)
        numbers = whole * self.d[..., None]
        return (numbers if self.m is None else numbers + self.m[..., None]).reshape(self.shape)


def load(weight: Weight, format: str) -> Resident:
    """The weight in `format`; UnsupportedError where its rows are not whole blocks."""
    if format == "float32" or len(weight.shape) < 2:
        return Resident(weight.shape, "float32", np.array(weight.decode(), np.float32))
    if weight.shape[-1] % BLOCK:
        raise UnsupportedError(
            f"{weight.name} has rows of {weight.shape[-1]} numbers, {format} holds whole blocks of {BLOCK}; load it as float32",
            param="quantize",
        )
    if _STORED.get(weight.format) == format:
        return _rearranged(weight, format)
    rows = np.ascontiguousarray(weight.decode(), np.float32).reshape(math.prod(weight.shape[:-1]), -1, BLOCK)
    return _rounded(rows, weight.shape, format)


def rounded_to(resident: Resident, dtype: str, name: str) -> Resident:
    """The same weight with `array`, d and m in `dtype`, but for vectors, which stay float32 (some are frequencies, of which angles
    are made). UnsupportedError where a number is too large for it."""
    if len(resident.shape) < 2:
        return resident
    made: dict[str, Any] = {
        part: numbers_in(x, dtype, name) for part in ("array", "d", "m") if (x := getattr(resident, part)) is not None
    }
    return dataclasses.replace(resident, format=dtype if "array" in made else resident.format, **made)


def numbers_in(array: Array, dtype: str, name: str) -> Array:
    """Rounded to nearest. UnsupportedError where a number is too large."""
    with np.errstate(over="ignore"):
        made = np.asarray(array, dtype)
    if not np.isfinite(made).all():
        raise UnsupportedError(f"{name} has numbers beyond {np.finfo(dtype).max}, the largest of {dtype}", param="dtype")
    return made


def joined(parts: Sequence[Resident]) -> Resident | None:
    """One weight with the rows of several, which from then on are views of it; None if their formats differ."""
    if len({p.format for p in parts}) > 1 or any(len(p.shape) != 2 for p in parts):
        return None
    whole = Resident((sum(p.shape[0] for p in parts), parts[0].shape[1]), parts[0].format)
    for name in ("array", "q", "d", "m"):
        if getattr(parts[0], name) is not None:
            setattr(whole, name, np.concatenate([getattr(p, name) for p in parts]))
            at = 0
            for part in parts:
                setattr(part, name, getattr(whole, name)[at : at + part.shape[0]])
                at += part.shape[0]
    return whole


def _rearranged(weight: Weight, format: str) -> Resident:
    """GGUF blocks: a float16 scale, for Q4_1 a float16 minimum, then 32 numbers; of 4 bits, numbers i and 16 + i share a byte."""
    raw = np.asarray(weight.data).view(np.uint8).reshape(math.prod(weight.shape[:-1]), weight.shape[-1] // BLOCK, -1)
    d, m = _half(raw, 0), _half(raw, 1) if format == "int4_min" else None
    body = raw[..., 4 if format == "int4_min" else 2 :]
    if format == "int8":
        return Resident(weight.shape, format, q=body ^ np.uint8(128), d=d)
    return Resident(weight.shape, format, q=_packed(np.concatenate([body & 15, body >> 4], axis=-1)), d=d, m=m)


def _half(raw: U8, index: int) -> F32:
    return np.ascontiguousarray(raw[..., 2 * index : 2 * index + 2]).view("<f2")[..., 0].astype(np.float32)


def _packed(whole: npt.NDArray[Any]) -> U8:
    """Numbers 0..15 two a byte."""
    return np.ascontiguousarray(whole[..., ::2] | whole[..., 1::2] << 4, np.uint8)


def _rounded(x: F32, shape: tuple[int, ...], format: str) -> Resident:
    """Blocks x[rows, blocks, 32] rounded to nearest. 4 bits: the scale that puts the largest number on an end of the range, then
    the one of least squares for the whole numbers that it gave."""
    if format == "int8":
        d = np.abs(x).max(axis=-1) / np.float32(127)
        return Resident(shape, format, q=(np.rint(x / _divisor(d)[..., None]) + 128).astype(np.uint8), d=d)
    if format == "int4":
        top = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)[..., 0]
        whole = np.clip(np.rint(x / _divisor(top / np.float32(-8))[..., None]), -8, 7).astype(np.float32)
        d = (x * whole).sum(axis=-1) / np.maximum((whole * whole).sum(axis=-1), np.float32(1))
        return Resident(shape, format, q=_packed((whole + 8).astype(np.uint8)), d=d)
    m = x.min(axis=-1)
    d = (x.max(axis=-1) - m) / np.float32(15)
    whole = np.rint((x - m[..., None]) / _divisor(d)[..., None]).astype(np.uint8)
    return Resident(shape, format, q=_packed(whole), d=d, m=m)


def _divisor(d: F32) -> F32:
    return np.where(d == 0, np.float32(np.inf), d)
