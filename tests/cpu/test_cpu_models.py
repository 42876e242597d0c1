"""Experts, recurrences and compressed attention of the CPU backend: resident formats, the same bits however a step is cut, states
that one step leaves to the next, inputs that nobody should send."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from linear_cases import assert_close, product_of_quantised
from trivium.conformance.examples import make_example
from trivium.conformance.kit import open_lab, run_conformance
from trivium.conformance.lab import as_weight
from trivium.conformance.numbers import round_to
from trivium.errors import InvalidRequestError
from trivium.ops import OPERATORS, Batch, Case, Group, KVSpec, Recurrent, new_builder
from trivium.ops.dense import apply_gate
from trivium.ops.examples import normal, paged_state, recurrent_state, sequences
from trivium.ops.sample import plain_inputs
from trivium_cpu.plugin import CpuBackend

native = pytest.importorskip("trivium_cpu._native")

ISAS = ["portable", "avx2", "avx512", "auto", *native.emulated_tiers()]
TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 30, 6, 2, 72, 40
"""More rows than are multiplied at once, experts that begin in the middle of a tile."""
MATRICES = ("gate.3", "up.4", "down.5", "weight.1")
"""What an example calls the matrices of moe_experts and head_linear."""


def run(name, case, kv_dtype="float32", formats=None, **options):
    lab = open_lab("cpu", options)
    example = make_example(OPERATORS[name], case, dtype="float32", page_size=lab.page_size)
    held = [] if formats is None else [n for n in MATRICES if n in example.constants]
    weights = {n: (as_weight(n, example.constants[n]), formats) for n in held}
    return lab.run(example, example.program, dtype="float32", kv_dtype=kv_dtype, weights=weights)


def experts_case(tokens=TOKENS, *, hidden=HIDDEN, inter=INTER, biases=True, **attrs):
    rng = np.random.default_rng(11)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    shapes = (EXPERTS, inter, hidden), (EXPERTS, inter, hidden), (EXPERTS, hidden, inter)
    matrices = [normal(rng, *shape) * np.float32(shape[2] ** -0.5) for shape in shapes]
    given = [normal(rng, *shape[:2]) if biases else None for shape in shapes]
    x, weights = normal(rng, tokens, hidden), rng.uniform(0.05, 0.95, (tokens, TOP_K)).astype(np.float32)
    return Case((x, weights, ids, *matrices, *given), attrs)


def some_rows(case, rows):
    """The case with some of its tokens."""
    return Case((*(a[rows] for a in case.args[:3]), *case.args[3:]), case.attrs)


def test_every_operator_of_one_device_has_a_kernel():
    rows = run_conformance("cpu", {}, areas=("operators",)).rows
    host = {row.name for row in rows if row.status == "fallback"}
    several = {"all_reduce", "all_gather", "send", "recv", "sample"}
    assert host <= several, host


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_experts_of_float_formats_equal_the_reference_on_the_numbers_held(isa, format):
    outcome = run("moe_experts", experts_case(kind="gelu_tanh"), formats=format, isa=isa)
    assert_close(outcome.outputs["logits"], outcome.want["logits"], 2e-5)


@pytest.mark.parametrize("format", ["int8", "int4", "int4_asym_g64", "int4_i8", "int8_channel"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_experts_of_whole_numbers_equal_the_products_of_quantised_rows(isa, format):
    case = experts_case(biases=False)
    lab = open_lab("cpu", {"isa": isa})
    example = make_example(OPERATORS["moe_experts"], case, dtype="float32", page_size=lab.page_size)
    with lab.session() as session:
        weights = [as_weight(n, example.constants[n]) for n in MATRICES[:3]]
        gate, up, down = (session.read_weight(session.load(w, format)) for w in weights)
    outcome = lab.run(example, example.program, dtype="float32", weights={w.name: (w, format) for w in weights})
    x, shares, ids = case.args[:3]
    want = np.zeros_like(x)
    for t, e in np.ndindex(ids.shape):
        expert, row = ids[t, e], x[t : t + 1]
        wide = (product_of_quantised(row, m[expert], format).astype(np.float32) for m in (gate, up))
        inner = apply_gate(*wide, "silu", None, 1.0, 0.0)
        want[t] += shares[t, e] * product_of_quantised(inner, down[expert], format)[0]
    # A number of the inner row that lies between two codes may go to either.
    assert_close(outcome.outputs["logits"], want, 5e-3)


@pytest.mark.parametrize("format", ["float32", "int8", "int4"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_a_token_has_the_bits_from_its_experts_that_it_has_alone(isa, format):
    case = experts_case()
    together = run("moe_experts", case, formats=format, isa=isa, threads=3).outputs["logits"]
    for row in (0, 13, TOKENS - 1):
        alone = run("moe_experts", some_rows(case, [row]), formats=format, isa=isa, threads=1)
        np.testing.assert_array_equal(alone.outputs["logits"], together[[row]])


def test_all_tokens_may_choose_the_same_experts():
    case = experts_case(tokens=300)
    x, weights, ids, *rest = case.args
    ids = np.tile(np.array([[5, 2]], np.int32), (300, 1))
    outcome = run("moe_experts", Case((x, weights, ids, *rest), {}))
    assert_close(outcome.outputs["logits"], outcome.want["logits"], 2e-5)


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_a_head_s_projection_has_the_bits_of_a_token_alone(isa, format):
    rng = np.random.default_rng(5)
    x, weight = normal(rng, 27, 3, 50), normal(rng, 3, 21, 50)
    outcome = run("head_linear", Case((x, weight)), formats=format, isa=isa)
    assert_close(outcome.outputs["logits"], outcome.want["logits"], 2e-5 if format == "bfloat16" else 0.05)
    for row in (0, 26):
        alone = run("head_linear", Case((x[[row]], weight)), formats=format, isa=isa, threads=1)
        np.testing.assert_array_equal(alone.outputs["logits"], outcome.outputs["logits"][[row]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_topk"])
def test_equal_scores_go_to_the_lower_expert(scoring):
    case = Case((np.zeros((2, 6), np.float32), None), {"top_k": 3, "scoring": scoring})
    np.testing.assert_array_equal(run("moe_route", case).outputs["out1"], [[0, 1, 2]] * 2)


@pytest.mark.parametrize("name", ["moe_route", "sparse_mixer_route"])
def test_logits_that_are_no_numbers_still_choose_experts_and_hurt_their_own_token_only(name):
    """The reference's choice among them is not defined, but what comes after must find experts that exist."""
    logits = normal(np.random.default_rng(2), 3, 8)
    absent = (None,) if name == "moe_route" else ()
    clean = run(name, Case((logits, *absent), {"top_k": 3})).outputs
    logits = logits.copy()
    logits[1] = np.nan
    with np.errstate(invalid="ignore"):
        spoilt = run(name, Case((logits, *absent), {"top_k": 3})).outputs
    assert sorted(set(spoilt["out1"][1].tolist())) == sorted(spoilt["out1"][1].tolist())
    assert ((spoilt["out1"] >= 0) & (spoilt["out1"] < 8)).all()
    for output in ("logits", "out1"):
        np.testing.assert_array_equal(spoilt[output][[0, 2]], clean[output][[0, 2]])


def recurrence(name, rng, tokens):
    """(arguments of one sequence before its state, those after it but for the step's, the state's shape)."""
    heads, dk, dv = 3, 20, 37
    if name == "gated_delta_rule":
        keys = normal(rng, tokens, heads, dk) / np.float32(dk**0.5)
        gates = -rng.uniform(0, 1, (tokens, heads)), rng.uniform(0, 1, (tokens, heads))
        rows = (normal(rng, tokens, heads, dk), keys, normal(rng, tokens, heads, dv), *(g.astype(np.float32) for g in gates))
        return rows, (), (heads, dk, dv), {"scale": 0.3}
    if name == "short_conv":
        return (normal(rng, tokens, 300),), (normal(rng, 300, 4), normal(rng, 300)), (3, 300), {"kind": "silu"}
    per_token = normal(rng, tokens, heads, dv), rng.uniform(0, 1, (tokens, heads)).astype(np.float32)
    both = normal(rng, tokens, 1, dk), normal(rng, tokens, 1, dk)
    return (*per_token, *both), (-rng.uniform(0, 4, heads).astype(np.float32), normal(rng, heads)), (heads, dv, dk), {}


def arguments(name, rows, fixed):
    """In the order of the operator."""
    if name == "selective_scan":
        return (*rows[:2], fixed[0], *rows[2:], fixed[1])
    return (*rows, *fixed)


RECURRENCES = ["gated_delta_rule", "selective_scan", "short_conv"]


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("isa", ISAS[:4], indirect=True)
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_whoever_is_beside_it(isa, name):
    """23 tokens at once beside another sequence, against 7, 1, 1 and 14 of them alone on one thread."""
    rng = np.random.default_rng(7)
    step = sequences([4, 23], [9, 23])
    rows, fixed, shape, attrs = recurrence(name, rng, 27)
    state = recurrent_state(rng, step, shape)
    together = run(name, Case((*arguments(name, rows, fixed), state, *step), attrs), isa=isa, threads=3)
    assert_close(together.outputs["logits"], together.want["logits"], 1e-4)
    assert_close(together.states[0].data[state.table], together.want_states[0].data[state.table], 1e-4)
    alone, made, done = recurrent_state(rng, sequences([23], [23]), shape), [], 0
    for count in (7, 1, 1, 14):
        part = [a[4 + done : 4 + done + count] for a in rows]
        done += count
        outcome = run(name, Case((*arguments(name, part, fixed), alone, *sequences([count], [done])), attrs), isa=isa, threads=1)
        made.append(outcome.outputs["logits"])
        alone = outcome.states[0]
    np.testing.assert_array_equal(np.concatenate(made), together.outputs["logits"][4:])
    np.testing.assert_array_equal(alone.data[alone.table[0]], together.states[0].data[state.table[1]])


@pytest.mark.parametrize("name", RECURRENCES)
def test_pages_of_sequences_without_tokens_stay_as_they_are(name):
    rng = np.random.default_rng(9)
    step = sequences([3, 0, 2], [3, 8, 10])
    rows, fixed, shape, attrs = recurrence(name, rng, 5)
    state = recurrent_state(rng, step, shape)
    before = state.data.copy()
    outcome = run(name, Case((*arguments(name, rows, fixed), state, *step), attrs))
    untouched = [page for page in range(len(before)) if page not in (state.table[0], state.table[2])]
    np.testing.assert_array_equal(outcome.states[0].data[untouched], before[untouched])


def test_a_sequence_without_a_page_for_its_state_is_refused():
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": 1})
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (8, 6)))
    state = b.state("conv", Recurrent((2, 6)))
    y, _ = b.short_conv(x, b.weight("taps", (6, 3)), None, state, b.input("query_starts"), b.input("context_lens"))
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))}, vocab_size=6)
    session.kv_store(KVSpec(16, "float32", (Group(Recurrent((2, 6)), (0,)),)), 2)
    weights = {n: session.load(as_weight(n, np.ones(s, np.float32)), "float32") for n, s in (("table", (8, 6)), ("taps", (6, 3)))}
    executable = session.compile(program, weights)
    one = np.array([1], np.int32)
    batch = Batch(
        one, one - 1, np.array([0, 1], np.int32), one, np.zeros((1, 1, 1), np.int32), np.full((1, 1), -1, np.int64), one - 1,
        plain_inputs(1),
    )  # fmt: skip
    executable.run(batch)
    with pytest.raises(InvalidRequestError, match="sequence 0 of the step has no page"):
        executable.run(dataclasses.replace(batch, block_tables=np.full((1, 1, 1), -1, np.int32)))


RANK, ROPE, HEADS = 40, 12, 7
LONG = sequences([1, 5, 40, 3], [600, 261, 300, 900])
"""Contexts of several spans, a prefill of several tiles."""


def latent_case(step):
    rng = np.random.default_rng(13)
    state = paged_state(rng, step, (1, RANK), (1, ROPE), page_size=16)
    tokens = int(step.query_starts[-1])
    return Case((normal(rng, tokens, HEADS, RANK), normal(rng, tokens, HEADS, ROPE), state, *step), {"scale": 0.2})


KV_DTYPES = ["float32", "bfloat16", "float16", "int8"]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_compressed_attention_over_long_contexts_equals_the_reference(isa, kv_dtype):
    outcome = run("latent_attention", latent_case(LONG), kv_dtype, isa=isa)
    np.testing.assert_allclose(outcome.outputs["logits"], outcome.want["logits"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ["portable", "auto"], indirect=True)
def test_a_query_of_compressed_attention_has_the_bits_it_has_alone(isa, kv_dtype):
    case = latent_case(sequences([37], [301]))
    together = run("latent_attention", case, kv_dtype, isa=isa, threads=3).outputs["logits"]
    latent, rope, state, *_ = case.args
    for row in (0, 7, 36):
        one = dataclasses.replace(state, slots=state.slots[row : row + 1])
        step = sequences([1], [301 - 37 + row + 1])
        alone = run("latent_attention", Case((latent[[row]], rope[[row]], one, *step), case.attrs), kv_dtype, isa=isa, threads=1)
        np.testing.assert_array_equal(alone.outputs["logits"], together[[row]])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_compressed_rows_are_stored_as_the_neutral_format_rounds_them(isa, kv_dtype):
    rng = np.random.default_rng(17)
    step = sequences([9, 1], [20, 33])
    state = paged_state(rng, step, (1, RANK), (1, ROPE), page_size=16)
    state.slots[3] = -1
    rows = normal(rng, 10, RANK) * 3, normal(rng, 10, ROPE)
    outcome = run("latent_write", Case((state, *rows)), kv_dtype, isa=isa)
    for part, given in zip(("k", "v"), rows):
        pages, want = getattr(outcome.states[0], part), getattr(outcome.want_states[0], part)
        np.testing.assert_array_equal(pages, round_to(want, kv_dtype))
        assert (pages == round_to(given, kv_dtype)[9]).all(axis=-1).any()  # the last token is somewhere


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_chunks_that_end_within_spans_and_tiles_equal_the_reference(isa, kv_dtype):
    rng = np.random.default_rng(19)
    state = paged_state(rng, LONG, (2, 24), (2, 24), page_size=16, window=100)
    q = normal(rng, int(LONG.query_starts[-1]), 6, 24)
    outcome = run("chunked_attention", Case((q, state, *LONG), {"scale": 0.3, "chunk": 100}), kv_dtype, isa=isa)
    error = 1.5e-2 if kv_dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(outcome.outputs["logits"], outcome.want["logits"], rtol=error, atol=error)
