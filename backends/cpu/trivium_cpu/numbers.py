"""float32 arrays as the bytes of a float type, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array."""
    return _SIZES[dtype] * math.prod(shape)


def encode(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """array[rows, n] rounded to nearest, ties to even, as bytes[rows, n * size]."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        nan = (bits >> np.uint32(16)) | np.uint32(0x40)
        return np.where(np.isnan(array), nan, rounded).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(array, np.float16 if dtype == "float16" else np.float32).view(np.uint8)


def decode(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """The reverse of encode."""
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    plain: npt.NDArray[Any] = raw.view(np.float16 if dtype == "float16" else np.float32)
    return plain.astype(np.float32)
