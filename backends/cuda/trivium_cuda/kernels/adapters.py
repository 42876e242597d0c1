"""Low-rank adapters: a pair of small products for each token, with the matrices of the token's own adapter.

Tokens go in tiles of ROWS; a tile passes once over each adapter that one of its tokens has, so that one launch serves any mixture,
nothing is looked up on the host, and a tile without adapters reads nothing but their numbers. The sums of a row don't depend on the
rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import flat, power

ROWS = 16
SHARE = 512
"""Inputs that a part of the first product has at least."""
PARTS = 16
DEPTH = 32
COLUMNS = 32
TILE = 32
"""Numbers of a rank that a program works on at a time: float32 takes many registers."""


# For each adapter of a tile reads 4 * TILE * inputs bytes of it and the tile's inputs, writes 4 * ROWS * TILE bytes a part, and
# does 2 * ROWS * TILE * inputs operations.
@triton.jit
def _shrink(
    X, A, adapters, H, tokens, inputs, rank, slots, x_row, share,
    ROWS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row, r = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    adapter = tl.load(adapters + row, mask=row < tokens, other=-1)
    low = part * share
    total = tl.zeros([ROWS, TILE], tl.float32)
    for slot in range(0, slots):
        mine = adapter == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            acc = tl.zeros([ROWS, TILE], tl.float32)
            for start in range(low, tl.minimum(inputs, low + share), DEPTH):
                i = start + tl.arange(0, DEPTH)
                at = row.to(tl.int64)[:, None] * x_row + i[None, :]
                x = tl.load(X + at, mask=mine[:, None] & (i < inputs)[None, :], other=0.0).to(tl.float32)
                w = tl.load(A + r[None, :] * inputs + i[:, None], mask=(r < rank)[None, :] & (i < inputs)[:, None], other=0.0)
                acc = tl.dot(x, w.to(tl.float32), acc, input_precision="ieee")
            total = tl.where(mine[:, None], acc, total)
        A += rank * inputs
    to = H + (part * tokens + row).to(tl.int64)[:, None] * RANK + r[None, :]
    tl.store(to, total, mask=(adapter >= 0)[:, None])


# Reads 4 * parts * ROWS * RANK bytes of the first product and for each adapter of a tile 4 * RANK * COLUMNS bytes of it, reads and
# writes the tile, and does 2 * ROWS * RANK * COLUMNS operations an adapter.
@triton.jit
def _expand(
    Y, H, B, adapters, Z, tokens, n, rank, slots, parts, y_row,
    ROWS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    adapter = tl.load(adapters + row, mask=row < tokens, other=-1)
    here = (row < tokens)[:, None] & (c < n)[None, :]
    y = tl.load(Y + row.to(tl.int64)[:, None] * y_row + c[None, :], mask=here, other=0.0)
    more = tl.zeros([ROWS, COLUMNS], tl.float32)
    for slot in range(0, slots):
        mine = adapter == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, RANK, STEP):
                r = start + tl.arange(0, STEP)
                h = tl.zeros([ROWS, STEP], tl.float32)
                for part in range(0, parts):
                    at = (part * tokens + row).to(tl.int64)[:, None] * RANK + r[None, :]
                    h += tl.load(H + at, mask=mine[:, None], other=0.0)
                w = tl.load(B + r[:, None] * n + c[None, :], mask=(r < rank)[:, None] & (c < n)[None, :], other=0.0)
                acc = tl.dot(h, w.to(tl.float32), acc, input_precision="ieee")
            more = tl.where(mine[:, None], acc, more)
        B += rank * n
    z = tl.where((adapter >= 0)[:, None], y.to(tl.float32) + more, y.to(tl.float32))
    tl.store(Z + row.to(tl.int64)[:, None] * n + c[None, :], z.to(Z.dtype.element_ty), mask=here)


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> Tensor:
    """The operator lora: y[tokens, n], x[tokens, inputs], a[slots, rank, inputs], b[slots, rank, n], adapters int32[tokens].
    Products and sums in float32; rows with adapter -1 stay bit for bit."""
    x, y = flat(x), flat(y)
    (tokens, inputs), n, (slots, rank) = x.shape, y.shape[1], a.shape[:2]
    z = torch.empty((tokens, n), dtype=y.dtype, device=y.device)
    if not tokens:
        return z
    parts = max(1, min(inputs // SHARE, PARTS))
    share = triton.cdiv(triton.cdiv(inputs, parts), DEPTH) * DEPTH
    parts, wide, tiles = triton.cdiv(inputs, share), power(rank, 16), triton.cdiv(tokens, ROWS)
    h = torch.empty((parts, tokens, wide), dtype=torch.float32, device=x.device)
    tile = min(wide, TILE)
    _shrink[(tiles, parts, wide // tile)](
        x, a, adapters, h, tokens, inputs, rank, slots, x.stride(0), share, ROWS=ROWS, RANK=wide, TILE=tile, DEPTH=DEPTH,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    _expand[(tiles, triton.cdiv(n, COLUMNS))](
        y, h, b, adapters, z, tokens, n, rank, slots, parts, y.stride(0), ROWS=ROWS, RANK=wide, STEP=tile,
        COLUMNS=COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return z
