"""Attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.errors import ProgramError
from trivium.ops.examples import ROWS, STEPS, Array, Rng, Sequences, normal, paged_state, sequences, tolerances
from trivium.ops.schema import Case, operator
from trivium.ops.state import PagedState


def write_slots(pages: Array, slots: Array, rows: Array) -> None:
    """Stores rows[t] at slot slots[t] (page * page_size + offset) of pages[pages, page_size, ...]; slot -1 stores nothing."""
    kept = slots >= 0
    pages.reshape(-1, *pages.shape[2:])[slots[kept]] = rows[kept]


def read_positions(pages: Array, table: Array, first: int, stop: int) -> Array:
    """Rows of positions first..stop-1 of a sequence whose row of the block table is `table`; ProgramError at a freed page."""
    size = pages.shape[1]
    blocks = table[first // size : -(-stop // size)]
    if (blocks < 0).any():
        raise ProgramError(f"positions {first}..{stop - 1} are read, but the block table {table.tolist()} has no page for them all")
    rows = pages[blocks].reshape(-1, *pages.shape[2:])
    return rows[first - first // size * size :][: stop - first]


def _kv_write_cases(rng: Rng) -> Iterator[Case]:
    for rows, heads, dim in zip(ROWS, (1, 2, 3, 2, 5), (8, 16, 64, 5, 32)):
        state = paged_state(rng, sequences([rows], [rows + 3]), (heads, dim), (heads, dim))
        if rows == 3:
            state.slots[1] = -1
        yield Case((state, normal(rng, rows, heads, dim), normal(rng, rows, heads, dim)))


@operator(
    "kv:PagedKV, k[tokens, kv_heads, head_dim], v[tokens, kv_heads, head_dim] -> kv:PagedKV",
    cases=_kv_write_cases,
    tolerances=tolerances(),
)
def kv_write(kv: PagedState, k: Array, v: Array) -> PagedState:
    """Stores the keys and values of the step's tokens in their slots (slot -1: nowhere) and returns the state."""
    write_slots(kv.k, kv.slots, k)
    write_slots(kv.v, kv.slots, v)
    return kv


def attend(q: Array, k: Array, v: Array, visible: Array, scale: float, softcap: float | None, sinks: Array | None) -> Array:
    """Attention of one sequence: q[queries, heads, d], k[keys, kv_heads, d], v[keys, kv_heads, e], visible bool[queries, keys]
    -> [queries, heads, e]. Head h reads kv head h // (heads / kv_heads). Each query is computed by itself over what it sees, so
    that its bits do not depend on the others."""
    shape = len(q), q.shape[1], v.shape[-1]
    found = [_attend_one(row, k[seen], v[seen], scale, softcap, sinks) for row, seen in zip(q, visible)]
    return np.array(found, np.float32).reshape(shape)


def _attend_one(q: Array, k: Array, v: Array, scale: float, softcap: float | None, sinks: Array | None) -> Array:
    """q[heads, d], k[keys, kv_heads, d], v[keys, kv_heads, e] -> [kv_heads, heads / kv_heads, e]."""
    kv_heads = k.shape[1]
    scores = np.matmul(q.reshape(kv_heads, -1, q.shape[-1]), k.transpose(1, 2, 0)) * np.float32(scale)
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    sink = np.float32(-np.inf) if sinks is None else sinks.reshape(kv_heads, -1, 1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    out: Array = np.matmul(weights / total, v.transpose(1, 0, 2))
    return out


def sequences_of(
    kv: PagedState, query_starts: Array, context_lens: Array, window: int | None = None, causal: bool = True
) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Each sequence that has queries: their rows, the keys and values from the first position that any reads, and
    bool[queries, positions from there on]: which are visible."""
    for s, context in enumerate(context_lens.tolist()):
        begin, end = int(query_starts[s]), int(query_starts[s + 1])
        if begin == end:
            continue
        query = np.arange(context - (end - begin), context)[:, None]
        start = 0 if window is None else max(0, int(query[0, 0]) - window + 1)
        at = np.arange(start, context)
        mask = (at <= query) | (not causal)
        k, v = (read_positions(pages, kv.block_table[s], start, context) for pages in (kv.k, kv.v))
        yield slice(begin, end), k, v, mask if window is None else mask & (at > query - window)


def _attention_cases(rng: Rng) -> Iterator[Case]:
    sizes = [(1, 1, 8), (4, 2, 16), (3, 3, 5), (9, 3, 64), (8, 1, 32), (6, 2, 24)]
    for step, (heads, kv_heads, dim) in zip(STEPS, sizes):
        yield _attention_case(rng, step, heads, kv_heads, dim)
        yield _attention_case(rng, step, heads, kv_heads, dim, window=6)
        yield _attention_case(rng, step, heads, kv_heads, dim, softcap=2.0, page_size=16)
    yield _attention_case(rng, STEPS[3], 4, 2, 16, causal=False)
    yield _attention_case(rng, STEPS[3], 4, 2, 16, sinks=True)
    yield _attention_case(rng, STEPS[4], 4, 1, 64, sinks=True, window=5)
    long = sequences([1, 40], [300, 130])
    yield _attention_case(rng, long, 4, 2, 128)
    yield _attention_case(rng, long, 2, 2, 64, window=100, page_size=16)


def _attention_case(
    rng: Rng, step: Sequences, heads: int, kv_heads: int, dim: int, *, window: int | None = None,
    softcap: float | None = None, causal: bool = True, sinks: bool = False, page_size: int = 4,
) -> Case:  # fmt: skip
    state = paged_state(rng, step, (kv_heads, dim), (kv_heads, dim), page_size=page_size, window=window)
    q = normal(rng, int(step.query_starts[-1]), heads, dim)
    attrs = {"scale": dim**-0.5, "window": window, "softcap": softcap, "causal": causal}
    return Case((q, state, *step, normal(rng, heads) if sinks else None), attrs)


@operator(
    "q[tokens, heads, head_dim], kv:PagedKV, query_starts[seqs+1]:int32, context_lens[seqs]:int32, sinks[heads]:weight?"
    " -> y[tokens, heads, head_dim]",
    cases=_attention_cases,
    tolerances=tolerances(4),
)
def paged_attention(
    q: Array, kv: PagedState, query_starts: Array, context_lens: Array, sinks: Array | None = None, *,
    scale: float, window: int | None = None, softcap: float | None = None, causal: bool = True,
) -> Array:  # fmt: skip
    """softmax(scale · q·kᵀ) · v over the pages of each sequence; head h reads kv head h // (heads / kv_heads).

    Query i of a sequence with Q queries and context C sits at position p = C-Q+i and reads positions 0..p (all C if not `causal`),
    of these with `window` only p-window+1 and later. `softcap`: the scaled scores s become softcap·tanh(s/softcap). sinks[h] is one
    more score of head h that takes part in the softmax and carries no value. Entries -1 of the block table are never read
    (Vaswani et al., "Attention Is All You Need", 2017; Kwon et al., "PagedAttention", 2023; sinks as in gpt-oss).
    """
    y = np.zeros((q.shape[0], q.shape[1], kv.v.shape[-1]), np.float32)
    for rows, k, v, visible in sequences_of(kv, query_starts, context_lens, window, causal):
        y[rows] = attend(q[rows], k, v, visible, scale, softcap, sinks)
    return y
