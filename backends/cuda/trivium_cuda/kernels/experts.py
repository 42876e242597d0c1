"""Mixture of experts: choices sorted by expert into blocks, one product over all blocks, and the sum of a token's choices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.activations import gated
from trivium_cuda.kernels.common import capability, power
from trivium_cuda.kernels.int4 import Packed
from trivium_cuda.kernels.products import Matrix, Routes, product

FEW, MANY = 16, 64
"""Rows of a block: where experts have few rows each, and where they have many."""

Experts = Tensor | Packed | Matrix
"""weight[experts, out, in]."""


def matrix(weight: Experts) -> Matrix:
    if isinstance(weight, Matrix):
        return weight
    if isinstance(weight, Packed):
        return weight.matrix()
    return Matrix("float", weight, weight.shape[1], weight.shape[2])


# Reads the choices once for each expert, 4 bytes each, and writes how many an expert has.
@triton.jit
def _count(ids, COUNTS, choices, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, choices, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + i, mask=i < choices, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(COUNTS + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def _blocks_of(counts, experts, SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """(number of every expert, its blocks)."""
    e = tl.arange(0, EXPERTS)
    return e, tl.cdiv(tl.load(counts + e, mask=e < experts, other=0), SIZE)


# Reads the counts and writes, for each block, its expert and empty rows.
@triton.jit
def _lay_out(counts, OF_BLOCK, ROWS, experts, blocks, choices, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e, own = _blocks_of(counts, experts, SIZE, EXPERTS)
    before = tl.sum(((tl.cumsum(own, 0)[None, :] <= b[:, None]) & (e < experts)[None, :]).to(tl.int32), 1)
    tl.store(OF_BLOCK + b, tl.where(before < experts, before, -1), mask=b < blocks)
    empty = tl.zeros([BLOCK, SIZE], tl.int32) + choices
    tl.store(ROWS + b[:, None] * SIZE + tl.arange(0, SIZE)[None, :], empty, mask=(b < blocks)[:, None])


# Compares each choice with those before it, 4 bytes each, and writes it to its place.
@triton.jit
def _place(ids, counts, ROWS, experts, choices, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + i, mask=i < choices, other=-1)
    e, own = _blocks_of(counts, experts, SIZE, EXPERTS)
    first = tl.sum(tl.where(e[None, :] < id[:, None], own[None, :], 0), 1)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.minimum(choices, (tl.program_id(0) + 1) * BLOCK), MANY):
        j = start + tl.arange(0, MANY)
        other = tl.load(ids + j, mask=j < choices, other=-1)
        rank += tl.sum(((other[None, :] == id[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(ROWS + first * SIZE + rank, i, mask=i < choices)


def routes(ids: Tensor, experts: int, size: int) -> Routes:
    """Blocks of `size` choices of one expert each, in the order of experts and within them of choices; ids int32[tokens, top_k].
    The number of blocks is bounded by shapes alone, so that nothing waits for the device; those that are left over have no
    expert. divisor is 1: row r is choice r."""
    ids, choices, device = ids.contiguous(), ids.numel(), ids.device
    blocks = choices // size + min(experts, choices)
    counts, of_block = (torch.empty(n, dtype=torch.int32, device=device) for n in (experts, blocks))
    rows = torch.empty(blocks * size, dtype=torch.int32, device=device)
    shared = {"SIZE": size, "EXPERTS": power(experts), "num_warps": 4}
    _count[(experts,)](ids, counts, choices, BLOCK=1024, num_warps=4)
    _lay_out[(triton.cdiv(blocks, 16),)](counts, of_block, rows, experts, blocks, choices, BLOCK=16, **shared)
    _place[(triton.cdiv(choices, 16),)](ids, counts, rows, experts, choices, BLOCK=16, MANY=256, **shared)
    return Routes(of_block, rows, 1, size)


# Reads top_k rows of n float32 numbers for each token and writes one: 2 * top_k * n operations, in the order of the choices.
@triton.jit
def _sum_choices(FOUND, weights, OUT, n, top_k, BLOCK: tl.constexpr):
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(top_k):
        choice = token * top_k + j
        total += tl.load(FOUND + choice * n + c, mask=c < n, other=0.0) * tl.load(weights + choice).to(tl.float32)
    tl.store(OUT + token * n + c, total.to(OUT.dtype.element_ty), mask=c < n)


def _many(weight: Matrix, device: torch.device) -> int:
    """Numbers that become floats first take registers that 64 rows need where a product's sums are in registers of one warp."""
    return MANY if weight.kind == "float" or capability(device) in (90, 100, 103) else MANY // 2


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate: Experts, up: Experts, down: Experts, gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None, *, kind: str = "silu", limit: float | None = None,
    alpha: float = 1.0, up_offset: float = 0.0, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The operator moe_experts of x[tokens, hidden]: weights float[tokens, top_k], ids int32[tokens, top_k], matrices
    [experts, out, in]. Blocks are larger where each expert has many rows, unless `invariant`; the gate's result is rounded
    to x's dtype (to float32 if the matrices are), choices are summed in float32."""
    of_gate, of_up, of_down = matrix(gate), matrix(up), matrix(down)
    (tokens, top_k), experts = ids.shape, len(of_gate.numbers)
    hidden = of_down.n
    y = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    choices = tokens * top_k
    size = FEW if invariant or choices <= FEW * experts else _many(of_gate, x.device)
    plan = routes(ids, experts, size)
    between = torch.promote_types(x.dtype, of_gate.numbers.dtype) if of_gate.kind == "float" else x.dtype
    of_tokens = plan._replace(divisor=top_k)
    g = product(x, of_gate, gate_bias, torch.float32, routes=of_tokens, rows=choices)
    u = product(x, of_up, up_bias, torch.float32, routes=of_tokens, rows=choices)
    a = gated(g, u, kind=kind, limit=limit, alpha=alpha, up_offset=up_offset, dtype=between)
    found = product(a, of_down, down_bias, torch.float32, routes=plan, rows=choices)
    _sum_choices[(tokens, triton.cdiv(hidden, 1024))](found, weights.contiguous(), y, hidden, top_k, BLOCK=1024, num_warps=4)
    return y
