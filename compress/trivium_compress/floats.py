"""float32 numbers as bfloat16 and float16: rounded to nearest, ties to even, and their bit patterns; and whether they are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError

Array = npt.NDArray[Any]
FLOATS: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Formats of Weight that numbers can be written in, and what safetensors calls them."""


def bits(numbers: Array, dtype: str) -> Array:
    """The array to be stored: float32, float16, or bfloat16's bit patterns as uint16."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    if dtype == "bfloat16":
        word = numbers.view(np.uint32)
        nearest = (word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)
    return numbers.astype(np.float16) if dtype == "float16" else numbers


def rounded(numbers: Array, dtype: str) -> Array:
    """The nearest numbers that `dtype` can hold, as float32."""
    stored = bits(numbers, dtype)
    if dtype == "bfloat16":
        return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    return np.asarray(stored, np.float32)


def is_finite(numbers: Array) -> bool:
    """Whether there is no NaN and no infinity, without an array beside."""
    return bool(numbers.size == 0 or np.isfinite([numbers.min(), numbers.max()]).all())


def check_finite(name: str, numbers: Array) -> None:
    """CheckpointError for a stored tensor with values that are no numbers: codes would make some number of them."""
    if not is_finite(numbers):
        raise CheckpointError(f"{name} has values that are NaN or infinite; the checkpoint is damaged, or was trained astray")
