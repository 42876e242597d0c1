"""Attention over pages for steps in which prefill chunks and decodes are mixed.

The queries of one key head are rows: row r of a sequence is query r // G of head r % G, where G query heads share the key head.
Sequences with FEW rows (decodes, drafts to be verified) and the others are computed by two launches of one kernel, each of which
passes over the other's sequences: few rows are bound by bytes and many by operations, and want other tiles. Which launch has a
sequence depends on its own queries only. The keys of the few are split into parts that run side by side and are then put together
in their order; the split depends on the context length only. So a row's bits depend on its own sequence alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import capability, first_tile, from_e4m3, power, sequence_of, tanh
from trivium_cuda.kernels.rotary import Store

FEW_ROWS = 16
"""Rows up to which a sequence's keys are split; one query of more heads counts as few too."""
PARTS = 16
"""Parts at most."""
LEAST = 256
"""Keys of a part at least."""
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Tile(NamedTuple):
    """Rows and keys of a step of the loop over keys, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _part_length(span, PARTS: tl.constexpr, LEAST: tl.constexpr):
    """Keys of a part, a multiple of LEAST."""
    return tl.cdiv(tl.cdiv(span, PARTS), LEAST) * LEAST


@triton.jit
def _is_few(queries, G, FEW_ROWS: tl.constexpr):
    return (queries * G <= FEW_ROWS) | (queries == 1)


@triton.jit
def _numbers(x, KIND: tl.constexpr, C: tl.constexpr):
    """Loaded keys or values in the type of the products, without their scales."""
    if KIND == "" or KIND == "int8":
        y = x.to(C)
    else:
        y = from_e4m3(x).to(C)
    return y


@triton.jit
def _span(starts, contexts, seq, within, G, window, ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """(first row of the step's tokens, queries, context, first position that a row of the tile sees, end of those)."""
    begin = tl.load(starts + seq)
    queries = tl.load(starts + seq + 1) - begin
    context = tl.load(contexts + seq)
    first, stop = 0, context
    if WINDOW:
        first = tl.maximum(0, context - queries + within * ROWS // G - window + 1)
    if CAUSAL:
        last = tl.minimum(within * ROWS + ROWS, queries * G) - 1
        stop = context - queries + last // G + 1
    return begin, queries, context, first, stop


@triton.jit
def _scaled(x, SCALES, at, valid, KIND: tl.constexpr):
    """float32 x[rows, keys] times the scales of keys that are bytes."""
    if KIND != "":
        x = x * tl.load(SCALES + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _step(
    start, first, high, q, q2, K, KS, V, VS, table, position, m, total, acc, ks_slot, vs_slot, scale, softcap, window, n, n2, d, d2,
    KEYS: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running (largest score, sum of weights, sum of weighted values) after KEYS more positions; scores are in powers of two.
    K, KS, V, VS: of the key head; table: of the sequence. Without MASKED every row must see all of the positions."""
    at = start + tl.arange(0, KEYS)
    valid = (at < high) & (at >= first) if MASKED else at >= 0
    page = tl.load(table + at // PAGE, mask=valid, other=0).to(tl.int64)
    slot = page * PAGE + at % PAGE
    k = tl.load(K + slot[None, :] * n + d[:, None], mask=valid[None, :] & (d < n)[:, None], other=0.0)
    k = _numbers(k, KIND, C)
    if LATENT:
        k = _scaled(k, KS, slot * ks_slot, valid, KIND).to(C)
        k2 = tl.load(V + slot[None, :] * n2 + d2[:, None], mask=valid[None, :] & (d2 < n2)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee")
        s += _scaled(tl.dot(q2, _numbers(k2, KIND, C), input_precision="ieee"), VS, slot * vs_slot, valid, KIND)
    else:
        s = _scaled(tl.dot(q, k, input_precision="ieee"), KS, slot * ks_slot, valid, KIND)
    s = s * scale
    if SOFTCAP:
        s = tanh(s / softcap) * softcap
    s = s * 1.4426950408889634
    if MASKED:
        seen = valid[None, :] & (position >= 0)[:, None]
        if CAUSAL:
            seen = seen & (at[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    p, kept = tl.exp2(s - base[:, None]), tl.exp2(m - base)
    total = total * kept + tl.sum(p, 1)
    if LATENT:
        v = tl.trans(k)
    else:
        v = tl.load(V + slot[:, None] * n + d[None, :], mask=valid[:, None] & (d < n)[None, :], other=0.0)
        v = _numbers(v, KIND, C)
        p = _scaled(p, VS, slot * vs_slot, valid, KIND)
    acc = acc * kept[:, None] + tl.dot(p.to(C), v, input_precision="ieee")
    return top, total, acc


# Reads the keys and values of a tile's sequence once: 2 * keys * n numbers for each key head (LATENT: keys * (rank + rope_dim)),
# and does 4 * rows * keys * n operations. Prefill has a tile for every ROWS rows, so that keys are read rows / ROWS times, from the
# cache of the chip but for the first; a decode of G heads reads them once and does G operations a byte of 16-bit keys.
@triton.jit
def _attend(
    Q, Q2, K, KS, V, VS, table, starts, contexts, sinks, OUT, PART, STATE,
    q_token, q_head, q2_token, q2_head, k_head, ks_head, ks_slot, v_head, vs_head, vs_slot, table_stride,
    scale, softcap, window, seqs, heads, G, tiles, few, n, n2,
    D: tl.constexpr, D2: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr,
    FEW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    KIND: tl.constexpr, C: tl.constexpr, FEW_ROWS: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    tile, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if FEW:
        seq, within = tile // tiles, tile % tiles
    else:
        tile = tl.num_programs(0) - 1 - tile  # the longest first, so that none is left over at the end
        seq = sequence_of(tile, starts, seqs, G, ROWS)
        within = tile - first_tile(starts, seq, G, ROWS)
    begin, queries, context, first, stop = _span(starts, contexts, seq, within, G, window, ROWS, CAUSAL, WINDOW)
    if (_is_few(queries, G, FEW_ROWS) != FEW) | (within * ROWS >= queries * G):
        return
    low = first // KEYS * KEYS
    high = stop
    if FEW:
        length = _part_length(stop - low, PARTS, LEAST)
        low += part * length
        high = tl.minimum(stop, low + length)
        if low >= high:
            return
    r, d, d2 = within * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, D2)
    query, real, whole = r // G, r < queries * G, d < n
    h, token = head * G + r % G, (begin + query).to(tl.int64)
    position = tl.where(real, context - queries + query, -1)
    q = tl.load(Q + (token * q_token + h * q_head)[:, None] + d[None, :], mask=real[:, None] & whole[None, :], other=0.0).to(C)
    q2 = q
    if LATENT:
        second = real[:, None] & (d2 < n2)[None, :]
        q2 = tl.load(Q2 + (token * q2_token + h * q2_head)[:, None] + d2[None, :], mask=second, other=0.0).to(C)
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    K, KS, V, VS = K + head * k_head, KS + head * ks_head, V + head * v_head, VS + head * vs_head
    table += seq * table_stride
    middle = low
    if not WINDOW and not FEW:  # up to here every row sees every position
        sure = tl.minimum(high, context - queries + within * ROWS // G + 1) if CAUSAL else high
        middle = low + tl.maximum(sure - low, 0) // KEYS * KEYS
        for start in range(low, middle, KEYS):
            m, total, acc = _step(
                start, first, high, q, q2, K, KS, V, VS, table, position, m, total, acc, ks_slot, vs_slot, scale, softcap, window,
                n, n2, d, d2, KEYS, PAGE, LATENT, CAUSAL, WINDOW, SOFTCAP, KIND, C, False,
            )  # fmt: skip
    for start in range(middle, high, KEYS):
        m, total, acc = _step(
            start, first, high, q, q2, K, KS, V, VS, table, position, m, total, acc, ks_slot, vs_slot, scale, softcap, window,
            n, n2, d, d2, KEYS, PAGE, LATENT, CAUSAL, WINDOW, SOFTCAP, KIND, C, True,
        )  # fmt: skip
    if FEW:
        row = (seq * tl.num_programs(2) + part).to(tl.int64) * few * heads + query * heads + h
        tl.store(STATE + row * 2, m, mask=real)
        tl.store(STATE + row * 2 + 1, total, mask=real)
        tl.store(PART + row[:, None] * n + d[None, :], acc, mask=real[:, None] & whole[None, :])
    else:
        if SINKS:
            sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(m, sink)
            acc = acc * tl.exp2(m - top)[:, None]
            total = total * tl.exp2(m - top) + tl.exp2(sink - top)
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = OUT + (token * heads + h)[:, None] * n + d[None, :]
        tl.store(to, out.to(OUT.dtype.element_ty), mask=real[:, None] & whole[None, :])


# Reads the parts of a row, 4 n bytes each, and writes the row.
@triton.jit
def _combine(
    PART, STATE, starts, contexts, sinks, OUT, window, heads, G, tiles, few, parts, n,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    FEW_ROWS: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    seq, query, h = tl.program_id(0) // few, tl.program_id(0) % few, tl.program_id(1)
    within = (query * G + h % G) // ROWS
    begin, queries, _, first, stop = _span(starts, contexts, seq, within, G, window, ROWS, CAUSAL, WINDOW)
    if (query >= queries) | (_is_few(queries, G, FEW_ROWS) == 0):
        return
    span = stop - first // KEYS * KEYS
    count = tl.cdiv(span, _part_length(span, PARTS, LEAST))
    i, d = tl.arange(0, PARTS), tl.arange(0, D)
    base = (seq * parts).to(tl.int64) * few * heads + query * heads + h
    step = few * heads
    m = tl.load(STATE + (base + i * step) * 2, mask=i < count, other=float("-inf"))
    top = tl.max(m, 0)
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    total = tl.sum(tl.load(STATE + (base + i * step) * 2 + 1, mask=i < count, other=0.0) * tl.exp2(m - top), 0)
    if SINKS:
        total += tl.exp2(sink - top)
    acc = tl.zeros([D], tl.float32)
    for start in range(0, count, TOGETHER):
        j = start + tl.arange(0, TOGETHER)
        rows = base + j * step
        factor = tl.exp2(tl.load(STATE + rows * 2, mask=j < count, other=float("-inf")) - top)
        here = (j < count)[:, None] & (d < n)[None, :]
        acc += tl.sum(tl.load(PART + rows[:, None] * n + d[None, :], mask=here, other=0.0) * factor[:, None], 0)
    out = acc / total
    tl.store(OUT + ((begin + query).to(tl.int64) * heads + h) * n + d, out.to(OUT.dtype.element_ty), mask=d < n)


def tiles(few: bool, group: int, width: int, dtype: torch.dtype, kind: str, device: torch.device) -> Tile:
    """`width`: the head dimension, or the rank of latents. Nothing here depends on the batch. The table of pages takes one of a
    pipeline's stages, since where keys lie is loaded before they are."""
    chip, wide = capability(device), dtype == torch.float32
    roomy, warpgroups = chip in (80, 90, 100, 103), chip in (90, 100, 103)
    if width > 256:
        if wide or (kind and not roomy):
            return Tile(16, 16, 4 if wide else 8, 1)
        return Tile(16 if kind else 32, 32, 8, 3) if roomy else Tile(16, 32, 4, 1)
    if few:
        rows = FEW_ROWS if group <= FEW_ROWS or wide else min(power(group), 64)
        return Tile(rows, 32 if wide or width > 128 else 64, 4, 5 if roomy else 3)
    if wide:
        return Tile(16, 16, 4, 1)
    if width > 128:
        return Tile(64, 32, 8, 3) if warpgroups else Tile(32, 32, 4, 3)
    return Tile(64 if kind else 128, 64, 8, 3) if warpgroups else Tile(64, 32, 8, 3)


class _Call(NamedTuple):
    """The arguments of a step's attention. The second queries and stores are those of latents."""

    q: Tensor
    q2: Tensor
    keys: Store
    values: Store
    table: Tensor
    starts: Tensor
    contexts: Tensor
    sinks: Tensor | None
    page_size: int
    max_queries: int
    max_context: int
    scale: float
    window: int | None
    softcap: float | None
    causal: bool
    latent: bool


def _run(c: _Call) -> Tensor:
    tokens, heads, n = c.q.shape
    out = torch.empty((tokens, heads, n), dtype=c.q.dtype, device=c.q.device)
    group = heads // c.keys.numbers.shape[0]
    if not tokens:
        return out
    _launch(c, out, group, few=True)
    if not (c.max_queries * group <= FEW_ROWS or c.max_queries == 1):
        _launch(c, out, group, few=False)
    return out


def _launch(c: _Call, out: Tensor, group: int, *, few: bool) -> None:
    (tokens, heads, n), kv_heads, seqs = c.q.shape, c.keys.numbers.shape[0], len(c.contexts)
    kind, device = c.keys.kind, c.q.device
    dtype = c.q.dtype if kind else torch.promote_types(c.q.dtype, c.keys.numbers.dtype)
    tile = tiles(few, group, n, dtype, kind, device)
    tiles_each = triton.cdiv(max(group, FEW_ROWS), tile.rows)
    queries = min(max(FEW_ROWS // group, 1), c.max_queries)
    parts = min(PARTS, triton.cdiv(c.max_context, LEAST)) if few else 1
    size = (seqs, parts, queries, heads) if few else (1,)
    sums = torch.empty((*size, n) if few else size, dtype=torch.float32, device=device)
    state = torch.empty((*size, 2), dtype=torch.float32, device=device)
    numbers, ks, k_head, ks_head, ks_slot = c.keys.arguments()
    values, vs, v_head, vs_head, vs_slot = c.values.arguments()
    sinks = c.q if c.sinks is None else c.sinks
    shared: dict[str, Any] = {
        "D": power(n, 16), "ROWS": tile.rows, "KEYS": tile.keys, "CAUSAL": c.causal, "WINDOW": c.window is not None,
        "SINKS": c.sinks is not None, "FEW_ROWS": FEW_ROWS, "PARTS": PARTS, "LEAST": LEAST,
    }  # fmt: skip
    count = seqs * tiles_each if few else tokens * group // tile.rows + seqs
    _attend[(count, kv_heads, parts)](
        c.q, c.q2, numbers, ks, values, vs, c.table, c.starts, c.contexts, sinks, out, sums, state,
        c.q.stride(0), c.q.stride(1), c.q2.stride(0), c.q2.stride(1), k_head, ks_head, ks_slot, v_head, vs_head, vs_slot,
        c.table.stride(0), float(c.scale), float(c.softcap or 1.0), c.window or 0, seqs, heads, group, tiles_each, queries, n,
        c.values.numbers.shape[2], D2=power(c.values.numbers.shape[2], 16) if c.latent else 16, PAGE=c.page_size, LATENT=c.latent,
        FEW=few, SOFTCAP=c.softcap is not None, KIND=kind, C=TYPES[dtype], num_warps=tile.warps, num_stages=tile.stages, **shared,
    )  # fmt: skip
    if few:
        _combine[(seqs * queries, heads)](
            sums, state, c.starts, c.contexts, sinks, out, c.window or 0, heads, group, tiles_each, queries, parts, n, TOGETHER=8,
            num_warps=4 if n > 256 else 2, **shared,
        )  # fmt: skip


def paged_attention(
    q: Tensor, keys: Store, values: Store, block_table: Tensor, query_starts: Tensor, context_lens: Tensor,
    sinks: Tensor | None = None, *, page_size: int, max_queries: int, max_context: int, scale: float, window: int | None = None,
    softcap: float | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """The operator paged_attention of q[tokens, heads, n].

    block_table int32[seqs, blocks], query_starts int32[seqs + 1], context_lens int32[seqs]. max_queries, max_context: no sequence
    of the step has more queries in it, or a longer context. Rows that belong to no sequence are left as they are. Products are made
    in q's dtype (in float32 if the keys are), sums in float32.
    """
    return _run(
        _Call(
            q, q, keys, values, block_table, query_starts, context_lens, sinks, page_size, max_queries, max_context, scale, window,
            softcap, causal, False,
        )
    )  # fmt: skip


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latents: Store, ropes: Store, block_table: Tensor, query_starts: Tensor, context_lens: Tensor,
    *, page_size: int, max_queries: int, max_context: int, scale: float,
) -> Tensor:  # fmt: skip
    """The operator latent_attention of q_latent[tokens, heads, rank], q_rope[tokens, heads, rope_dim]; the rest as in
    paged_attention. Each latent row is read once a tile and serves as key and as value."""
    return _run(
        _Call(
            q_latent, q_rope, latents, ropes, block_table, query_starts, context_lens, None, page_size, max_queries, max_context,
            scale, None, None, True, True,
        )
    )  # fmt: skip
