"""Paged attention and KV writes against brute force over positions, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivium import ops
from trivium.errors import ProgramError
from trivium.ops.state import PagedState

ATTENTION, WRITE = ops.OPERATORS["paged_attention"], ops.OPERATORS["kv_write"]


def at(pages, table, position):
    size = pages.shape[1]
    return pages[table[position // size], position % size].astype(np.float64)


def brute(q, kv, starts, contexts, sinks, scale, window, softcap, causal, chunk=None):
    heads, kv_heads = q.shape[1], kv.k.shape[2]
    out = np.zeros(q.shape)
    for s, context in enumerate(contexts):
        queries = starts[s + 1] - starts[s]
        for i in range(queries):
            p = context - queries + i
            lo = max(0, p - window + 1) if window else max(j for j in range(p + 1) if j % (chunk or context) == 0)
            seen = range(lo, p + 1 if causal else context)
            for h in range(heads):
                g = h // (heads // kv_heads)
                scores = [float(scale * q[starts[s] + i, h].astype(np.float64) @ at(kv.k, kv.block_table[s], j)[g]) for j in seen]
                if softcap:
                    scores = [softcap * math.tanh(x / softcap) for x in scores]
                e = [math.exp(x) for x in scores]
                total = sum(e) + (math.exp(sinks[h]) if sinks is not None else 0.0)
                out[starts[s] + i, h] = sum(w / total * at(kv.v, kv.block_table[s], j)[g] for w, j in zip(e, seen))
    return out


def test_paged_attention_equals_brute_force_in_every_case():
    for case in ATTENTION.cases(np.random.default_rng(3)):
        q, kv, starts, contexts, sinks = case.args
        np.testing.assert_allclose(
            ATTENTION(*case.args, **case.attrs),
            brute(q, kv, starts, contexts, sinks, **{**ATTENTION.attrs, **case.attrs}),
            rtol=1e-4,
            atol=1e-5,
        )


def test_chunked_attention_equals_brute_force_within_the_query_s_chunk():
    chunked = ops.OPERATORS["chunked_attention"]
    for case in chunked.cases(np.random.default_rng(4)):
        q, kv, starts, contexts = case.args
        want = brute(q, kv, starts, contexts, None, window=None, softcap=None, causal=True, **case.attrs)
        np.testing.assert_allclose(chunked(*case.args, **case.attrs), want, rtol=1e-4, atol=1e-5)


def brute_both_ways(q, k, v, starts, scale, window=None):
    out, group = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for s, begin in enumerate(starts[:-1]):
        for i in range(begin, starts[s + 1]):
            seen = [j for j in range(begin, starts[s + 1]) if window is None or abs(i - j) <= window]
            for h in range(q.shape[1]):
                scores = scale * k[seen, h // group].astype(np.float64) @ q[i, h].astype(np.float64)
                weights = np.exp(scores - scores.max())
                out[i, h] = weights / weights.sum() @ v[seen, h // group]
    return out


BOTH_WAYS = ops.OPERATORS["bidirectional_attention"]


def test_bidirectional_attention_equals_brute_force_over_each_sequence():
    for case in BOTH_WAYS.cases(np.random.default_rng(4)):
        want = brute_both_ways(*case.args, **case.attrs)
        np.testing.assert_allclose(BOTH_WAYS(*case.args, **case.attrs), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 130])
def test_bidirectional_attention_gives_a_sequence_the_same_bits_in_any_company(window):
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((300, heads, 16)).astype(np.float32) for heads in (6, 2, 2))
    together = BOTH_WAYS(q, k, v, np.array([0, 5, 205, 300]), scale=0.25, window=window)
    alone = BOTH_WAYS(q[5:205], k[5:205], v[5:205], np.array([0, 200]), scale=0.25, window=window)
    np.testing.assert_array_equal(together[5:205], alone)


def test_an_entry_of_minus_one_that_a_query_needs_is_an_error_not_the_last_page():
    kv = PagedState(
        np.ones((2, 4, 1, 2), np.float32), np.ones((2, 4, 1, 2), np.float32), np.array([[-1, 0]], np.int32), np.array([1], np.int64)
    )
    q, starts, context = np.ones((1, 1, 2), np.float32), np.array([0, 1], np.int32), np.array([6], np.int32)
    assert ATTENTION(q, kv, starts, context, scale=1.0, window=2).shape == (1, 1, 2)
    with pytest.raises(ProgramError, match="no page"):
        ATTENTION(q, kv, starts, context, scale=1.0, window=3)


def test_a_sequence_without_queries_is_left_alone():
    kv = PagedState(
        np.ones((1, 4, 1, 2), np.float32),
        np.ones((1, 4, 1, 2), np.float32),
        np.array([[-1], [0]], np.int32),
        np.array([1], np.int64),
    )
    y = ATTENTION(np.ones((1, 1, 2), np.float32), kv, np.array([0, 0, 1], np.int32), np.array([0, 2], np.int32), scale=1.0)
    np.testing.assert_array_equal(y, np.ones((1, 1, 2)))


def test_kv_write_fills_the_slots_and_nothing_else():
    kv = PagedState(
        np.zeros((3, 2, 1, 2), np.float32),
        np.zeros((3, 2, 1, 2), np.float32),
        np.array([[2, 1]], np.int32),
        np.array([5, -1, 2], np.int64),
    )
    k = np.arange(1, 7, dtype=np.float32).reshape(3, 1, 2)
    out = WRITE(kv, k, -k)
    want = np.zeros((3, 2, 1, 2))
    want[2, 1, 0], want[1, 0, 0] = [1, 2], [5, 6]
    np.testing.assert_array_equal(out.k, want)
    np.testing.assert_array_equal(out.v, -want)
