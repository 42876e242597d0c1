"""float32 arrays as the bytes of a float type or of int8 with scales, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array; int8 has a scale (bfloat16) for each row of the last dimension."""
    if dtype == "int8":
        return math.prod(shape) + 2 * math.prod(shape[:-1])
    return _SIZES[dtype] * math.prod(shape)


def encode(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """array[n, ...] rounded to nearest, ties to even, as bytes[n, nbytes of one]. int8: see scale_of in native/kv_pages.h."""
    count = len(array)
    if dtype == "int8":
        scales = _to_bf16(np.abs(array).max(axis=-1, keepdims=True) / np.float32(127))
        numbers = _from_bf16(scales)
        with np.errstate(invalid="ignore"):
            whole = np.rint(np.clip(array / np.where(numbers == 0, np.float32(np.inf), numbers), -127, 127)).astype(np.int8)
        return np.concatenate([whole.reshape(count, -1).view(np.uint8), scales.reshape(count, -1).view(np.uint8)], axis=1)
    if dtype == "bfloat16":
        return _to_bf16(array).reshape(count, -1).view(np.uint8)
    return np.ascontiguousarray(array, np.float16 if dtype == "float16" else np.float32).reshape(count, -1).view(np.uint8)


def decode(raw: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The reverse of encode: array[n, *shape]."""
    raw = np.ascontiguousarray(raw)
    if dtype == "int8":
        size = math.prod(shape)
        scales = _from_bf16(np.ascontiguousarray(raw[:, size:]).view(np.uint16)).reshape(-1, *shape[:-1], 1)
        return np.ascontiguousarray(raw[:, :size]).view(np.int8).reshape(-1, *shape) * scales
    if dtype == "bfloat16":
        return _from_bf16(raw.view(np.uint16)).reshape(-1, *shape)
    plain: npt.NDArray[Any] = raw.view(np.float16 if dtype == "float16" else np.float32)
    return plain.astype(np.float32).reshape(-1, *shape)


def _to_bf16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(array), nan, rounded).astype(np.uint16)


def _from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
