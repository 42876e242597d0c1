"""The gate of a feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows, flat, gate, power, warps
from trivium_cuda.kernels.quantise import Kind, arguments, empty_rows, padded, raw, store_quantised


# Reads 2 n numbers a row and writes n; 10 to 20 n operations.
@triton.jit
def _gated(
    G, UP, OUT, n, g_stride, up_stride, limit, alpha, up_offset, BLOCK: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G + row * g_stride + c, mask=c < n, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + c, mask=c < n, other=0.0).to(tl.float32)
    y = gate(g, up, limit, alpha, up_offset, KIND, LIMITED)
    tl.store(OUT + row * n + c, y.to(OUT.dtype.element_ty), mask=c < n)


# The same for whole rows, n bytes of output and a scale.
@triton.jit
def _gated_rows(
    G, UP, Q, S, n, g_stride, up_stride, limit, alpha, up_offset, given, shift,
    BLOCK: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    g = tl.load(G + row * g_stride + c, mask=c < n, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + c, mask=c < n, other=0.0).to(tl.float32)
    y = tl.where(c < n, gate(g, up, limit, alpha, up_offset, KIND, LIMITED), 0.0)
    store_quantised(y.to(G.dtype.element_ty).to(tl.float32), row, Q, S, n, c, given, shift, QUANTISE, BLOCK)


def gated(
    g: Tensor, up: Tensor, *, kind: str = "silu", limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The operator `gated` of g, up[..., n], in g's dtype or another."""
    a, b = flat(g), flat(up)
    n, out = g.shape[-1], torch.empty(g.shape, dtype=dtype or g.dtype, device=g.device)
    block = min(power(n), 1024)
    if len(a):
        _gated[(len(a), triton.cdiv(n, block))](
            a, b, out, n, a.stride(0), b.stride(0), float(limit or 0.0), float(alpha), float(up_offset), BLOCK=block, KIND=kind,
            LIMITED=limit is not None, num_warps=4,
        )  # fmt: skip
    return out


def gated_quantise(
    g: Tensor, up: Tensor, *, kind: str = "silu", limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0,
    quantise: Kind,
) -> Rows:  # fmt: skip
    """quantise_rows(gated(g, up), quantise): what is quantised was rounded to g's dtype."""
    a, b = flat(g), flat(up)
    n, rows, block = g.shape[-1], empty_rows(a, quantise), padded(g.shape[-1], quantise)
    name, *given = arguments(quantise)
    if len(a):
        _gated_rows[(len(a),)](
            a, b, raw(rows.numbers), rows.scales, n, a.stride(0), b.stride(0), float(limit or 0.0), float(alpha), float(up_offset),
            *given, BLOCK=block, KIND=kind, LIMITED=limit is not None, QUANTISE=name, num_warps=warps(block),
        )  # fmt: skip
    return rows
