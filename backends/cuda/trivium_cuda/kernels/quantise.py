"""Activations as bytes with a scale a row, or a scale for 128 numbers of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import Rows, flat, largest, power, quantised, round_even, warps

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8 blocks": torch.float8_e4m3fn}
"""The kinds of quantised rows: with a scale a row, or for "fp8 blocks" one for every BLOCK numbers of it."""
BLOCK = 128


class Given(NamedTuple):
    """The kind of int8 rows whose scale and offset are given: round(x / scale) + offset within -128..127, ties to even."""

    scale: float
    offset: int

    def __str__(self) -> str:
        return f"int8 by {self.scale:.3g} plus {self.offset}"


Kind = str | Given


def arguments(kind: Kind | None) -> tuple[str, float, int]:
    """(name, given scale, given offset) of a kind as kernels take it; None: not quantised."""
    if isinstance(kind, Given):
        return "int8 given", *kind
    return kind or "", 1.0, 0


def empty_rows(x: Tensor, kind: Kind) -> Rows:
    """Memory for the rows of x[rows, n]."""
    rows, n = x.shape
    numbers = torch.empty(x.shape, dtype=torch.int8 if isinstance(kind, Given) else DTYPES[kind], device=x.device)
    scales = triton.cdiv(n, BLOCK) if kind == "fp8 blocks" else 1
    return Rows(numbers, torch.empty((rows, scales), dtype=torch.float32, device=x.device))


def padded(n: int, kind: Kind | None) -> int:
    """Numbers of the program that holds a row of n and stores it as `kind`."""
    return power(n, BLOCK if kind == "fp8 blocks" else 1)


def raw(numbers: Tensor) -> Tensor:
    """Bytes as kernels take them: int8 as it is, float8 as uint8."""
    return numbers if numbers.dtype == torch.int8 else numbers.view(torch.uint8)


@triton.jit
def store_quantised(y, row, Q, S, n, c, given, shift, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a row y, float32[BLOCK] with zeros beyond n, as bytes and its scale or scales; given, shift: see arguments."""
    if KIND == "fp8 blocks":
        parts: tl.constexpr = BLOCK // 128
        part, runs = tl.arange(0, parts), tl.reshape(y, [parts, 128])
        scales = tl.div_rn(tl.max(tl.abs(runs), 1), tl.full([parts], 448.0, tl.float32))
        tl.store(S + row * tl.cdiv(n, 128) + part, scales, mask=part * 128 < n)
        code = tl.reshape(quantised(runs, scales[:, None], "fp8"), [BLOCK])
    elif KIND == "int8 given":
        tl.store(S + row, given)
        whole = round_even(tl.minimum(tl.maximum(tl.div_rn(y, given + tl.zeros_like(y)), -512.0), 512.0)) + shift
        code = tl.minimum(tl.maximum(whole, -128.0), 127.0).to(tl.int8)
    else:
        scale = tl.div_rn(tl.max(tl.abs(y), 0), largest(y, KIND))
        tl.store(S + row, scale)
        code = quantised(y, scale, KIND)
    tl.store(Q + row * n + c, code, mask=c < n)


# Reads n numbers a row and writes n bytes and a scale; about 10 n operations.
@triton.jit
def _rows(X, Q, S, n, stride, given, shift, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + c, mask=c < n, other=0.0).to(tl.float32)
    store_quantised(x, row, Q, S, n, c, given, shift, KIND, BLOCK)


# Reads n numbers a row and writes n bytes and n / 128 scales; about 10 n operations. A program takes 128 numbers of 16 rows.
@triton.jit
def _blocks(X, Q, S, rows, n, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (c < n)[None, :]
    x = tl.load(X + row[:, None] * stride + c[None, :], mask=here, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(top, tl.full([ROWS], 448.0, tl.float32))
    tl.store(S + row * tl.cdiv(n, BLOCK) + part, scale, mask=row < rows)
    tl.store(Q + row[:, None] * n + c[None, :], quantised(x, scale[:, None], "fp8"), mask=here)


def quantise_rows(x: Tensor, kind: Kind) -> Rows:
    """x[rows, n] as "int8" or "fp8" (e4m3fn): the scale is the row's largest size / 127 or / 448 in float32, numbers are the
    nearest, ties to even; a row of zeros has the scale 0. Or as Given says."""
    x = flat(x)
    rows, n = empty_rows(x, kind), x.shape[1]
    block, (name, *given) = power(n), arguments(kind)
    if len(x):
        _rows[(len(x),)](x, raw(rows.numbers), rows.scales, n, x.stride(0), *given, BLOCK=block, KIND=name, num_warps=warps(block))
    return rows


def quantise_blocks(x: Tensor) -> Rows:
    """x[rows, n] as float8_e4m3fn with a scale for every 128 numbers of a row (the last may have fewer): scales [rows, n / 128]."""
    x = flat(x)
    count, n = x.shape
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((count, triton.cdiv(n, BLOCK)), dtype=torch.float32, device=x.device)
    if count:
        grid = triton.cdiv(count, 16), triton.cdiv(n, BLOCK)
        _blocks[grid](x, raw(numbers), scales, count, n, x.stride(0), ROWS=16, BLOCK=BLOCK, num_warps=4)
    return Rows(numbers, scales)
