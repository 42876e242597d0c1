"""Weights of whole numbers with a scale a row: times activations as they come, and times quantised rows in whole numbers alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows
from trivium_cuda.kernels.products import Matrix, Plan, product, rows_plan, split


def matrix(numbers: Tensor, scales: Tensor) -> Matrix:
    """numbers int8[..., out, in], scales float32[..., out, 1]."""
    return Matrix("int8", numbers, numbers.shape[-2], numbers.shape[-1], scales, scale_row=1)


def linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """The operator linear of x[..., in] with numbers int8[out, in] * scales float32[out, 1], in x's dtype."""
    y = product(x, matrix(numbers, scales), bias, x.dtype, invariant=invariant)
    return y.view(*x.shape[:-1], y.shape[-1])


# Reads the weight once for every ROWS rows (n * k bytes), x once for every COLUMNS columns, and does 2 * m * n * k operations of
# whole numbers, exactly: the order of the sum does not matter. With parts it writes and reads 4 * parts * m * n bytes more.
@triton.jit
def _whole(
    X, XS, W, WS, bias, OUT, m, n, k, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside, wide = r < m, c < n, r.to(tl.int64)
    acc = tl.zeros([ROWS, COLUMNS], tl.int32)
    low = tl.program_id(2) * share
    for start in range(low, tl.minimum(k, low + share), DEPTH):
        i = start + tl.arange(0, DEPTH)
        x = tl.load(X + wide[:, None] * k + i[None, :], mask=live[:, None] & (i < k)[None, :], other=0)
        w = tl.load(W + c.to(tl.int64)[None, :] * k + i[:, None], mask=inside[None, :] & (i < k)[:, None], other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    to = OUT + (tl.program_id(2) * m + wide)[:, None] * n + c[None, :]
    if PARTS > 1:
        tl.store(to, acc, mask=live[:, None] & inside[None, :])
    else:
        y = _scaled(acc, tl.load(XS + r, mask=live, other=0.0)[:, None], tl.load(WS + c, mask=inside, other=0.0)[None, :])
        if BIASED:
            y += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(to, y.to(OUT.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _scaled(total, x_scale, w_scale):
    return total.to(tl.float32) * x_scale * w_scale


# Reads 4 * parts bytes and writes a number for each of a row's n sums.
@triton.jit
def _add_whole(PARTIAL, XS, WS, bias, OUT, size, n, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, total = i < size, tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(PARTS):
        total += tl.load(PARTIAL + part * size + i, mask=inside, other=0)
    y = _scaled(total, tl.load(XS + i // n, mask=inside, other=0.0), tl.load(WS + i % n, mask=inside, other=0.0))
    if BIASED:
        y += tl.load(bias + i % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + i, y.to(OUT.dtype.element_ty), mask=inside)


def linear_rows(
    rows: Rows, numbers: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, tile: Plan | None = None
) -> Tensor:
    """rows of int8 with scales [m, 1] times numbers int8[out, in] * scales float32[out, 1], plus bias: [m, out] in dtype. The sums
    are whole numbers, at most 127² · in, which 32 bits hold up to 133,000 inputs; no tile (None: rows_plan's) changes a bit."""
    (m, k), n = rows.numbers.shape, numbers.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=numbers.device)
    if not m:
        return out
    p = tile or rows_plan(m, n, k, numbers.device, kind="int8", invariant=False)
    share, parts = split(k, p)
    to = out if parts == 1 else torch.empty((parts, m, n), dtype=torch.int32, device=out.device)
    given, biased = out if bias is None else bias, bias is not None
    _whole[(triton.cdiv(m, p.rows), triton.cdiv(n, p.columns), parts)](
        rows.numbers, rows.scales, numbers, scales, given, to, m, n, k, share, ROWS=p.rows, COLUMNS=p.columns, DEPTH=p.depth,
        BIASED=biased, PARTS=parts, num_warps=p.warps, num_stages=p.stages,
    )  # fmt: skip
    if parts > 1:
        _add_whole[(triton.cdiv(out.numel(), 1024),)](
            to, rows.scales, scales, given, out, out.numel(), n, PARTS=parts, BLOCK=1024, BIASED=biased, num_warps=4
        )
    return out
