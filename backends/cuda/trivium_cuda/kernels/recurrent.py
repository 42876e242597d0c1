"""The gated delta rule: linear attention with decay, token by token with the state in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import power


# A program holds COLUMNS of a head's state of one sequence: reads and writes 4 * dk * COLUMNS bytes of it, and for each token reads
# 2 * dk + COLUMNS numbers and does 8 * dk * COLUMNS operations. Columns don't depend on each other.
@triton.jit
def _delta_rule(
    Q, K, V, G, BETA, STATE, table, starts, contexts, Y, scale, dk, dv, heads, table_stride, q_token, q_head, k_token, k_head,
    v_token, v_head, g_token, beta_token, DK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if begin >= end:
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


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, table: Tensor, query_starts: Tensor,
    context_lens: Tensor, *, scale: float,
) -> Tensor:  # fmt: skip
    """The operator gated_delta_rule: q, k[tokens, heads, dk], v[tokens, heads, dv], g, beta[tokens, heads]; state float32[pages,
    heads, dk, dv] is changed in place at the pages table int32[seqs] (its first column, if it is a block table). Rows that
    belong to no sequence are left as they are."""
    (tokens, heads, dk), dv, seqs = q.shape, v.shape[-1], len(context_lens)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    columns = min(power(dv), 32)
    if tokens:
        _delta_rule[(seqs, heads, triton.cdiv(dv, columns))](
            q, k, v, g, beta, state, table, query_starts, context_lens, y, float(scale), dk, dv, heads, table.stride(0),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), beta.stride(0),
            DK=power(dk), COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return y
