"""Mixture of experts: choices sorted by expert into blocks, one product over all blocks, and the sum of a token's choices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.activations import gated
from trivium_cuda.kernels.int4 import Packed
from trivium_cuda.kernels.products import Matrix, Routes, product

FEW, MANY = 16, 64
"""Rows of a block: where experts have few rows each, and where they have many."""

Experts = Tensor | Packed
"""weight[experts, out, in]."""


def matrix(weight: Experts) -> Matrix:
    if isinstance(weight, Packed):
        return weight.matrix()
    return Matrix("float", weight, weight.shape[1], weight.shape[2])


def routes(ids: Tensor, experts: int, size: int) -> Routes:
    """Blocks of `size` choices of one expert each, in the order of experts and within them of choices; ids int32[tokens, top_k].
    The number of blocks is bounded by shapes alone, so that nothing waits for the device; those that are left over have no
    expert. divisor is 1: row r is choice r."""
    choices, device = ids.numel(), ids.device
    given, order = torch.sort(ids.flatten().to(torch.int64), stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(0, given, torch.ones_like(given))
    ends = ((counts + size - 1) // size).cumsum(0)
    blocks = choices // size + min(experts, choices)
    expert = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True)
    begins, firsts = ends - (counts + size - 1) // size, counts.cumsum(0) - counts
    place = begins[given] * size + torch.arange(choices, device=device) - firsts[given]
    rows = torch.full((blocks * size,), choices, dtype=torch.int32, device=device)
    rows.scatter_(0, place, order.to(torch.int32))
    return Routes(torch.where(expert < experts, expert, -1).to(torch.int32), rows, 1, size)


# Reads top_k rows of n float32 numbers for each token and writes one: 2 * top_k * n operations, in the order of the choices.
@triton.jit
def _sum_choices(FOUND, weights, OUT, n, top_k, BLOCK: tl.constexpr):
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(top_k):
        choice = token * top_k + j
        total += tl.load(FOUND + choice * n + c, mask=c < n, other=0.0) * tl.load(weights + choice).to(tl.float32)
    tl.store(OUT + token * n + c, total.to(OUT.dtype.element_ty), mask=c < n)


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate: Experts, up: Experts, down: Experts, gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None, *, kind: str = "silu", limit: float | None = None,
    alpha: float = 1.0, up_offset: float = 0.0, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The operator moe_experts of x[tokens, hidden]: weights float[tokens, top_k], ids int32[tokens, top_k], matrices
    [experts, out, in]. Blocks are larger where each expert has many rows, unless `invariant`; the gate's result is rounded
    to x's dtype (to float32 if the matrices are), choices are summed in float32."""
    (tokens, top_k), experts = ids.shape, gate.shape[0]
    hidden = down.shape[1]
    y = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    choices = tokens * top_k
    size = FEW if invariant or choices <= FEW * experts else MANY
    plan = routes(ids, experts, size)
    between = torch.promote_types(x.dtype, gate.dtype) if isinstance(gate, Tensor) else x.dtype
    of_tokens = plan._replace(divisor=top_k)
    g = product(x, matrix(gate), gate_bias, torch.float32, routes=of_tokens, rows=choices)
    u = product(x, matrix(up), up_bias, torch.float32, routes=of_tokens, rows=choices)
    a = gated(g, u, kind=kind, limit=limit, alpha=alpha, up_offset=up_offset, dtype=between)
    found = product(a, matrix(down), down_bias, torch.float32, routes=plan, rows=choices)
    _sum_choices[(tokens, triton.cdiv(hidden, 1024))](found, weights.contiguous(), y, hidden, top_k, BLOCK=1024, num_warps=4)
    return y
