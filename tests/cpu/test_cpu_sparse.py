"""Attention to chosen positions on the CPU backend, and their choice: exact where sums are, the same in any company and on any
number of threads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu_cases import ISAS, run_case
from trivium.ops import Case
from trivium.ops.examples import normal, paged_state, sequences

KV_DTYPES = ["float32", "bfloat16", "float16", "int8"]
RANK, ROPE, HEADS = 40, 12, 7
LONG = sequences([1, 5, 40, 3], [600, 261, 300, 900])
"""Contexts of several spans."""


def index_case(step, top_k, *, heads=5, state=None):
    """Queries, keys and weights of small whole numbers: sums are exact in any order, and many are equal. Both parts of each key
    have a 1, so that 8 bits hold them all with one scale."""
    rng = np.random.default_rng(29)
    tokens = int(step.query_starts[-1])
    state = state or paged_state(rng, step, (1, RANK), (1, ROPE), page_size=16)
    for pages in (state.k, state.v):
        pages[:] = rng.integers(-1, 2, pages.shape)
        pages[..., 0] = 1
    q = rng.integers(-2, 3, (tokens, heads, RANK + ROPE)).astype(np.float32)
    weights = rng.integers(-1, 3, (tokens, heads)).astype(np.float32)
    return Case((q, weights, state, *step), {"top_k": top_k})


def row_of(case, row, step, places):
    """The case with one token, whose sequence is that of `step`. places: which arguments have a row for each token."""
    args = [a[[row]] if i in places else a for i, a in enumerate(case.args)]
    seq = int(np.searchsorted(step.query_starts, row, "right")) - 1
    one = sequences([1], [int(step.context_lens[seq] - (step.query_starts[seq + 1] - 1 - row))])
    state = next(i for i, a in enumerate(args) if dataclasses.is_dataclass(a))
    args[state] = dataclasses.replace(args[state], block_table=args[state].block_table[[seq]], slots=args[state].slots[[row]])
    args[state + 1 : state + 3] = one
    return Case(tuple(args), case.attrs)


@pytest.mark.parametrize("top_k", [1, 70, 700])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_the_best_positions_of_long_contexts_are_those_of_the_reference(isa, kv_dtype, top_k):
    outcome = run_case("top_positions", index_case(LONG, top_k), kv_dtype, isa=isa)
    np.testing.assert_array_equal(outcome.outputs["out1"], outcome.want["out1"])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_positions_are_in_the_order_of_what_they_are_worth(kv_dtype):
    """Against sums in float64: no chosen position is worth less than the next one, or than any that was left out."""
    rng = np.random.default_rng(31)
    state = paged_state(rng, LONG, (1, RANK), (1, ROPE), page_size=16)
    q, weights = normal(rng, 49, 5, RANK + ROPE), normal(rng, 49, 5)
    outcome = run_case("top_positions", Case((q, weights, state, *LONG), {"top_k": 60}), kv_dtype)
    held = outcome.want_states[0]
    for row, found in enumerate(outcome.outputs["out1"]):
        one = row_of(Case((q, weights, held, *LONG)), row, LONG, (0, 1))
        table, context = one.args[2].block_table[0], int(one.args[4][0])
        at = np.arange(context)
        key = np.concatenate([p[table[at // p.shape[1]], at % p.shape[1], 0] for p in (held.k, held.v)], axis=-1).astype(np.float64)
        worth = weights[row].astype(np.float64) @ np.maximum(q[row] @ key.T, 0)
        assert len(set(found.tolist())) == 60 and (np.diff(worth[found]) <= 1e-4).all()
        assert np.delete(worth, found).max(initial=-np.inf) <= worth[found].min() + 1e-4


@pytest.mark.parametrize("top_k", [1, 40])
def test_sums_that_are_no_numbers_come_last_and_equal_ones_in_order(top_k):
    step = sequences([3], [600])
    case = index_case(step, top_k)
    q, weights, state, *rest = case.args
    state.k[state.block_table[0, 2], 3:7] = np.nan
    weights[1] = 0  # all are worth 0, or no number
    weights[2] = [-0.0, 0, -0.0, 0, 0]
    with np.errstate(invalid="ignore"):
        outcome = run_case("top_positions", Case((q, weights, state, *rest), {"top_k": top_k}))
    np.testing.assert_array_equal(outcome.outputs["out1"], outcome.want["out1"])
    plain = [p for p in range(600) if not 35 <= p < 39]
    assert outcome.outputs["out1"][1].tolist() == outcome.outputs["out1"][2].tolist() == plain[:top_k]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("step", [sequences([1], [2000]), sequences([1, 0, 1, 1], [2000, 5, 3, 40]), LONG], ids=str)
def test_spans_that_are_shared_out_choose_what_one_thread_does(step, threads):
    """Random numbers, whose sums show in their last bits who made them."""
    rng = np.random.default_rng(37)
    tokens = int(step.query_starts[-1])
    state = paged_state(rng, step, (1, RANK), (1, ROPE), page_size=16)
    case = Case((normal(rng, tokens, 5, RANK + ROPE), normal(rng, tokens, 5), state, *step), {"top_k": 600})
    shared = run_case("top_positions", case, threads=threads).outputs["out1"]
    for row in {0, tokens // 2, tokens - 1}:
        one = run_case("top_positions", row_of(case, row, step, (0, 1)), threads=1).outputs["out1"]
        np.testing.assert_array_equal(one[0], shared[row])


def sparse_case(step, top_k, heads=HEADS):
    """Each token reads up to top_k positions that it sees, in any order, among entries that stand for none."""
    rng = np.random.default_rng(41)
    state, tokens = paged_state(rng, step, (1, RANK), (1, ROPE), page_size=16), int(step.query_starts[-1])
    chosen = np.full((tokens, top_k), -1, np.int32)
    for seq, (begin, end) in enumerate(zip(step.query_starts, step.query_starts[1:])):
        for row in range(begin, end):
            seen = rng.permutation(int(step.context_lens[seq]) - (end - 1 - row))[:top_k]
            chosen[row, : len(seen)] = seen
    return Case((normal(rng, tokens, heads, RANK), normal(rng, tokens, heads, ROPE), state, *step, chosen), {"scale": 0.2})


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_attention_to_chosen_positions_equals_the_reference(isa, kv_dtype):
    outcome = run_case("sparse_latent_attention", sparse_case(LONG, 280), kv_dtype, isa=isa)
    np.testing.assert_allclose(outcome.outputs["logits"], outcome.want["logits"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_a_token_has_the_bits_from_its_chosen_positions_that_it_has_alone(isa, kv_dtype):
    case = sparse_case(LONG, 280, heads=101)
    together = run_case("sparse_latent_attention", case, kv_dtype, isa=isa, threads=3).outputs["logits"]
    for row in (0, 4, 48):
        one = row_of(case, row, LONG, (0, 1, 5))
        outcome = run_case("sparse_latent_attention", one, kv_dtype, isa=isa, threads=1)
        np.testing.assert_array_equal(outcome.outputs["logits"][0], together[row])


def test_all_positions_in_order_are_dense_attention():
    """Spans then hold the same keys, and the bits are those of latent_attention."""
    step = sequences([1, 1], [600, 37])
    case = sparse_case(step, 600)
    for row, context in enumerate(step.context_lens):
        case.args[5][row] = [p if p < context else -1 for p in range(600)]
    sparse = run_case("sparse_latent_attention", case).outputs["logits"]
    dense = run_case("latent_attention", Case(case.args[:5], case.attrs)).outputs["logits"]
    np.testing.assert_array_equal(sparse, dense)
