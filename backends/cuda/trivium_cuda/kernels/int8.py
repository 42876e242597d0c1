"""Weights of whole numbers with a scale a row: times activations as they come, and times quantised rows in whole numbers alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows
from trivium_cuda.kernels.products import Matrix, product


def matrix(numbers: Tensor, scales: Tensor) -> Matrix:
    """numbers int8[..., out, in], scales float32[..., out, 1]."""
    return Matrix("int8", numbers, numbers.shape[-2], numbers.shape[-1], scales, scale_row=1)


def linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """The operator linear of x[..., in] with numbers int8[out, in] * scales float32[out, 1], in x's dtype."""
    y = product(x, matrix(numbers, scales), bias, x.dtype, invariant=invariant)
    return y.view(*x.shape[:-1], y.shape[-1])


# Reads the weight once for every ROWS rows (n * k bytes), x once for every COLUMNS columns, and does 2 * m * n * k operations of
# whole numbers, exactly: the order of the sum does not matter.
@triton.jit
def _whole(X, XS, W, WS, bias, OUT, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr):
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside, wide = r < m, c < n, r.to(tl.int64)
    acc = tl.zeros([ROWS, COLUMNS], tl.int32)
    for start in range(0, k, DEPTH):
        i = start + tl.arange(0, DEPTH)
        x = tl.load(X + wide[:, None] * k + i[None, :], mask=live[:, None] & (i < k)[None, :], other=0)
        w = tl.load(W + c.to(tl.int64)[None, :] * k + i[:, None], mask=inside[None, :] & (i < k)[:, None], other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    y = acc.to(tl.float32) * tl.load(XS + r, mask=live, other=0.0)[:, None] * tl.load(WS + c, mask=inside, other=0.0)[None, :]
    if BIASED:
        y += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + wide[:, None] * n + c[None, :], y.to(OUT.dtype.element_ty), mask=live[:, None] & inside[None, :])


def linear_rows(rows: Rows, numbers: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """rows of int8 with scales [m, 1] times numbers int8[out, in] * scales float32[out, 1], plus bias: [m, out] in dtype. The sums
    are whole numbers, at most 127² · in, which 32 bits hold up to 133,000 inputs."""
    (m, k), n = rows.numbers.shape, numbers.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=numbers.device)
    if m:
        tile, columns, warps = (16, 64, 4) if m <= 32 else (64, 64, 4) if m <= 256 else (128, 128, 8)
        _whole[(triton.cdiv(m, tile), triton.cdiv(n, columns))](
            rows.numbers, rows.scales, numbers, scales, out if bias is None else bias, out, m, n, k, ROWS=tile, COLUMNS=columns,
            DEPTH=128, BIASED=bias is not None, num_warps=warps, num_stages=3,
        )  # fmt: skip
    return out
