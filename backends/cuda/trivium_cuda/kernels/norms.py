"""Root mean square norms, of a row or of the sum of two, and quantised where a product of bytes reads them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows, flat, warps
from trivium_cuda.kernels.quantise import Kind, arguments, empty_rows, padded, raw, store_quantised


@triton.jit
def normed(x, W, c, n, eps, offset, WEIGHT: tl.constexpr):
    """The operator rms_norm of one row x, float32[BLOCK] with zeros beyond n."""
    y = x / tl.sqrt(tl.sum(x * x, 0) / n + eps)
    if WEIGHT:
        y = y * (offset + tl.load(W + c, mask=c < n, other=0.0).to(tl.float32))
    return y


# Reads a row and writes it: 2 n numbers (with ADD reads two rows and writes two: 4 n; quantised output is a byte a number).
# About 5 n operations.
@triton.jit
def _norm(
    X, Y, W, TOTAL, OUT, Q, S, n, x_stride, y_stride, eps, offset, given, shift,
    BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    dtype = X.dtype.element_ty
    x = tl.load(X + row * x_stride + c, mask=c < n, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(Y + row * y_stride + c, mask=c < n, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(TOTAL + row * n + c, total, mask=c < n)
        x = total.to(tl.float32)
    y = normed(x, W, c, n, eps, offset, WEIGHT).to(dtype)
    if KIND == "":
        tl.store(OUT + row * n + c, y, mask=c < n)
    else:
        store_quantised(y.to(tl.float32), row, Q, S, n, c, given, shift, KIND, BLOCK)


def _launch(x: Tensor, y: Tensor | None, weight: Tensor | None, eps: float, offset: float, kind: Kind | None) -> tuple[Tensor, Any]:
    """(sum of x and y or x itself, its norm or the norm's quantised rows)."""
    a = flat(x)
    b = a if y is None else flat(y)
    n, shape = x.shape[-1], x.shape
    total = a if y is None else torch.empty(shape, dtype=x.dtype, device=x.device)
    rows = empty_rows(a, kind) if kind else Rows(a, a)
    out = a if kind else torch.empty(shape, dtype=x.dtype, device=x.device)
    block, (name, *given) = padded(n, kind), arguments(kind)
    if len(a):
        _norm[(len(a),)](
            a, b, a if weight is None else weight, total, out, raw(rows.numbers) if kind else a, rows.scales, n, a.stride(0),
            b.stride(0), eps, offset, *given, BLOCK=block, ADD=y is not None, WEIGHT=weight is not None, KIND=name,
            num_warps=warps(block),
        )  # fmt: skip
    return total, rows if kind else out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """The operator rms_norm of x[..., n]."""
    out: Tensor = _launch(x, None, weight, eps, offset, None)[1]
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm of it) of x, y[..., n]."""
    return _launch(x, y, weight, eps, offset, None)


def rms_norm_quantise(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, kind: Kind) -> Rows:
    """quantise_rows(rms_norm(x)): what is quantised was rounded to x's dtype."""
    rows: Rows = _launch(x, None, weight, eps, offset, kind)[1]
    return rows


def add_rms_norm_quantise(
    x: Tensor, y: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, kind: Kind
) -> tuple[Tensor, Rows]:
    """(x + y, rms_norm_quantise of it)."""
    return _launch(x, y, weight, eps, offset, kind)
