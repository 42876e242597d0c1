"""KV pages in OpenVINO's own layouts, and their numbers.

A layer's keys (and its values) are one array [pages, kv_heads, page_size, width]. As a plain float, width is head_dim. As "u8"
each row of a token and head is quantised by itself: float32 scale, float32 zero point, then head_dim bytes; a number is
(byte - zero point) * scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
KV_DTYPES = {"u8": np.uint8, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""KV formats, best first, and the numpy type that holds them."""
HEADER = 8
"""Bytes of scale and zero point in front of a row of u8."""


def width(head_dim: int, dtype: str) -> int:
    """Elements of a row."""
    return head_dim + HEADER if dtype == "u8" else head_dim


def encode(numbers: F32, dtype: str) -> npt.NDArray[Any]:
    """numbers[..., head_dim] as rows[..., width]; floats to nearest, ties to even."""
    if dtype == "u8":
        return _quantise(np.ascontiguousarray(numbers, np.float32))
    if dtype != "bfloat16":
        return np.asarray(numbers, KV_DTYPES[dtype])
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def decode(rows: npt.NDArray[Any], dtype: str) -> F32:
    """The reverse of encode()."""
    if dtype == "u8":
        rows = np.ascontiguousarray(rows)
        header = np.ascontiguousarray(rows[..., :HEADER]).view(np.float32)
        return _numbers(rows[..., HEADER:], header[..., :1], header[..., 1:])
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(rows, np.float32)


def _numbers(whole: npt.NDArray[Any], scale: F32, zero: F32) -> F32:
    return np.asarray((whole.astype(np.float32) - zero) * scale, np.float32)


def _quantise(x: F32) -> npt.NDArray[np.uint8]:
    """Rows of u8. Numbers that were read from u8 rows must become the same numbers again, so the scale and the zero point that made
    them are looked for among the neighbours of those that the extremes suggest."""
    flat = x.reshape(-1, x.shape[-1])
    low, high = flat.min(axis=-1, keepdims=True), flat.max(axis=-1, keepdims=True)
    scale = (high - low) / np.float32(255)
    scale[scale == 0] = np.float32(1e-4)
    zero = -low / scale
    whole = _whole(flat, scale, zero)
    off = np.abs(_numbers(whole, scale, zero) - flat).max(axis=-1)
    near = np.flatnonzero((off > 0) & (off < scale[:, 0] / 64))
    _refine(flat, scale, zero, whole, near)
    header = np.concatenate([scale, zero], axis=-1, dtype=np.float32).view(np.uint8)
    return np.concatenate([header, whole], axis=-1).reshape(*x.shape[:-1], x.shape[-1] + HEADER)


def _whole(x: F32, scale: F32, zero: F32) -> npt.NDArray[np.uint8]:
    return np.clip(np.rint(x / scale + zero), 0, 255).astype(np.uint8)


def _refine(x: F32, scale: F32, zero: F32, whole: npt.NDArray[np.uint8], rows: npt.NDArray[np.intp]) -> None:
    """Moves scale and zero point of the `rows` by units in the last place until their bytes give x back exactly."""
    for step in _spiral():
        if not len(rows):
            return
        a, b = _moved(scale[rows], step[0]), _moved(zero[rows], step[1])
        same = (_numbers(whole[rows], a, b) == x[rows]).all(axis=-1)
        found = rows[same]
        scale[found], zero[found] = a[same], b[same]
        rows = rows[~same]


def _spiral(reach: int = 12) -> list[tuple[int, int]]:
    """Steps of scale and zero point, nearest first."""
    steps = [(i, j) for i in range(-reach, reach + 1) for j in range(-reach, reach + 1)]
    return sorted(steps, key=lambda s: (abs(s[0]) + abs(s[1]), s))


def _moved(x: F32, units: int) -> F32:
    """x moved by so many units in the last place of its size."""
    return (x.view(np.int32) + np.int32(units)).view(np.float32)
