"""Weights of eight-bit floats (e4m3fn) with a scale for all, for a row or for 128 by 128: times activations as they come, and times
quantised rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows, capability, from_e4m3
from trivium_cuda.kernels.products import NATIVE_FP8, Matrix, Plan, add_parts, product, rows_plan, split
from trivium_cuda.kernels.quantise import BLOCK


def matrix(numbers: Tensor, scales: Tensor) -> Matrix:
    """numbers float8_e4m3fn[..., out, in]; scales float32 [..., 1, 1], [..., out, 1] or [..., out / 128, in / 128] (rounded up)."""
    out, inputs = numbers.shape[-2:]
    rows, columns = scales.shape[-2:]
    if (rows, columns) == (1, 1):
        return Matrix("fp8", numbers, out, inputs, scales)
    if (rows, columns) == (out, 1):
        return Matrix("fp8", numbers, out, inputs, scales, scale_row=1)
    if (rows, columns) == (triton.cdiv(out, BLOCK), triton.cdiv(inputs, BLOCK)):
        return Matrix("fp8", numbers, out, inputs, scales, scale_row=columns, scale_block=1)
    raise ValueError(f"scales [{rows}, {columns}] are none of a weight [{out}, {inputs}]: one, one a row, or one for 128 by 128")


def linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """The operator linear of x[..., in] with numbers float8_e4m3fn[out, in] and float32 scales, see matrix(); in x's dtype."""
    y = product(x, matrix(numbers, scales), bias, x.dtype, invariant=invariant)
    return y.view(*x.shape[:-1], y.shape[-1])


# Reads the weight once for every ROWS rows (n * k bytes), x once for every COLUMNS columns, and does 2 * m * n * k operations. The
# matrix units' own sums have fewer bits than float32 holds: each step's is added to a float32 sum. With parts it writes and reads
# 4 * parts * m * n bytes more.
@triton.jit
def _bytes(
    X, XS, W, WS, bias, OUT, m, n, k, x_row, x_block, w_row, w_block, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, BLOCKED: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, inside, wide = r < m, c < n, r.to(tl.int64)
    acc, low = tl.zeros([ROWS, COLUMNS], tl.float32), tl.program_id(2) * share
    for start in range(low, tl.minimum(k, low + share), DEPTH):
        i = start + tl.arange(0, DEPTH)
        x_mask, w_mask = live[:, None] & (i < k)[None, :], inside[None, :] & (i < k)[:, None]
        if NATIVE:
            x = tl.load(X + wide[:, None] * k + i[None, :], mask=x_mask, other=0.0)
            w = tl.load(W + c.to(tl.int64)[None, :] * k + i[:, None], mask=w_mask, other=0.0)
        else:
            x = from_e4m3(tl.load(X + wide[:, None] * k + i[None, :], mask=x_mask, other=0))
            w = from_e4m3(tl.load(W + c.to(tl.int64)[None, :] * k + i[:, None], mask=w_mask, other=0))
        part = tl.dot(x, w)
        if BLOCKED:
            part = part * tl.load(XS + wide * x_row + start // DEPTH * x_block, mask=live, other=0.0)[:, None]
            part = part * tl.load(WS + c // DEPTH * w_row + start // DEPTH * w_block, mask=inside, other=0.0)[None, :]
        acc += part
    if not BLOCKED:
        acc = acc * tl.load(XS + wide * x_row, mask=live, other=0.0)[:, None]
        acc = acc * tl.load(WS + c * w_row, mask=inside, other=0.0)[None, :]
    if BIASED:
        acc += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = OUT + (tl.program_id(2) * m + wide)[:, None] * n + c[None, :]
    tl.store(to, acc.to(OUT.dtype.element_ty), mask=live[:, None] & inside[None, :])


def linear_rows(
    rows: Rows, numbers: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False,
    tile: Plan | None = None,
) -> Tensor:  # fmt: skip
    """rows of float8_e4m3fn times numbers float8_e4m3fn[out, in], plus bias: [m, out] in dtype. Scales of the rows are [m, 1] with
    those of the weight one or one a row, or [m, in / 128] with those of the weight for 128 by 128; ValueError otherwise.
    tile: None is rows_plan's."""
    (m, k), n, w = rows.numbers.shape, numbers.shape[0], matrix(numbers, scales)
    blocked = w.scale_block > 0
    if rows.scales.shape[1] != (triton.cdiv(k, BLOCK) if blocked else 1):
        raise ValueError(f"rows with {rows.scales.shape[1]} scales each can't be multiplied with scales {list(scales.shape)}")
    out = torch.empty((m, n), dtype=dtype, device=numbers.device)
    if not m:
        return out
    native = capability(numbers.device) >= NATIVE_FP8
    p = tile or rows_plan(m, n, k, numbers.device, kind="fp8", invariant=invariant)
    share, parts = split(k, p)
    to = out if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=out.device)
    biased = bias is not None and parts == 1
    x, y = (rows.numbers, numbers) if native else (rows.numbers.view(torch.uint8), w.raw)
    _bytes[(triton.cdiv(m, p.rows), triton.cdiv(n, p.columns), parts)](
        x, rows.scales, y, scales, bias if biased else out, to, m, n, k, rows.scales.stride(0), int(blocked), w.scale_row,
        w.scale_block, share, ROWS=p.rows, COLUMNS=p.columns, DEPTH=p.depth, BIASED=biased, BLOCKED=blocked, NATIVE=native,
        num_warps=p.warps, num_stages=p.stages,
    )  # fmt: skip
    if parts > 1:
        add_parts(to, bias, out)
    return out
