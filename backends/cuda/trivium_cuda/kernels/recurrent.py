"""The gated delta rule: linear attention with decay. Sequences of FEW tokens go token by token with the state in registers, longer
ones in chunks, whose tokens are solved for together by matrix products: two launches, each of which passes over the other's
sequences. Which has a sequence, and how it is cut, depends on its own tokens only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import first_tile, power, sequence_of

FEW = 16
CHUNK = 32
"""Tokens that are solved for together."""
DEPTH = 64


# A program holds COLUMNS of a head's state of one sequence: reads and writes 4 * dk * COLUMNS bytes of it, and for each token reads
# 2 * dk + COLUMNS numbers and does 8 * dk * COLUMNS operations. Columns don't depend on each other.
@triton.jit
def _delta_rule(
    Q, K, V, G, BETA, STATE, table, starts, contexts, Y, scale, dk, dv, heads, most, table_stride, q_token, q_head, k_token, k_head,
    v_token, v_head, g_token, beta_token, DK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if (begin >= end) | (end - begin > most):
        return
    i, c = tl.arange(0, DK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = (i < dk)[:, None] & (c < dv)[None, :]
    page = tl.load(table + seq * table_stride).to(tl.int64)
    at = STATE + (page * heads + head) * dk * dv + i[:, None] * dv + c[None, :]
    continues = tl.load(contexts + seq) > end - begin
    state = tl.load(at, mask=here & continues, other=0.0)
    for step in range(0, end - begin):
        t = begin.to(tl.int64) + step
        k = tl.load(K + t * k_token + head * k_head + i, mask=i < dk, other=0.0).to(tl.float32)
        q = tl.load(Q + t * q_token + head * q_head + i, mask=i < dk, other=0.0).to(tl.float32)
        v = tl.load(V + t * v_token + head * v_head + c, mask=c < dv, other=0.0).to(tl.float32)
        beta = tl.load(BETA + t * beta_token + head).to(tl.float32)
        state = state * tl.exp(tl.load(G + t * g_token + head).to(tl.float32))
        missing = v - tl.sum(state * k[:, None], 0)
        state += (beta * k)[:, None] * missing[None, :]
        y = tl.sum(state * q[:, None], 0) * scale
        tl.store(Y + (t * heads + head) * dv + c, y.to(Y.dtype.element_ty), mask=c < dv)
    tl.store(at, state, mask=here)


@triton.jit
def _decays(G, BETA, t, live, head, g_token, beta_token, CHUNK: tl.constexpr):
    """(run, decay, beta) of a chunk: sums of g up to each token, exp of their differences where a token looks back, else 0."""
    i = tl.arange(0, CHUNK)
    g = tl.load(G + t * g_token + head, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(BETA + t * beta_token + head, mask=live, other=0.0).to(tl.float32)
    back = i[:, None] >= i[None, :]
    run = tl.sum(tl.where(back, g[None, :], 0.0), 1)
    decay = tl.where(back, tl.exp(tl.where(back, run[:, None] - run[None, :], 0.0)), 0.0)
    return run, decay, beta


# A program makes a chunk's matrix for one head: reads CHUNK * dk numbers, does 2 * dk * CHUNK² operations for the products of keys
# and CHUNK³ for the inverse, and writes 4 * CHUNK² bytes.
@triton.jit
def _solve(
    K, G, BETA, starts, INVERSE, seqs, heads, dk, few, k_token, k_head, g_token, beta_token,
    DK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seq = sequence_of(tile, starts, seqs, 1, CHUNK)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    first = begin + (tile - first_tile(starts, seq, 1, CHUNK)) * CHUNK
    if (first >= end) | (end - begin <= few):
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    live, t = first + i < end, (first + i).to(tl.int64)
    k = tl.load(K + t[:, None] * k_token + head * k_head + d[None, :], mask=live[:, None] & (d < dk)[None, :], other=0.0)
    k = k.to(tl.float32)
    _, decay, beta = _decays(G, BETA, t, live, head, g_token, beta_token, CHUNK)
    below = i[:, None] > i[None, :]
    system = tl.where(below, beta[:, None] * decay * tl.dot(k, tl.trans(k), input_precision=PRECISION), 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):  # forward substitution: products of powers of the matrix would cancel
        mine = i == row
        factors = tl.sum(tl.where(mine[:, None], system, 0.0), 0)
        inverse -= tl.where(mine[:, None], tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    at = INVERSE + (tile.to(tl.int64) * heads + head) * CHUNK * CHUNK
    tl.store(at + i[:, None] * CHUNK + i[None, :], inverse)


# A program goes through a sequence with COLUMNS of a head's state, which stays in the page, DEPTH rows at a time in registers: for
# each chunk reads CHUNK * (3 * dk + COLUMNS) numbers, 4 * CHUNK² bytes and the state twice, writes it once, 4 * dk * COLUMNS bytes
# each time, and does 2 * CHUNK * (3 * dk * COLUMNS + CHUNK * (dk + 2 * COLUMNS)) operations.
@triton.jit
def _delta_chunks(
    Q, K, V, G, BETA, STATE, INVERSE, table, starts, contexts, Y, scale, dk, dv, heads, few, table_stride, q_token, q_head, k_token,
    k_head, v_token, v_head, g_token, beta_token,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end - begin <= few:
        return
    c, i = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    page = tl.load(table + seq * table_stride).to(tl.int64)
    STATE += (page * heads + head) * dk * dv + c[None, :]
    tile = first_tile(starts, seq, 1, CHUNK)
    known = tl.load(contexts + seq) > end - begin
    for first in range(begin, end, CHUNK):
        live, t = first + i < end, (first + i).to(tl.int64)
        run, decay, beta = _decays(G, BETA, t, live, head, g_token, beta_token, CHUNK)
        past, asked = tl.zeros([CHUNK, COLUMNS], tl.float32), tl.zeros([CHUNK, COLUMNS], tl.float32)
        seen = tl.zeros([CHUNK, CHUNK], tl.float32)
        for low in range(0, dk, DEPTH):
            d = low + tl.arange(0, DEPTH)
            whole = live[:, None] & (d < dk)[None, :]
            k = tl.load(K + t[:, None] * k_token + head * k_head + d[None, :], mask=whole, other=0.0).to(tl.float32)
            q = tl.load(Q + t[:, None] * q_token + head * q_head + d[None, :], mask=whole, other=0.0).to(tl.float32)
            state = tl.load(STATE + d[:, None] * dv, mask=(d < dk)[:, None] & (c < dv)[None, :] & known, other=0.0)
            past = tl.dot(k, state, past, input_precision=PRECISION)
            asked = tl.dot(q, state, asked, input_precision=PRECISION)
            seen = tl.dot(q, tl.trans(k), seen, input_precision=PRECISION)
        some = live[:, None] & (c < dv)[None, :]
        v = tl.load(V + t[:, None] * v_token + head * v_head + c[None, :], mask=some, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE + (tile.to(tl.int64) * heads + head) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
        u = tl.dot(inverse, beta[:, None] * (v - tl.exp(run)[:, None] * past), input_precision=PRECISION)
        y = tl.exp(run)[:, None] * asked + tl.dot(decay * seen, u, input_precision=PRECISION)
        tl.store(Y + (t[:, None] * heads + head) * dv + c[None, :], (y * scale).to(Y.dtype.element_ty), mask=some)
        last = tl.sum(tl.where(i == CHUNK - 1, run, 0.0), 0)
        for low in range(0, dk, DEPTH):
            d = low + tl.arange(0, DEPTH)
            whole, here = live[:, None] & (d < dk)[None, :], (d < dk)[:, None] & (c < dv)[None, :]
            k = tl.load(K + t[:, None] * k_token + head * k_head + d[None, :], mask=whole, other=0.0).to(tl.float32)
            state = tl.exp(last) * tl.load(STATE + d[:, None] * dv, mask=here & known, other=0.0)
            state = tl.dot(tl.trans(k * tl.exp(last - run)[:, None]), u, state, input_precision=PRECISION)
            tl.debug_barrier()  # every thread has read what is written now
            tl.store(STATE + d[:, None] * dv, state, mask=here)
        tl.debug_barrier()  # and will read what others have written
        known = first >= begin  # from here on the page holds the state
        tile += 1


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, table: Tensor, query_starts: Tensor,
    context_lens: Tensor, *, scale: float, max_queries: int,
) -> Tensor:  # fmt: skip
    """The operator gated_delta_rule: q, k[tokens, heads, dk], v[tokens, heads, dv], g, beta[tokens, heads]; state float32[pages,
    heads, dk, dv] is changed in place at the pages table int32[seqs] (its first column, if it is a block table). max_queries: no
    sequence of the step has more tokens in it. Rows that belong to no sequence are left as they are.

    Chunks as in Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024 (the WY form), with decay: with G the
    running sum of g, S_t = exp(G_t) S_0 + sum over j <= t of exp(G_t - G_j) k_j ⊗ u_j, where the u of a chunk solve (I + A) u =
    beta (v - exp(G) S_0ᵀk), A_ij = beta_i exp(G_i - G_j) k_i·k_j for j < i. Their products are of float32 rounded to tf32, unless
    the activations are float32.
    """
    (tokens, heads, dk), dv, seqs = q.shape, v.shape[-1], len(context_lens)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not tokens:
        return y
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), beta.stride(0)
    columns = min(power(dv), 32)
    _delta_rule[(seqs, heads, triton.cdiv(dv, columns))](
        q, k, v, g, beta, state, table, query_starts, context_lens, y, float(scale), dk, dv, heads, FEW, table.stride(0), *strides,
        DK=power(dk), COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    if max_queries > FEW:
        columns, tiles = min(power(dv, 16), 32), tokens // CHUNK + seqs
        inverse = torch.empty((tiles, heads, CHUNK, CHUNK), dtype=torch.float32, device=q.device)
        shared = {"CHUNK": CHUNK, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}
        _solve[(tiles, heads)](
            k, g, beta, query_starts, inverse, seqs, heads, dk, FEW, k.stride(0), k.stride(1), g.stride(0), beta.stride(0),
            DK=power(dk, 16), **shared, num_warps=8, num_stages=1,
        )  # fmt: skip
        _delta_chunks[(seqs, heads, triton.cdiv(dv, columns))](
            q, k, v, g, beta, state, inverse, table, query_starts, context_lens, y, float(scale), dk, dv, heads, FEW,
            table.stride(0), *strides, DEPTH=min(power(dk, 16), DEPTH), COLUMNS=columns, **shared, num_warps=4, num_stages=1,
        )  # fmt: skip
    return y
