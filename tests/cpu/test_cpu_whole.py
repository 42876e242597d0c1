"""Encoders on the CPU backend: attention to both sides against the reference, the same bits in any company and on any number of
threads, and the tables of segments and of positions, whose rows are not those of token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu_cases import ISAS, run_case
from trivium.conformance.lab import as_weight
from trivium.errors import InvalidRequestError
from trivium.ops import Batch, Case, KVSpec, new_builder
from trivium.ops.examples import normal, sequences
from trivium.ops.sample import plain_inputs
from trivium_cpu.plugin import CpuBackend

HEADS, KV_HEADS, DIM = 6, 2, 21
LENGTHS = [3, 300, 1, 70, 530]
"""Sequences that end within runs, blocks and spans of keys, and begin anywhere."""


def both_ways_case(lengths, *, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, window=None):
    rng = np.random.default_rng(23)
    step, tokens = sequences(lengths, lengths), sum(lengths)
    rows = normal(rng, tokens, heads, dim), normal(rng, tokens, kv_heads, dim), normal(rng, tokens, kv_heads, dim)
    return Case((*rows, step.query_starts), {"scale": 0.3, "window": window})


def alone(case, begin, end):
    """The case with one of its sequences."""
    return Case((*(a[begin:end] for a in case.args[:3]), np.array([0, end - begin], np.int32)), case.attrs)


def attention(case, **options):
    outcome = run_case("bidirectional_attention", case, **options)
    return outcome.outputs["logits"], outcome.want["logits"]


@pytest.mark.parametrize("window", [None, 0, 5, 290])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_attention_to_both_sides_of_long_sequences_equals_the_reference(isa, window):
    got, want = attention(both_ways_case(LENGTHS, window=window), isa=isa)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 1), (5, 5, 64), (12, 1, 33), (200, 2, 8)])
def test_heads_of_any_number_and_size_equal_the_reference(heads, kv_heads, dim):
    got, want = attention(both_ways_case([40, 9], heads=heads, kv_heads=kv_heads, dim=dim), threads=3)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 5, 290])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_a_sequence_has_the_bits_from_both_sides_that_it_has_alone(isa, window):
    case = both_ways_case(LENGTHS, window=window)
    together, _ = attention(case, isa=isa, threads=3)
    for begin, end in zip(case.args[3], case.args[3][1:]):
        np.testing.assert_array_equal(attention(alone(case, begin, end), isa=isa, threads=1)[0], together[begin:end])


def test_numbers_that_are_none_stay_within_their_sequence():
    """Runs of keys reach into what lies behind a sequence."""
    case = both_ways_case(LENGTHS)
    clean, _ = attention(case)
    rows = [a.copy() for a in case.args[:3]]
    begin, end = case.args[3][1:3]
    for a in rows:
        a[:begin], a[end:] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        spoilt, _ = attention(Case((*rows, case.args[3]), case.attrs))
    np.testing.assert_array_equal(spoilt[begin:end], clean[begin:end])


def test_attention_that_weighs_all_alike_is_the_mean():
    rng = np.random.default_rng(1)
    rows, nothing = normal(rng, 120, 1, 400), np.zeros((120, 1, 400), np.float32)
    got, _ = attention(Case((nothing, nothing, rows, np.array([0, 50, 120], np.int32)), {"scale": 1.0, "window": None}))
    want = np.repeat([rows[:50, 0].mean(0, dtype=np.float64), rows[50:, 0].mean(0, dtype=np.float64)], [50, 70], axis=0)
    np.testing.assert_allclose(got.reshape(120, 400), want, rtol=1e-5, atol=1e-6)


VOCAB, PLACES, WIDTH, SEPARATOR = 8, 5, 4, 6


@pytest.fixture
def tables():
    """Words, positions and two segments: row r of each table is r + 1 at a place of its own."""
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": 2, "strict": True})
    b = new_builder()
    ids, starts = b.input("token_ids"), b.input("query_starts")
    x = b.add(
        b.embedding(ids, b.weight("words", (VOCAB, WIDTH))), b.embedding(b.input("positions"), b.weight("places", (PLACES, WIDTH)))
    )
    x = b.add(x, b.segment_embedding(ids, b.weight("kinds", (2, WIDTH)), starts, separator=SEPARATOR))
    program = b.finish({"logits": b.gather_rows(x, b.input("sample_rows"))}, vocab_size=WIDTH)
    arrays = {name: np.zeros((rows, WIDTH), np.float32) for name, rows in (("words", VOCAB), ("places", PLACES), ("kinds", 2))}
    for column, array in enumerate(arrays.values()):
        array[:, column] = np.arange(1, len(array) + 1)
    session.kv_store(KVSpec(16, "float32", ()), 1)
    yield session.compile(program, {name: session.load(as_weight(name, a), "float32") for name, a in arrays.items()})
    session.close()


def texts(*ids):
    lengths, flat = [len(i) for i in ids], np.concatenate(ids).astype(np.int32)
    step, n = sequences(lengths, lengths), len(flat)
    at = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    none = np.zeros((0, len(ids), 0), np.int32), np.zeros((0, n), np.int64)
    return Batch(flat, at, *step, *none, np.arange(n, dtype=np.int32), plain_inputs(n))


def test_segments_end_with_their_separators_and_begin_anew_with_each_sequence(tables):
    """Token ids are no rows of the table of segments, which has two; the third text of a sequence counts as its second."""
    got = tables.run(texts([7, SEPARATOR, 5, SEPARATOR, 1], [2], [SEPARATOR, 0, 3])).output("logits")
    words, places = [7, SEPARATOR, 5, SEPARATOR, 1, 2, SEPARATOR, 0, 3], [0, 1, 2, 3, 4, 0, 0, 1, 2]
    kinds = [0, 0, 1, 1, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(got, 1 + np.array([words, places, kinds, [-1] * 9], np.float32).T)


@pytest.mark.parametrize(("ids", "message"), [
    ([VOCAB], f"token id {VOCAB} is outside the model's {VOCAB} embeddings"), ([-1], "token id -1"),
    ([0] * (PLACES + 1), f"position {PLACES} is outside the model's {PLACES} embeddings"),
])  # fmt: skip
def test_token_ids_and_positions_without_a_row_are_refused_and_the_next_step_runs(tables, ids, message):
    with pytest.raises(InvalidRequestError, match=message):
        tables.run(texts([1], ids))
    assert tables.run(texts([1], [2])).output("logits")[:, 0].tolist() == [2, 3]


def test_a_negative_position_is_refused(tables):
    with pytest.raises(InvalidRequestError, match="position -1"):
        tables.run(dataclasses.replace(texts([1]), positions=np.array([-1], np.int32)))
