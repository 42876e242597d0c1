"""Attention over paged keys and values, whole or compressed (multi-head latent attention, DeepSeek-V2, 2024)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from trivium.errors import ProgramError
from trivium.ops.examples import STEPS, Array, Draw, normal, operator, sequences
from trivium.ops.state import PagedState

BLOCK = 128
"""Queries of a whole sequence that are computed together; their scores have to fit into memory."""


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


def _one_unstored(d: Draw) -> PagedState:
    state = d.keys_and_values()
    state.slots[1:2] = -1
    return state


@operator("kv:PagedKV, k[tokens, kv_heads, head_dim], v[tokens, kv_heads, head_dim] -> kv:PagedKV", {}, {"kv": _one_unstored})
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


def _attend_one(
    q: Array, k: Array, v: Array, scale: float, softcap: float | None, sinks: Array | None, unseen: Array | None = None
) -> Array:
    """q[heads, d], k[keys, kv_heads, d], v[keys, kv_heads, e] -> [kv_heads, heads / kv_heads, e]. unseen bool[heads / kv_heads,
    keys]: what takes no part."""
    kv_heads = k.shape[1]
    scores = np.matmul(q.reshape(kv_heads, -1, q.shape[-1]), k.transpose(1, 2, 0)) * np.float32(scale)
    if unseen is not None:
        scores[:, unseen] = -np.inf
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    sink = np.float32(-np.inf) if sinks is None else sinks.reshape(kv_heads, -1, 1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    out: Array = np.matmul(weights / total, v.transpose(1, 0, 2))
    return out


def sequences_of(
    kv: PagedState, query_starts: Array, context_lens: Array, window: int | None = None, causal: bool = True,
    chunk: int | None = None,
) -> Iterator[tuple[slice, Array, Array, Array]]:  # fmt: skip
    """Each sequence that has queries: their rows, the keys and values from the first position that any reads, and
    bool[queries, positions from there on]: which are visible."""
    for s, context in enumerate(context_lens.tolist()):
        begin, end = int(query_starts[s]), int(query_starts[s + 1])
        if begin == end:
            continue
        query = np.arange(context - (end - begin), context)[:, None]
        whole = chunk or context  # a chunk as long as the context: nothing is out of sight
        oldest = query // whole * whole if window is None else np.maximum(query - window + 1, 0)
        start = int(oldest[0, 0])
        at = np.arange(start, context)
        k, v = (read_positions(pages, kv.block_table[s], start, context) for pages in (kv.k, kv.v))
        yield slice(begin, end), k, v, ((at <= query) | (not causal)) & (at >= oldest)


@operator(
    "q[tokens, heads, head_dim], kv:PagedKV, query_starts[seqs+1]:int32, context_lens[seqs]:int32, sinks[heads]:weight?"
    " -> y[tokens, heads, head_dim]",
    *({"sinks": None, "scale": 0.125, **a} for a in ({}, {"window": 6}, {"window": 100}, {"softcap": 2.0}, {"causal": False})),
    *({"sinks": Draw.normal, "scale": 0.25, "window": window} for window in (None, 5)),
    sizes={"step": (*STEPS, sequences([1, 40], [300, 130]))}, tolerance=4,
)  # fmt: skip
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


@operator(
    "q[tokens, heads, head_dim], kv:PagedKV, query_starts[seqs+1]:int32, context_lens[seqs]:int32 -> y[tokens, heads, head_dim]",
    *({"scale": 0.2, "chunk": chunk} for chunk in (6, 16)), sizes={"step": (*STEPS, sequences([1, 40], [300, 130]))}, tolerance=4,
)  # fmt: skip
def chunked_attention(q: Array, kv: PagedState, query_starts: Array, context_lens: Array, *, scale: float, chunk: int) -> Array:
    """paged_attention, causal, within chunks: a query at position p reads positions floor(p / chunk) · chunk .. p, so a state whose
    window is `chunk` keeps all that is read (Meta AI, "The Llama 4 herd", 2025)."""
    y = np.zeros_like(q)
    for rows, k, v, visible in sequences_of(kv, query_starts, context_lens, chunk=chunk):
        y[rows] = attend(q[rows], k, v, visible, scale, None, None)
    return y


@operator(
    "q[tokens, heads, head_dim], k[tokens, kv_heads, head_dim], v[tokens, kv_heads, head_dim], query_starts[seqs+1]:int32"
    " -> y[tokens, heads, head_dim]", {"scale": 0.2}, {"scale": 0.2, "window": 3}, {"scale": 0.1, "window": 40},
    sizes={"step": (*STEPS, sequences([150, 7], [150, 7]))}, tolerance=4,
)  # fmt: skip
def bidirectional_attention(q: Array, k: Array, v: Array, query_starts: Array, *, scale: float, window: int | None = None) -> Array:
    """softmax(scale · q·kᵀ) · v without pages: token i reads the step's tokens j of its own sequence, earlier and later ones; with
    `window` those with |i - j| <= window only. Head h reads kv head h // (heads / kv_heads). A sequence that is read from both ends
    must be whole in its step (Devlin et al., "BERT", 2019; the window as in Beltagy et al., "Longformer", 2020)."""
    y, reach = np.zeros_like(q), len(q) if window is None else window
    for begin, end in itertools.pairwise(query_starts.tolist()):
        for first in range(begin, end, BLOCK):
            at = np.arange(first, min(first + BLOCK, end))
            keys = np.arange(max(first - reach, begin), min(at[-1] + 1 + reach, end))
            unseen = np.tile(abs(at[:, None] - keys) > reach, (q.shape[1] // k.shape[1], 1))
            found = _attend_one(q[at].swapaxes(0, 1).reshape(-1, q.shape[-1]), k[keys], v[keys], scale, None, None, unseen)
            y[at] = found.reshape(q.shape[1], len(at), -1).swapaxes(0, 1)
    return y


@operator("kv:LatentKV, latent[tokens, rank], rope[tokens, rope_dim] -> kv:LatentKV")
def latent_write(kv: PagedState, latent: Array, rope: Array) -> PagedState:
    """Stores the compressed keys-and-values and the rotated key parts of the step's tokens in their slots (-1: nowhere)."""
    write_slots(kv.k, kv.slots, latent[:, None])
    write_slots(kv.v, kv.slots, rope[:, None])
    return kv


@operator(
    "q_latent[tokens, heads, rank], q_rope[tokens, heads, rope_dim], kv:LatentKV, query_starts[seqs+1]:int32,"
    " context_lens[seqs]:int32 -> y[tokens, heads, rank]", {"scale": 0.2}, tolerance=4,
)  # fmt: skip
def latent_attention(
    q_latent: Array, q_rope: Array, kv: PagedState, query_starts: Array, context_lens: Array, *, scale: float
) -> Array:
    """softmax(scale · (q_latent·latentᵀ + q_rope·ropeᵀ)) · latent, causal; all heads read the same stored rows. Positions as in
    paged_attention. The projections into and out of the latent space are the caller's (head_linear)."""
    q = np.concatenate([q_latent, q_rope], axis=-1)
    y = np.zeros_like(q_latent)
    for rows, latent, rope, visible in sequences_of(kv, query_starts, context_lens):
        y[rows] = attend(q[rows], np.concatenate([latent, rope], axis=-1), latent, visible, scale, None, None)
    return y


@operator(
    "q[tokens, heads, dk], weights[tokens, heads], keys:LatentKV, query_starts[seqs+1]:int32, context_lens[seqs]:int32"
    " -> positions[tokens, top_k]:int32", {"top_k": 3}, {"top_k": 20},
    draw={"q": lambda d: normal(d.rng, *d.shape[:2], d.call["rank"] + d.call["rope_dim"])},
)  # fmt: skip
def top_positions(q: Array, weights: Array, keys: PagedState, query_starts: Array, context_lens: Array, *, top_k: int) -> Array:
    """The positions that each token is to read, of those up to its own the top_k with the largest sum over heads h of
    weights[h] · relu(q[h] · key), best first, the lower one at equal sums; -1 behind them where there are fewer. A key is its two
    stored parts, one behind the other (the indexer of DeepSeek-AI, "DeepSeek-V3.2", 2025)."""
    found = np.full((len(q), top_k), -1, np.int32)
    for rows, *parts, visible in sequences_of(keys, query_starts, context_lens):
        key = np.concatenate(parts, axis=-1)[:, 0]
        for t, seen in enumerate(visible, rows.start):
            worth = weights[t] @ np.maximum(q[t] @ key[seen].T, 0)
            best = np.argsort(-worth, kind="stable")[:top_k]
            found[t, : len(best)] = best
    return found


def _some_positions(d: Draw) -> list[Array]:
    """Of each token up to top_k positions that it sees, in any order, then -1."""
    ends, count = d.step.query_starts[1:], d.shape[1]
    own = [c - e + t for c, b, e in zip(d.step.context_lens, d.step.query_starts, ends) for t in range(b, e)]
    return [np.r_[d.rng.permutation(p + 1), np.full(count, -1)][:count] for p in own]


@operator(
    "q_latent[tokens, heads, rank], q_rope[tokens, heads, rope_dim], kv:LatentKV, query_starts[seqs+1]:int32,"
    " context_lens[seqs]:int32, chosen[tokens, top_k]:int32 -> y[tokens, heads, rank]", {"scale": 0.2},
    draw={"chosen": _some_positions}, sizes={"top_k": (1, 2, 5, 12, 9, 3)}, tolerance=4,
)  # fmt: skip
def sparse_latent_attention(
    q_latent: Array, q_rope: Array, kv: PagedState, query_starts: Array, context_lens: Array, chosen: Array, *, scale: float
) -> Array:
    """latent_attention of which each token reads nothing but the positions chosen for it: one at least, none twice and none behind
    its own; -1 stands for none (DeepSeek-AI, "DeepSeek-V3.2", 2025)."""
    q, y = np.concatenate([q_latent, q_rope], axis=-1), np.zeros_like(q_latent)
    for rows, latent, rope, visible in sequences_of(kv, query_starts, context_lens):
        seen = np.zeros_like(visible)
        for one, at in zip(seen, chosen[rows]):
            one[at[at >= 0]] = True
        y[rows] = attend(q[rows], np.concatenate([latent, rope], axis=-1), latent, seen, scale, None, None)
    return y
