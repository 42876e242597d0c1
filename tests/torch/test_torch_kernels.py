"""Kernels where the kit's examples don't reach: long sequences, poisoned pages, the samplers' two ways."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trivium.conformance.examples import make_example
from trivium.conformance.kit import open_lab
from trivium.conformance.operators import SEED, compare
from trivium.ops import OPERATORS, Case, Tolerance
from trivium.ops.examples import normal, paged_state, recurrent_state, sequences
from trivium.ops.sample import plain_inputs, sample
from trivium.plugin import resolve

torch = pytest.importorskip("torch")

CLOSE = Tolerance(2e-4, 2e-4)


@pytest.fixture(scope="module")
def lab():
    return open_lab("torch:cpu", {"strict": True})


def run(lab, name, case, allowed=CLOSE, dtype="float32"):
    example = make_example(OPERATORS[name], case, dtype=dtype, page_size=16)
    compare(name, lab.run(example, example.program, dtype=dtype, page_size=16), allowed)


STEPS = {
    "prefills of many lengths": sequences([33, 130, 1, 64, 97], [33, 130, 1, 64, 97]),
    "chunks after long contexts": sequences([40, 1, 1, 70], [300, 257, 16, 71]),
    "equal lengths": sequences([65] * 3, [65, 165, 65]),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_delta_rule_over_many_chunks(lab, step):
    rng = np.random.default_rng(SEED)
    tokens, heads, dk, dv = int(step.query_starts[-1]), 3, 16, 8
    q, k, v = (normal(rng, tokens, heads, n) for n in (dk, dk, dv))
    g, beta = -rng.uniform(0, 3, (tokens, heads)).astype(np.float32), rng.uniform(0, 1, (tokens, heads)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    state = recurrent_state(rng, step, (heads, dk, dv))
    run(lab, "gated_delta_rule", Case((q, k, v, g, beta, state, *step), {"scale": 0.25}))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_state_space_scan_over_many_chunks(lab, step):
    rng = np.random.default_rng(SEED)
    tokens, heads, groups, dk, dv = int(step.query_starts[-1]), 4, 2, 16, 8
    x, b, c = normal(rng, tokens, heads, dv), normal(rng, tokens, groups, dk), normal(rng, tokens, groups, dk)
    dt, a = rng.uniform(0, 1, (tokens, heads)).astype(np.float32), -rng.uniform(0, 3, heads).astype(np.float32)
    state = recurrent_state(rng, step, (heads, dv, dk))
    run(lab, "selective_scan", Case((x, dt, a, b, c, normal(rng, heads), state, *step)))


@pytest.mark.parametrize("chunk", [16, 40, 64])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_attention_within_chunks_that_lie_across_pages_and_queries(lab, step, chunk):
    rng = np.random.default_rng(SEED)
    state = paged_state(rng, step, (2, 16), (2, 16), page_size=16, window=chunk)
    q = normal(rng, int(step.query_starts[-1]), 6, 16)
    run(lab, "chunked_attention", Case((q, state, *step), {"scale": 0.25, "chunk": chunk}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 0, 20])
@pytest.mark.parametrize("lengths", [[33, 130, 1, 64, 97], [65] * 3, [0, 7, 0, 300]])
def test_attention_to_both_sides_of_sequences_of_many_lengths(lab, lengths, window, dtype):
    rng = np.random.default_rng(SEED)
    step = sequences(lengths, lengths)
    q, k, v = (normal(rng, sum(lengths), heads, 16) for heads in (6, 2, 2))
    allowed = CLOSE if dtype == "float32" else Tolerance(2e-2, 2e-2)
    run(lab, "bidirectional_attention", Case((q, k, v, step.query_starts), {"scale": 0.25, "window": window}), allowed, dtype)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_short_convolution_over_mixed_lengths(lab, step):
    rng = np.random.default_rng(SEED)
    x = normal(rng, int(step.query_starts[-1]), 6)
    state = recurrent_state(rng, step, (3, 6))
    run(lab, "short_conv", Case((x, normal(rng, 6, 4), normal(rng, 6), state, *step), {"kind": "silu"}))


@pytest.mark.parametrize("attrs", [{}, {"window": 40}, {"softcap": 3.0}, {"causal": False}], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_attention_over_sequences_of_unequal_lengths(lab, step, attrs):
    rng = np.random.default_rng(SEED)
    state = paged_state(rng, step, (2, 16), (2, 16), page_size=16, window=attrs.get("window"))
    q = normal(rng, int(step.query_starts[-1]), 6, 16)
    run(lab, "paged_attention", Case((q, state, *step, None), {"scale": 0.25, **attrs}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stands_in_unused_slots_never_reaches_an_answer(lab, dtype):
    rng = np.random.default_rng(SEED)
    step = sequences([1, 5, 1], [9, 5, 30])
    state = paged_state(rng, step, (2, 16), (2, 16), page_size=16)
    case = Case((normal(rng, 7, 4, 16), state, *step, None), {"scale": 0.25})
    example = make_example(OPERATORS["paged_attention"], case, dtype=dtype, page_size=16)
    poisoned = [
        dataclasses.replace(s, k=np.where(s.k == 1e3, np.nan, s.k), v=np.where(s.v == 1e3, np.inf, s.v)) for s in example.states
    ]
    assert np.isnan(poisoned[0].k).any()
    clean, other = (
        lab.run(dataclasses.replace(example, states=tuple(states)), example.program, dtype=dtype, page_size=16).outputs["logits"]
        for states in (example.states, poisoned)
    )
    np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["linear", "paged_attention"])
def test_below_float32_a_row_s_bits_do_not_depend_on_the_others(lab, name, dtype):
    rng = np.random.default_rng(SEED)
    step = sequences([1, 3, 1, 20, 1], [40, 40, 41, 45, 300])
    state = paged_state(rng, step, (2, 16), (2, 16), page_size=16)
    x, weight = normal(rng, 26, 4, 16), normal(rng, 33, 64)

    def outputs(seqs):
        rows = np.concatenate([np.arange(*step.query_starts[s : s + 2]) for s in seqs])
        if name == "linear":
            case = Case((x[rows].reshape(-1, 64), weight, None))
        else:
            part = sequences(np.diff(step.query_starts)[seqs], step.context_lens[seqs])
            mine = dataclasses.replace(state, block_table=state.block_table[seqs], slots=state.slots[rows])
            case = Case((x[rows], mine, *part, None), {"scale": 0.25})
        example = make_example(OPERATORS[name], case, dtype=dtype, page_size=16)
        return lab.run(example, example.program, dtype=dtype, page_size=16).outputs["logits"]

    together = outputs([0, 1, 2, 3, 4])
    for s in range(5):
        np.testing.assert_array_equal(outputs([s]), together[slice(*step.query_starts[s : s + 2])])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_largest_logits_give_the_lowest_id(lab, dtype):
    logits = np.zeros((3, 12), np.float32)
    logits[0, [4, 9]], logits[1, [11, 2]], logits[2] = 5, 7, -0.0
    logits[2, 6] = 0.0
    inputs = plain_inputs(3)
    example = make_example(OPERATORS["scale"], Case((logits,), {"factor": 1.0}), dtype=dtype, page_size=16)
    program = dataclasses.replace(example.program, vocab_size=10)
    got = lab.run(example, program, dtype=dtype, sampling=inputs).sampled.ids
    assert got.tolist() == sample(logits, inputs, vocab_size=10).ids.tolist() == [4, 2, 0]


@pytest.mark.parametrize("seed", range(12))
def test_draws_in_torch_s_arithmetic_are_the_reference_s(seed, monkeypatch):
    """Coarse logits with many ties, infinities, temperatures at their ends, filters and edits mixed over the rows."""
    rng = np.random.default_rng(seed)
    rows, width, vocab = 9, 400, 391
    logits = (np.round(rng.normal(0, rng.choice([0.5, 3, 30]), (rows, width)) * 4) / 4).astype(np.float32)
    logits[rng.random((rows, width)) < 0.1] = -np.inf
    logits[0, 5] = np.inf
    starts = np.arange(rows + 1, dtype=np.int32) * 3
    some = np.concatenate([np.sort(rng.choice(vocab, 3, replace=False)) for _ in range(rows)]).astype(np.int32)
    edits = {
        "seen_starts": starts, "seen_ids": some, "seen_counts": rng.integers(0, 3, 3 * rows, np.int32), "bias_starts": starts,
        "bias_ids": some, "bias": rng.choice([-np.inf, 1.5, -2], 3 * rows).astype(np.float32),
        "mask": rng.integers(0, 2**32, (rows, -(-vocab // 32)), np.uint32), "repetition": rng.uniform(0.7, 1.4, rows),
        "presence": rng.uniform(-1, 1, rows), "frequency": rng.uniform(-1, 1, rows),
    }  # fmt: skip
    inputs = plain_inputs(
        rows, temperature=rng.choice([0, 1e-30, 0.01, 0.7, 1, 5, 1e30], rows), top_k=rng.choice([0, 1, 7, 1000], rows),
        top_p=rng.choice([1, 1e-9, 0.3, 0.999999], rows), min_p=rng.choice([0, 0.1, 1], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64), position=rng.integers(0, 2**40, rows),
        score_ids=rng.choice([-1, -1, 3], rows), **(edits if seed % 2 else {}),
    )  # fmt: skip
    backend, device = resolve("torch:cpu")
    session = backend.open(device, {})
    monkeypatch.setattr(session, "draws", lambda: True)
    [kernel] = [k for k in backend.kernels(device) if k.op == "sample"]
    got = kernel.run(session, [session.put(logits), inputs], {"vocab_size": vocab})
    assert got.ids.tolist() == sample(logits, inputs, vocab_size=vocab).ids.tolist() and got.ids.dtype == np.int32
