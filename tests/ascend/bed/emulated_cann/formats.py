"""Weights in FRACTAL_NZ (format 29) and 4-bit numbers in int32.

NZ of a matrix [R, C] is [ceil(C / C0), ceil(R / 16), 16, C0], padded with zeros; C0 is 32 bytes: 32 int8, 16 of 16 bits,
8 int32."""

from __future__ import annotations

import math

import torch
from emulated_cann.registry import need

ND, NCHW, NCL, NZ = 2, 0, 47, 29
CUBE = 16


def c0_of(dtype: torch.dtype) -> int:
    return 32 // dtype.itemsize


def nz_shape(shape: tuple[int, ...], c0: int) -> tuple[int, ...]:
    *batch, r, c = shape
    return (*batch, math.ceil(c / c0), math.ceil(r / CUBE), CUBE, c0)


def to_nz(x: torch.Tensor, c0: int) -> torch.Tensor:
    *batch, r, c = x.shape
    storage = nz_shape(tuple(x.shape), c0)
    padded = x.new_zeros(*batch, storage[-3] * CUBE, storage[-4] * c0)
    padded[..., :r, :c] = x
    return padded.unflatten(-1, (-1, c0)).unflatten(-3, (-1, CUBE)).movedim(-2, -4).contiguous()


def from_nz(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x [..., C1, R1, 16, C0] -> [..., rows, columns]."""
    return x.movedim(-4, -2).flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()


def plain(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in any format as an ordinary tensor of its shape, also of a transposed NZ matrix."""
    if getattr(t, "acl_format", ND) != NZ:
        return t
    raw = t.raw_storage
    rows, columns = t.shape[-2:]
    if t.stride(-1) == 1 or columns == 1:
        return from_nz(raw, rows, columns)
    need(t.stride(-2) == 1, "a FRACTAL_NZ tensor is used whole or transposed, not sliced")
    return from_nz(raw, columns, rows).transpose(-1, -2)


def int4_values(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> int8 [..., 8 n] in -8..7; element 0 is in bits 0 to 3."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed[..., None] >> shifts) & 15
    return (((nibbles ^ 8) - 8).flatten(-2)).to(torch.int8)
