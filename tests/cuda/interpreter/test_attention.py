"""Attention over pages, whole and compressed, against the operators' references."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, near, numbers_of, rng, rounded, stores_of, tensor, torch

from trivium.ops.examples import paged_state, sequences
from trivium_cuda.kernels import attention

PAGED, LATENT = OPERATORS["paged_attention"], OPERATORS["latent_attention"]


def call(q, kv, starts, contexts, sinks, stores, dtype, loose=0, **attrs):
    longest = {"max_queries": int(np.diff(starts).max()) + loose, "max_context": int(contexts.max()) + 100 * loose}
    where = tensor(kv.block_table), tensor(starts), tensor(contexts)
    size = kv.k.shape[1]
    return attention.paged_attention(tensor(q, dtype), *stores, *where, tensor(sinks, dtype), page_size=size, **longest, **attrs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_of_every_example_is_the_references(dtype):
    for (q, kv, starts, contexts, sinks), attrs in cases("paged_attention", dtype):
        stores = stores_of(kv, dtype)
        kv.k[:], kv.v[:] = (numbers_of(s, kv.k) for s in stores)
        want = PAGED(q, kv, starts, contexts, sinks, **attrs)
        near(call(q, kv, starts, contexts, sinks, stores, dtype, **attrs), want, dtype, PAGED.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_of_every_example_is_the_references(dtype):
    for (q, q_rope, kv, starts, contexts), attrs in cases("latent_attention", dtype):
        stores = stores_of(kv, dtype)
        kv.k[:], kv.v[:] = numbers_of(stores[0], kv.k), numbers_of(stores[1], kv.v)
        got = attention.latent_attention(
            tensor(q, dtype), tensor(q_rope, dtype), *stores, tensor(kv.block_table), tensor(starts), tensor(contexts),
            page_size=kv.k.shape[1], max_queries=int(np.diff(starts).max()), max_context=int(contexts.max()), **attrs,
        )  # fmt: skip
        near(got, LATENT(q, q_rope, kv, starts, contexts, **attrs), dtype, LATENT.name)


def drawn(step, heads=4, kv_heads=2, n=16, window=None, seed=3):
    draw = rng(seed)
    kv = paged_state(draw, step, (kv_heads, n), (kv_heads, n), window=window, page_size=16)
    return draw.normal(0, 1, (int(step.query_starts[-1]), heads, n)).astype(np.float32), kv


MIXED = sequences([1, 20, 1, 3], [400, 300, 9, 270])
"""A decode of two parts, a chunk that continues a context, a short decode, and drafts to be verified."""


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 given"])
@pytest.mark.parametrize("attrs", [{}, {"window": 150, "softcap": 3.0}], ids=["plain", "window"])
def test_bytes_are_read_with_their_scales(kind, attrs):
    q, kv = drawn(MIXED, window=attrs.get("window"))
    stores = stores_of(kv, kind)
    kv.k[:], kv.v[:] = (numbers_of(s, kv.k) for s in stores)
    want = PAGED(q, kv, *MIXED, None, scale=0.25, **attrs)
    near(call(q, kv, *MIXED, None, stores, "float32", scale=0.25, **attrs), want, "float32", PAGED.name, 4)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_latent_bytes_are_read_with_their_scales(kind):
    draw, step = rng(5), sequences([1, 5], [270, 8])
    kv = paged_state(draw, step, (1, 32), (1, 16), page_size=16)
    q, q_rope = (rounded(draw.normal(0, 1, (6, 3, n)).astype(np.float32), "float32") for n in (32, 16))
    stores = stores_of(kv, kind)
    kv.k[:], kv.v[:] = numbers_of(stores[0], kv.k), numbers_of(stores[1], kv.v)
    got = attention.latent_attention(
        tensor(q), tensor(q_rope), *stores, tensor(kv.block_table), *(tensor(x) for x in step), page_size=16, max_queries=5,
        max_context=270, scale=0.2,
    )  # fmt: skip
    near(got, LATENT(q, q_rope, kv, *step, scale=0.2), "float32", LATENT.name, 4)


@pytest.mark.parametrize("group", [1, 7, 24])
def test_many_query_heads_share_a_key_head(group):
    step = sequences([1, 9], [40, 30])
    q, kv = drawn(step, heads=2 * group, n=24)
    sinks = rng(6).normal(0, 1, 2 * group).astype(np.float32)
    got = call(q, kv, *step, sinks, stores_of(kv, "float32"), "float32", scale=0.2)
    near(got, PAGED(q, kv, *step, sinks, scale=0.2), "float32", PAGED.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_and_among_others_and_with_looser_bounds(dtype):
    q, kv = drawn(MIXED)
    stores = stores_of(kv, dtype)
    together = call(q, kv, *MIXED, None, stores, dtype, scale=0.25)
    assert torch.equal(together, call(q, kv, *MIXED, None, stores, dtype, loose=60, scale=0.25))
    for s in range(4):
        begin, end = MIXED.query_starts[s : s + 2]
        alone = sequences([end - begin], [MIXED.context_lens[s]])
        kv_alone = paged_state(rng(), alone, (2, 16), (2, 16), page_size=16)
        kv_alone.block_table = kv.block_table[s : s + 1]
        assert torch.equal(together[begin:end], call(q[begin:end], kv_alone, *alone, None, stores, dtype, scale=0.25))


def test_sequences_without_queries_are_passed_over():
    """As the padding of a captured graph has them."""
    step = sequences([1, 0, 6, 0], [20, 0, 30, 0])
    q, kv = drawn(step)
    got = call(q, kv, *step, None, stores_of(kv, "float32"), "float32", scale=0.25)
    near(got, PAGED(q, kv, *step, None, scale=0.25), "float32", PAGED.name)
