"""The sampling pipeline against a plain-Python implementation, published vectors and closed-form cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import sampling_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.ops import Sampled
from trivium.ops.sample import derive_seed, largest, philox4x32, plain_inputs, sample, uniform

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())

# The known answers that the authors publish with the generator: counter, key, output.
PHILOX_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(w, 16) for w in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), PHILOX_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, output):
    assert philox4x32(words(counter), words(key)).tolist() == words(output).tolist()
    assert oracle.philox(words(counter).tolist(), words(key).tolist()) == words(output).tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1))
def test_the_oracle_is_philox_as_numpy_has_it_in_its_wide_form(seed, position):
    theirs = np.random.Philox(key=np.array([seed, 7], np.uint64), counter=np.array([position, 0, 0, 3], np.uint64))
    # numpy steps its counter before the first block.
    ours = oracle.philox([position + 1, 0, 0, 3], [seed, 7], bits=64)
    assert theirs.random_raw(4).tolist() == ours


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1))
def test_a_draw_depends_on_seed_and_position_alone(seed, position):
    rows = uniform(np.array([1, seed, seed], np.uint64), np.array([5, position, 3], np.int64))
    assert rows[1] == oracle.uniform(seed, position)
    assert rows[0] == oracle.uniform(1, 5)
    assert 0 <= rows[1] < 2**31


def test_draws_are_uniform():
    u = uniform(np.full(1 << 14, 12345, np.uint64), np.arange(1 << 14))
    observed = np.histogram(u, 64, (0, 2**31))[0]
    assert ((observed - 256) ** 2 / 256).sum() < 120  # chi square, 63 degrees of freedom: p = 2e-5


def test_the_samples_of_one_request_get_different_seeds():
    seeds = [derive_seed(99, i) for i in range(50)]
    assert seeds[0] == 99 and len(set(seeds)) == 50
    assert seeds[1] == int.from_bytes(b"".join(w.to_bytes(4, "little") for w in oracle.philox([1, 0, 0, 1], [99, 0])[:2]), "little")


def run_vector(case: dict) -> Sampled:
    rows = [oracle.Row(**row) for row in case["rows"]]
    return sample(*oracle.to_arrays(rows, case["top_logprobs"]), vocab_size=case["vocab_size"])


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: c["name"])
def test_published_vectors(case):
    got = run_vector(case)
    assert got.ids.tolist() == case["ids"]
    if case["top_logprobs"] >= 0:
        assert got.ranks.tolist() == case["ranks"]
        assert got.top_ids.tolist() == case["top_ids"]
        np.testing.assert_allclose(got.logprobs, case["logprobs"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got.top_logprobs, case["top_logprob_values"], rtol=1e-6, atol=1e-6)


def test_published_draws():
    seeds, positions, *draws = zip(*VECTORS["uniform"])
    for stream, want in zip((0, 2), draws, strict=True):
        assert uniform(np.array(seeds, np.uint64), np.array(positions, np.int64), stream).tolist() == list(want)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_the_pipeline_equals_plain_python(seed, vocab, coarse):
    rows = oracle.random_rows(np.random.default_rng(seed), vocab, 3, grid=0.5 if coarse else 2.0**-10)
    want = [oracle.sample(row, vocab) for row in rows]
    got = sample(*oracle.to_arrays(rows, -1), vocab_size=vocab)
    for row, token, mine in zip(rows, want, got.ids.tolist(), strict=True):
        assert mine == token, row


def test_a_row_gives_the_same_id_in_any_batch():
    rows = oracle.random_rows(np.random.default_rng(3), 300, 17, grid=0.25)
    together = sample(*oracle.to_arrays(rows, -1), vocab_size=300).ids.tolist()
    alone = [sample(*oracle.to_arrays([row], -1), vocab_size=300).ids[0] for row in rows]
    backwards = sample(*oracle.to_arrays(rows[::-1], -1), vocab_size=300).ids.tolist()
    assert together == alone == backwards[::-1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.integers(0, 70))
def test_largest_honours_ties_by_id(values, k):
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert (largest(np.array(values, np.float32) * np.float32(0.5), k).tolist() if k else []) == want


def test_negative_zero_ties_with_zero():
    logits = np.array([[-0.0, 0.0, -1.0]], np.float32)
    picks = [int(sample(logits, plain_inputs(1, temperature=1, top_k=1, seed=s), vocab_size=3).ids[0]) for s in range(20)]
    assert picks == [0] * 20


def test_frequencies_follow_the_softmax():
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)).repeat(20000, 0)
    got = sample(logits, plain_inputs(20000, temperature=1, seed=7, position=np.arange(20000)), vocab_size=4)
    assert np.abs(np.bincount(got.ids) / 20000 - [0.1, 0.2, 0.3, 0.4]).max() < 0.015


def test_nothing_allowed_or_an_infinite_logit_still_gives_an_id_of_the_vocabulary():
    barred = sample(np.zeros((1, 40), np.float32), plain_inputs(1, temperature=1, mask=np.zeros((1, 2), np.uint32)), vocab_size=40)
    assert barred.ids.tolist() == [0]
    spike = np.zeros((1, 8), np.float32)
    spike[0, 5] = np.inf
    assert sample(spike, plain_inputs(1, temperature=1), vocab_size=8).ids.tolist() == [5]
    steep = np.array([[1, 300, 200, 0]], np.float32)
    assert sample(steep, plain_inputs(1, temperature=1e-38), vocab_size=4).ids.tolist() == [1]


def test_a_scored_id_is_returned_with_its_logprob():
    logits = np.array([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]], np.float32)
    got = sample(logits, plain_inputs(2, temperature=1, score_ids=[1, -1], top_logprobs=0), vocab_size=4)
    assert got.ids[0] == 1 and got.ranks[0] == 3 and got.top_ids.shape == (2, 0)
    total = math.log(sum(math.exp(v) for v in range(4)))
    assert got.logprobs[0] == pytest.approx(1 - total, abs=1e-6)


def test_every_generated_case_agrees_with_plain_python():
    for case in sample.cases(np.random.default_rng(0)):
        logits, inputs = case.args
        vocab = case.attrs["vocab_size"]
        got = sample(*case.args, **case.attrs)
        for row, mine in zip(oracle.from_arrays(logits, inputs), got.ids.tolist(), strict=True):
            assert mine == oracle.sample(row, vocab)


@pytest.mark.faults
def test_o04_ids_beyond_the_vocabulary_are_never_sampled_nor_shown():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(200, 1024)).astype(np.float32)
    logits[:, 1010] = 50
    got = sample(logits, plain_inputs(200, temperature=2, seed=np.arange(200), top_logprobs=5), vocab_size=1000)
    assert got.ids.max() < 1000 and got.top_ids.max() < 1000


@pytest.mark.faults
def test_o01_min_p_one_is_greedy_and_every_min_p_works():
    logits = np.random.default_rng(1).normal(0, 3, (64, 100)).astype(np.float32)
    best = logits.argmax(1).tolist()
    for min_p in (0, 0.05, 0.999, 1.0):
        got = sample(logits, plain_inputs(64, temperature=1, min_p=min_p, seed=np.arange(64)), vocab_size=100).ids.tolist()
        assert (got == best) == (min_p >= 0.999)


@pytest.mark.faults
def test_o05_temperature_zero_is_argmax_whatever_else_is_set():
    logits = np.random.default_rng(2).normal(0, 1, (10, 100)).astype(np.float32)
    for extra in ({}, {"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.1, "top_k": 5, "min_p": 0.3}):
        got = sample(logits, plain_inputs(10, temperature=0, seed=np.arange(10), **extra), vocab_size=100)
        assert got.ids.tolist() == logits.argmax(1).tolist()


@pytest.mark.faults
def test_o06_a_batch_may_mix_any_top_k():
    logits = np.random.default_rng(3).normal(0, 1, (1, 50)).astype(np.float32).repeat(4, 0)
    inputs = plain_inputs(4, temperature=[1, 0, 1, 1], top_k=[9999999, 0, 1, 0], seed=5)
    ids = sample(logits, inputs, vocab_size=50).ids.tolist()
    assert ids[1] == ids[2] == logits[0].argmax()
    assert ids[0] == ids[3]


@pytest.mark.faults
def test_o09_a_seeded_row_does_not_depend_on_its_neighbours():
    logits = np.random.default_rng(5).normal(0, 2, (2, 80)).astype(np.float32)
    seeded = []
    for other in (1, 7, 99):
        for slot in (0, 1):
            order = [0, 1] if slot == 0 else [1, 0]
            seeds = np.array([42, other], np.uint64)[order]
            got = sample(logits[order], plain_inputs(2, temperature=0.8, seed=seeds, position=16), vocab_size=80)
            seeded.append(int(got.ids[slot]))
    assert len(set(seeded)) == 1


@pytest.mark.faults
def test_o12_alternatives_belong_to_their_row_are_sorted_and_of_the_asked_number():
    logits = np.random.default_rng(6).normal(0, 2, (12, 60)).astype(np.float32)
    got = sample(logits, plain_inputs(12, top_logprobs=3), vocab_size=60)
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    assert got.top_ids.tolist() == np.argsort(-wide, axis=1)[:, :3].tolist()
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, got.top_ids, 1), atol=1e-5)
    assert got.ids.tolist() == got.top_ids[:, 0].tolist() and (got.ranks == 1).all()
    assert len({tuple(t) for t in got.top_ids.tolist()}) > 1
