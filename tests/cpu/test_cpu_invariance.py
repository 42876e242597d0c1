"""The same bits for a row, whatever else is in the step, however it is cut, on however many threads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from trivium.conformance.examples import make_example
from trivium.conformance.kit import open_lab
from trivium.conformance.models import fuse, whole_model
from trivium.conformance.zoo import CONFIGS
from trivium.models import build
from trivium.ops import OPERATORS, Case
from trivium.ops.examples import normal, paged_state, sequences

native = pytest.importorskip("trivium_cpu._native")

SHAPE = (6, 2, 24)
"""Query heads, kv heads, dimensions."""
ISAS = ["portable", "avx2", "avx512", "avx512bf16", "auto", *native.emulated_tiers()]
LONG = sequences([1, 5, 70, 3], [700, 261, 300, 900])
"""Contexts of several spans, a prefill of several tiles."""


def attention_case(step, shape=SHAPE, *, window=None, softcap=None, sinks=False, causal=True):
    heads, kv_heads, dim = shape
    rng = np.random.default_rng(3)
    state = paged_state(rng, step, (kv_heads, dim), (kv_heads, dim), page_size=16, window=window)
    q = normal(rng, int(step.query_starts[-1]), heads, dim)
    attrs = {"scale": 0.3, "window": window, "softcap": softcap, "causal": causal}
    return Case((q, state, *step, normal(rng, heads) if sinks else None), attrs)


def attention(case, kv_dtype="float32", **options):
    """(what the backend computes, what the reference does), float32[tokens, heads * dim]."""
    lab = open_lab("cpu", options)
    example = make_example(OPERATORS["paged_attention"], case, dtype="float32", page_size=lab.page_size)
    outcome = lab.run(example, example.program, dtype="float32", kv_dtype=kv_dtype)
    return outcome.outputs["logits"], outcome.want["logits"]


def one_row(case, row):
    """A query of a case of one sequence, in a step of its own."""
    q, state, starts, contexts, sinks = case.args
    context = int(contexts[0]) - int(starts[1]) + row + 1
    one = dataclasses.replace(state, slots=state.slots[row : row + 1])
    return Case((q[row : row + 1], one, np.array([0, 1], np.int32), np.array([context], np.int32), sinks), case.attrs)


KV_DTYPES = ["float32", "bfloat16", "float16", "int8"]
ERRORS = {"float32": 2e-5, "float16": 2e-5, "int8": 3e-4, "bfloat16": 1.5e-2}
"""Allowed beside the reference on the numbers that the pages hold: what the rounding of queries and weights to 16 bits leaves."""


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("attrs", [{}, {"window": 300}, {"softcap": 5.0, "sinks": True}, {"causal": False}], ids=str)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_long_contexts_equal_the_reference(isa, attrs, kv_dtype):
    got, want = attention(attention_case(LONG, **attrs), kv_dtype, isa=isa)
    np.testing.assert_allclose(got, want, rtol=ERRORS[kv_dtype], atol=ERRORS[kv_dtype])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_rows_whose_window_has_left_a_span_that_their_tile_still_reads(isa, kv_dtype):
    got, want = attention(attention_case(sequences([90], [860]), window=300), kv_dtype, isa=isa)
    np.testing.assert_allclose(got, want, rtol=ERRORS[kv_dtype], atol=ERRORS[kv_dtype])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("attrs", [{}, {"window": 300}], ids=str)
def test_spans_that_are_shared_out_give_the_bits_of_one_thread(attrs, kv_dtype):
    for step in (LONG, sequences([1], [900]), sequences([2], [513]), sequences([1, 1, 1, 1, 1], [2000, 3, 9, 40, 17])):
        case = attention_case(step, **attrs)
        alone, _ = attention(case, kv_dtype, threads=1)
        for threads in (2, 3):
            shared, _ = attention(case, kv_dtype, threads=threads)
            np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("attrs", [{}, {"window": 100}], ids=str)
@pytest.mark.parametrize("isa", [name for name in ISAS if name != "avx512"], indirect=True)
def test_a_query_has_the_bits_it_has_alone(isa, attrs, kv_dtype):
    """Rows of a prefill, cut into steps of one token."""
    case = attention_case(sequences([37], [301]), **attrs)
    together, _ = attention(case, kv_dtype, isa=isa)
    for row in (0, 7, 35, 36):
        np.testing.assert_array_equal(attention(one_row(case, row), kv_dtype, isa=isa)[0], together[row : row + 1])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", [(6, 1, 80), (4, 2, 99), (5, 5, 160)], ids=str)
@pytest.mark.parametrize("isa", [name for name in ISAS if name != "avx512"], indirect=True)
def test_wide_heads_equal_the_reference_and_a_query_has_the_bits_it_has_alone(isa, shape, kv_dtype):
    """Heads that are worked on in several parts, one of them narrower."""
    case = attention_case(sequences([41], [333]), shape, window=270)
    together, want = attention(case, kv_dtype, isa=isa)
    allowed = ERRORS[kv_dtype] * (shape[2] / SHAPE[2]) ** 0.5  # scores, and what rounding leaves in them, grow with the dimensions
    np.testing.assert_allclose(together, want, rtol=allowed, atol=allowed)
    for row in (3, 40):
        np.testing.assert_array_equal(attention(one_row(case, row), kv_dtype, isa=isa)[0], together[row : row + 1])


def logits(config, step, rows=None, **options):
    """Logits of a tiny model; of some sequences only."""
    lab = open_lab("cpu", options)
    program = build(CONFIGS[config], max_model_len=128)
    example = whole_model(program, step, lab.page_size)
    if rows is not None:
        example = only(example, step, rows)
    return lab.run(example, fuse(lab, program), dtype="float32").outputs["logits"]


def only(example, step, seq):
    """The example with one of its sequences."""
    begin, end = step.query_starts[seq : seq + 2]
    inputs = {
        **example.inputs, "token_ids": example.inputs["token_ids"][begin:end], "positions": example.inputs["positions"][begin:end],
        "query_starts": np.array([0, end - begin], np.int32), "context_lens": step.context_lens[seq : seq + 1],
        "sample_rows": np.arange(end - begin, dtype=np.int32), "pool_rows": np.arange(end - begin, dtype=np.int32),
    }  # fmt: skip
    states = tuple(
        dataclasses.replace(s, block_table=s.block_table[seq : seq + 1], slots=s.slots[begin:end]) for s in example.states
    )
    return dataclasses.replace(example, inputs=inputs, states=states)


STEP = sequences([3, 1, 1, 40, 2], [10, 33, 90, 60, 2])


@pytest.mark.faults
@pytest.mark.parametrize("config", ["llama odd", "gemma3", "qwen3"])
def test_o42_a_sequence_alone_has_the_bits_it_has_in_a_batch(config):
    together = logits(config, STEP)
    for seq, (begin, end) in enumerate(zip(STEP.query_starts, STEP.query_starts[1:])):
        np.testing.assert_array_equal(logits(config, STEP, seq), together[begin:end])


@pytest.mark.faults
@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"], indirect=True)
def test_o42_thread_counts_give_the_same_bits(isa):
    one = logits("llama", STEP, threads=1, isa=isa)
    for threads in (2, 3):
        np.testing.assert_array_equal(logits("llama", STEP, threads=threads, isa=isa), one)
