"""Products in which both sides have 8 bits: activations that were rounded, by whoever made them or here, times W8A8 weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivium_cuda.kernels import fp8, int8, quantise
from trivium_cuda.kernels.common import Rows
from trivium_cuda.kernels.products import Plan
from trivium_cuda.kernels.quantise import Kind
from trivium_cuda.session import CudaSession
from trivium_cuda.weights import W8A8, Float8
from trivium_torch.weights import Int8

LIBRARY_CHIPS = (90, 100, 103)
"""Capabilities times ten on which torch._scaled_mm takes a scale for each row of either side."""
LIBRARY_FROM = 256
"""Rows beyond which it is taken unless something else was measured: its tiles are made for many rows."""
LIBRARY_ALIGNED = 16
"""Inputs and outputs that it takes are multiples of this."""


class Rounded(NamedTuple):
    """Activations of 8 bits: `rows` of what had the `shape` [..., n] and `dtype` before."""

    rows: Rows
    shape: torch.Size
    dtype: torch.dtype


def rounded(x: Tensor, kind: Kind) -> Rounded:
    """x[..., n] rounded to one of the kinds of kernels.quantise."""
    made = quantise.quantise_blocks(x) if kind == "fp8 blocks" else quantise.quantise_rows(x, kind)
    return Rounded(made, x.shape, x.dtype)


def linear(session: CudaSession, x: Tensor | Rounded, weight: W8A8, bias: Tensor | None) -> Tensor:
    """The operator linear with a W8A8 matrix, in the dtype that x had."""
    given = rounded(x, weight.kind) if isinstance(x, Tensor) else x
    y = _product(session, given, weight.weight, _shifted(bias, weight.shift))
    return y.view(*given.shape[:-1], y.shape[-1])


def _shifted(bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """bias - shift, in float32."""
    return bias if shift is None else -shift if bias is None else bias.to(torch.float32) - shift


def _product(session: CudaSession, x: Rounded, weight: Int8 | Float8, bias: Tensor | None) -> Tensor:
    m = len(x.rows.numbers)
    chosen = session.tuned.rows_choice(weight, m) if session.tuned else None
    if isinstance(chosen, str) or (chosen is None and m > LIBRARY_FROM and library_refuses(session, weight, x.dtype) is None):
        assert isinstance(weight, Float8)
        return by_library(x.rows, weight, bias, x.dtype)
    return by_triton(session, x, weight, bias, chosen)


def by_triton(session: CudaSession, x: Rounded, weight: Int8 | Float8, bias: Tensor | None, tile: Plan | None = None) -> Tensor:
    """x · weightᵀ + bias by this backend's kernels."""
    given = weight.numbers, weight.scales, bias, x.dtype
    if isinstance(weight, Int8):
        return int8.linear_rows(x.rows, *given, tile=tile)
    return fp8.linear_rows(x.rows, *given, invariant=session.batch_invariant, tile=tile)


def library_refuses(session: CudaSession, weight: Int8 | Float8, dtype: torch.dtype) -> str | None:
    """Why torch._scaled_mm can't make a product with the weight; None: it can."""
    if isinstance(weight, Int8):
        return "it takes no whole numbers"
    if session.batch_invariant:
        return "its sums depend on the number of rows"
    if session.chip not in LIBRARY_CHIPS:
        return "it has no scales for rows on this chip"
    if tuple(weight.scales.shape) not in ((1, 1), (weight.shape[0], 1)):
        return "scales are for 128 by 128 numbers"
    if dtype != torch.bfloat16:
        return f"its result is bfloat16, not {dtype}"
    return (
        f"{list(weight.shape)} is not a multiple of {LIBRARY_ALIGNED}" if any(n % LIBRARY_ALIGNED for n in weight.shape) else None
    )


def by_library(rows: Rows, weight: Float8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """rows[m, in] · weightᵀ + bias by torch._scaled_mm, which wants the second matrix by columns and float32 scales [m, 1] and
    [1, out]. Sums are kept in float32 (use_fast_accum: in fewer bits)."""
    scales = weight.scales.expand(weight.shape[0], 1).reshape(1, -1).contiguous()
    given = None if bias is None else bias.to(dtype)
    y: Tensor = torch._scaled_mm(
        rows.numbers, weight.numbers.t(), rows.scales, scales, bias=given, out_dtype=dtype, use_fast_accum=False
    )
    return y
