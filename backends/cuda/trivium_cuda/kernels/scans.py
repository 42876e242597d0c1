"""The short convolution and the state-space recurrence of Mamba-2, for any mixture of prompts and decodes.

Nothing is planned on the host: where a sequence begins, and whether its state is to be read, is on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import activate, power, sequence_of

TOKENS = 8
"""Tokens that a program of the convolution has."""


@triton.jit
def _input(X, STATE, t, begin, page, c, channels, x_token, continues, inside, WIDTH: tl.constexpr):
    """The input at token t (int64) of the step, which may lie before its sequence's first: then what the state has of it."""
    back = t - begin + WIDTH - 1  # its place among what the state holds
    x = tl.load(X + t * x_token + c, mask=inside & (t >= begin), other=0.0).to(tl.float32)
    at = STATE + (page * (WIDTH - 1) + back) * channels + c
    return x + tl.load(at, mask=inside & (t < begin) & continues, other=0.0)


# Reads WIDTH numbers and as many weights for each that it writes, and does 2 * WIDTH operations.
@triton.jit
def _convolve(
    X, W, bias, STATE, table, starts, contexts, Y, tokens, seqs, channels, table_stride, x_token,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    seq = sequence_of(tl.program_id(0), starts, seqs, 1, TOKENS)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    first = begin + (tl.program_id(0) - (begin // TOKENS + seq)) * TOKENS
    page = tl.load(table + seq * table_stride, mask=begin < end, other=0).to(tl.int64)
    continues = tl.load(contexts + seq) > end - begin
    for step in range(0, tl.minimum(end - first, TOKENS)):
        t = first.to(tl.int64) + step
        total = tl.zeros([BLOCK], tl.float32)
        if BIASED:
            total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            x = _input(X, STATE, t - WIDTH + 1 + tap, begin, page, c, channels, x_token, continues, inside, WIDTH)
            total += tl.load(W + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32) * x
        if KIND != "":
            total = activate(total, KIND, 1.0)
        tl.store(Y + t * channels + c, total.to(Y.dtype.element_ty), mask=inside)


# Reads and writes 4 * (WIDTH - 1) bytes a channel.
@triton.jit
def _keep(X, STATE, table, starts, contexts, channels, table_stride, x_token, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    seq, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if begin >= end:
        return
    page = tl.load(table + seq * table_stride).to(tl.int64)
    continues = tl.load(contexts + seq) > end - begin
    for row in tl.static_range(WIDTH - 1):  # what is read lies behind what is written by then
        x = _input(X, STATE, end.to(tl.int64) - WIDTH + 1 + row, begin, page, c, channels, x_token, continues, c < channels, WIDTH)
        tl.store(STATE + (page * (WIDTH - 1) + row) * channels + c, x, mask=c < channels)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, table: Tensor, query_starts: Tensor, context_lens: Tensor,
    *, kind: str | None = None,
) -> Tensor:  # fmt: skip
    """The operator short_conv: x[tokens, channels], weight[channels, width], state float32[pages, width - 1, channels], which is
    changed in place at the pages table int32[seqs] (its first column, if it is a block table). Rows that belong to no sequence are
    left as they are."""
    (tokens, channels), width, seqs = x.shape, weight.shape[1], len(context_lens)
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    block = min(power(channels, 16), 256)
    blocks, where = triton.cdiv(channels, block), (table, query_starts, context_lens)
    _convolve[(tokens // TOKENS + seqs, blocks)](
        x, weight, x if bias is None else bias, state, *where, y, tokens, seqs, channels, table.stride(0), x.stride(0), WIDTH=width,
        KIND=kind or "", BIASED=bias is not None, TOKENS=TOKENS, BLOCK=block, num_warps=2,
    )  # fmt: skip
    if width > 1:
        _keep[(seqs, blocks)](x, state, *where, channels, table.stride(0), x.stride(0), WIDTH=width, BLOCK=block, num_warps=2)
    return y


# A program holds ROWS of a head's state of one sequence: reads and writes 4 * ROWS * dk bytes of it, and for each token reads
# 2 * dk + ROWS numbers and does 6 * ROWS * dk operations. Rows don't depend on each other.
@triton.jit
def _scan(
    X, DT, A, B, C, D, STATE, table, starts, contexts, Y, low, high, dv, dk, heads, share, table_stride, x_token, x_head, dt_token,
    b_token, b_group, c_token, c_group, ROWS: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if begin >= end:
        return
    r, i = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DK)
    here = (r < dv)[:, None] & (i < dk)[None, :]
    page = tl.load(table + seq * table_stride).to(tl.int64)
    at = STATE + (page * heads + head) * dv * dk + r[:, None] * dk + i[None, :]
    state = tl.load(at, mask=here & (tl.load(contexts + seq) > end - begin), other=0.0)
    a, d, group = tl.load(A + head).to(tl.float32), tl.load(D + head).to(tl.float32), head // share
    for step in range(0, end - begin):
        t = begin.to(tl.int64) + step
        dt = tl.minimum(tl.maximum(tl.load(DT + t * dt_token + head).to(tl.float32), low), high)
        x = tl.load(X + t * x_token + head * x_head + r, mask=r < dv, other=0.0).to(tl.float32)
        b = tl.load(B + t * b_token + group * b_group + i, mask=i < dk, other=0.0).to(tl.float32)
        c = tl.load(C + t * c_token + group * c_group + i, mask=i < dk, other=0.0).to(tl.float32)
        state = tl.exp(dt * a) * state + (dt * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + d * x
        tl.store(Y + (t * heads + head) * dv + r, y.to(Y.dtype.element_ty), mask=r < dv)
    tl.store(at, state, mask=here)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, table: Tensor, query_starts: Tensor,
    context_lens: Tensor, *, dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """The operator selective_scan: x[tokens, heads, dv], dt[tokens, heads], a, d[heads], b, c[tokens, groups, dk], state
    float32[pages, heads, dv, dk], which is changed in place as in short_conv. Token by token: a long prompt takes as many steps."""
    (tokens, heads, dv), dk, seqs = x.shape, b.shape[-1], len(context_lens)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        rows = min(power(dv), 32)
        _scan[(seqs, heads, triton.cdiv(dv, rows))](
            x, dt, a, b, c, d, state, table, query_starts, context_lens, y, float(dt_limits[0]), float(dt_limits[1]), dv, dk, heads,
            heads // b.shape[1], table.stride(0), x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0),
            c.stride(1), ROWS=rows, DK=power(dk), num_warps=4,
        )  # fmt: skip
    return y
