"""SamplerState and build_inputs against a naive recount of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.errors import InvalidRequestError
from trivium.ops import SampleInputs
from trivium.ops.batch import id_mask
from trivium.ops.sample import derive_seed, sample
from trivium.sampling import Dry, SamplerState, SamplingParams, build_inputs, fresh_seed

V = 40
ids = st.lists(st.integers(0, V - 1), max_size=150)


def state(params: SamplingParams, prompt=(1, 2), eos=(0,), **kw) -> SamplerState:
    return SamplerState(params, list(prompt), eos, V, 77, **kw)


def draw(s: SamplerState, logits: np.ndarray, position: int = 5) -> int:
    return int(sample(logits[None].astype(np.float32), build_inputs([(s, position, -1)], V), vocab_size=V).ids[0])


@given(ids, ids)
def test_seen_tokens_are_counted_as_a_recount_would(prompt, output):
    s = state(SamplingParams(presence_penalty=1), prompt)
    for token in output:
        s.append(token)
    inputs = build_inputs([(s, 9, -1)], V)
    want = {i: output.count(i) for i in sorted({*prompt, *output})}
    assert dict(zip(inputs.seen_ids.tolist(), inputs.seen_counts.tolist())) == want
    assert inputs.seen_ids.tolist() == list(want)


def test_rows_are_laid_out_one_after_the_other():
    plain = state(SamplingParams(temperature=0))
    penal = state(SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25, top_p=0.5, min_p=0.125, seed=-1), [7, 3, 7])
    biased = state(SamplingParams(logit_bias={30: 2, 4: -1}, top_k=10**9))
    got = build_inputs([(plain, 1, -1), (penal, 2**40, -1), (biased, 3, -1), (penal, 4, -1)], V)
    assert got.temperature.tolist() == [0, 1, 1, 1] and got.top_k.tolist() == [0, 0, V, 0]
    assert got.position.tolist() == [1, 2**40, 3, 4] and got.seed.tolist() == [77, 2**64 - 1, 77, 2**64 - 1]
    assert got.seen_starts.tolist() == [0, 0, 2, 2, 4] and got.seen_ids.tolist() == [3, 7, 3, 7]
    assert got.bias_starts.tolist() == [0, 0, 0, 2, 2] and got.bias_ids.tolist() == [4, 30] and got.bias.tolist() == [-1, 2]
    assert got.repetition.tolist() == [1, 1.5, 1, 1.5] and got.frequency.tolist() == [0, 0.25, 0, 0.25]
    assert got.mask is None and got.top_logprobs == -1 and got.score_ids.tolist() == [-1] * 4
    for name, dtype in {
        "seed": "u8",
        "temperature": "f4",
        "seen_starts": "i4",
        "seen_counts": "i4",
        "bias": "f4",
        "position": "i8",
    }.items():
        array = getattr(got, name)
        assert array.dtype == dtype and array.flags.c_contiguous


def test_no_rows_at_all():
    got = build_inputs([], V)
    assert len(got.temperature) == 0 and got.seen_starts.tolist() == [0]
    assert sample(np.zeros((0, V), np.float32), got, vocab_size=V).ids.shape == (0,)


def test_scored_rows_bring_their_own_number_of_alternatives_and_no_edits():
    s = state(SamplingParams(repetition_penalty=2, logit_bias={1: 1}, logprobs=2, prompt_logprobs=5))
    got = build_inputs([(s, 1, 6)], V)
    assert got.score_ids.tolist() == [6] and got.top_logprobs == 5 and len(got.seen_ids) == len(got.bias_ids) == 0
    assert build_inputs([(s, 1, -1)], V).top_logprobs == 2
    assert build_inputs([(state(SamplingParams(logprobs=-1)), 1, -1), (s, 1, -1)], V).top_logprobs == V


def test_end_tokens_are_banned_until_min_tokens_and_then_come_back():
    s = state(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5], logit_bias={5: 1.0}), eos=(0, 9))
    logits = np.zeros(V)
    logits[[0, 5, 9]], logits[20] = 10, 1
    assert draw(s, logits) == 20
    s.append(20)
    assert draw(s, logits) == 20
    s.append(20)
    assert draw(s, logits) == 5


def test_bad_words_are_banned_only_where_they_would_end():
    s = state(SamplingParams(temperature=0), bad_words=[(3, 4), (6,), (3, 4, 8)])
    logits = np.arange(V, dtype=float) * 0
    logits[6], logits[4], logits[8], logits[1] = 4, 3, 2, 1
    assert draw(s, logits) == 4  # 6 is banned everywhere, 4 only after 3
    s.append(3)
    assert draw(s, logits) == 8
    s.append(4)
    assert draw(s, logits) == 4
    assert build_inputs([(s, 1, -1)], V).bias_ids.tolist() == [6, 8]


def test_allowed_ids_become_a_mask_of_exactly_these():
    s, free = state(SamplingParams(allowed_token_ids=[0, 31, 32, 39])), state(SamplingParams())
    mask = build_inputs([(free, 1, -1), (s, 1, -1)], V).mask
    assert mask.dtype == np.uint32 and mask.shape == (2, 2)
    allowed = lambda row: [i for i in range(V) if int(row[i // 32]) >> (i % 32) & 1]
    assert allowed(mask[0]) == list(range(V)) and allowed(mask[1]) == [0, 31, 32, 39]


def test_parameters_that_leave_no_token_are_refused():
    with pytest.raises(InvalidRequestError, match="no token is left"):
        state(SamplingParams(allowed_token_ids=[0, 5], stop_token_ids=[5], min_tokens=1))
    with pytest.raises(InvalidRequestError, match="out of the vocabulary"):
        state(SamplingParams(stop_token_ids=[V]))


def test_each_of_n_samples_has_its_own_stream_and_a_given_seed_wins():
    assert state(SamplingParams()).seed == 77 and state(SamplingParams(seed=5)).seed == 5
    assert state(SamplingParams(seed=5), index=3).seed == derive_seed(5, 3) != 5
    assert fresh_seed() != fresh_seed() and 0 <= fresh_seed() < 2**64


@pytest.mark.faults
def test_o09_a_seeded_request_repeats_beside_an_unseeded_one():
    logits = np.random.default_rng(8).normal(0, 2, (2, V)).astype(np.float32)
    tokens = []
    for other, slot in ((SamplingParams(), 0), (SamplingParams(seed=7), 1), (SamplingParams(top_k=3), 0), (SamplingParams(), 1)):
        rows = [(state(SamplingParams(temperature=0.8, seed=42)), 16, -1), (SamplerState(other, [1], (), V, fresh_seed()), 3, -1)]
        order = [0, 1] if slot == 0 else [1, 0]
        got = sample(logits[order], build_inputs([rows[i] for i in order], V), vocab_size=V)
        tokens.append(int(got.ids[slot]))
    assert len(set(tokens)) == 1


@pytest.mark.faults
def test_o07_a_stop_id_outside_the_vocabulary_is_refused_and_the_neighbour_unharmed():
    good = state(SamplingParams(temperature=0))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        state(SamplingParams(stop_token_ids=[V + 10], min_tokens=4))
    logits = np.arange(V, dtype=float)
    assert draw(good, logits) == V - 1


@pytest.mark.faults
def test_o10_an_end_token_among_the_alternatives_has_a_finite_logprob():
    s = state(SamplingParams(temperature=0, logprobs=3), eos=(7,))
    logits = np.zeros((1, V), np.float32)
    logits[0, 7] = 9
    got = sample(logits, build_inputs([(s, 1, -1)], V), vocab_size=V)
    assert got.ids.tolist() == [7] and got.top_ids[0, 0] == 7 and np.isfinite(got.top_logprobs).all()


@pytest.mark.faults
def test_o11_zero_alternatives_still_report_the_chosen_one():
    got = sample(np.zeros((1, V), np.float32), build_inputs([(state(SamplingParams(logprobs=0)), 1, -1)], V), vocab_size=V)
    assert got.logprobs.tolist() == pytest.approx([-np.log(V)], abs=1e-6) and got.top_ids.shape == (1, 0)


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(-1, 2)), max_size=12))
def test_arrays_that_steps_keep_are_those_that_would_be_made_anew(steps) -> None:
    fields = {"temperature": 0.5, "seed": 3}, {"min_tokens": 3}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}, "logprobs": 2}
    states, kept = [state(SamplingParams(**each), [1, 2]) for each in fields], {}
    for at, (which, score) in enumerate(steps):
        rows = [(states[i], at + i, score) for i in which]
        same_rows(build_inputs(rows, V, kept), build_inputs(rows, V))
        for i in which:
            states[i].append(at)


def test_arrays_are_kept_while_nothing_but_positions_can_change() -> None:
    warm, cold, kept = state(SamplingParams(seed=3)), state(SamplingParams(min_tokens=1)), {}
    first = build_inputs([(warm, 1, -1)], V, kept)
    assert build_inputs([(warm, 2, -1)], V, kept) is first and first.position.tolist() == [2]
    with pytest.raises(ValueError, match="read-only"):
        first.temperature[0] = 1
    assert build_inputs([(cold, 1, -1)], V, kept) is not build_inputs([(cold, 2, -1)], V, kept)
    cold.append(1)
    assert build_inputs([(cold, 2, -1)], V, kept) is build_inputs([(cold, 3, -1)], V, kept)


def same_rows(got: SampleInputs, want: SampleInputs) -> None:
    for name in SampleInputs.__slots__:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None) and (mine is None or np.array_equal(mine, theirs)), name


AHEAD = (
    {}, {"min_tokens": 3, "stop_token_ids": [5]}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"repetition_penalty": 1.5},
    {"allowed_token_ids": [1, 2, 3, 4]}, {"logit_bias": {3: 1.0}, "min_tokens": 2},
)  # fmt: skip


@given(st.sampled_from(AHEAD), st.booleans(), ids, ids, st.lists(st.integers(0, 9), max_size=6))
def test_states_ahead_are_as_if_the_drafts_had_been_appended(fields, words, prompt, output, drafts):
    bad = [(3, 4), (6,), (3, 4, 8)] if words else []
    s, unchanged = (state(SamplingParams(**fields), prompt, bad_words=bad) for _ in range(2))
    for token in output:
        s.append(token)
        unchanged.append(token)
    rows = s.ahead(drafts)
    same_rows(build_inputs([(s, 9, -1)], V), build_inputs([(unchanged, 9, -1)], V))
    assert len(rows) == len(drafts) + 1
    for row, token in zip(rows, [*drafts, None], strict=True):
        same_rows(build_inputs([(row, 9, -1)], V), build_inputs([(s, 9, -1)], V))
        if token is not None:
            s.append(token)


def test_states_ahead_of_what_does_not_depend_on_the_output_are_one_object():
    s = state(SamplingParams(top_k=4, logit_bias={1: 2.0}, min_tokens=2))
    assert len({id(row) for row in s.ahead([1, 2, 3, 4])}) == 3
    s.append(1)
    s.append(2)
    assert {id(row) for row in s.ahead([1, 2, 3, 4])} == {id(s)}


class Alternating:
    """A grammar of even ids, then odd ones, in turns; 39 completes it."""

    def __init__(self) -> None:
        self.odd, self.complete = 0, False

    def accept(self, token: int) -> None:
        self.odd, self.complete = 1 - self.odd, token == 39

    def mask(self) -> np.ndarray:
        return id_mask(range(self.odd, V, 2), V)

    def masks_ahead(self, drafts: list[int]) -> list[np.ndarray]:
        wrong = next((j for j, token in enumerate(drafts) if token % 2 != (self.odd + j) % 2), len(drafts))
        return [id_mask(range((self.odd + j + 1) % 2, V, 2), V) for j in range(wrong)]


def test_a_grammar_narrows_the_mask_and_each_state_ahead_has_its_own():
    s = state(SamplingParams(temperature=0, allowed_token_ids=[4, 5, 6, 7, 39]), grammar=Alternating())
    assert [draw(row, np.arange(V)) for row in s.ahead([4, 5])] == [6, 39, 6]
    assert len(s.ahead([4, 6, 5])) == 2 and len(s.ahead([5])) == 1
    assert draw(s, np.arange(V)) == 6 and not s.complete
    s.append(6)
    assert draw(s, np.arange(V)) == 39 and [draw(row, -np.arange(V)) for row in s.ahead([5])] == [5, 4]
    s.append(39)
    assert s.complete


def test_a_grammar_and_the_other_limits_may_leave_no_token():
    with pytest.raises(InvalidRequestError, match="no token is left") as refused:
        state(SamplingParams(allowed_token_ids=[5, 7]), grammar=Alternating())
    assert refused.value.param == "allowed_token_ids"
    s = state(SamplingParams(allowed_token_ids=[4, 5]), bad_words=[(4, 5)], grammar=Alternating())
    assert len(s.ahead([4, 5])) == 1
    with pytest.raises(InvalidRequestError, match="no token is left"):
        s.append(4)


def test_states_ahead_end_where_a_draft_leaves_no_token():
    s = state(SamplingParams(temperature=0, allowed_token_ids=[5, 6]), bad_words=[(5, 5), (5, 6)])
    assert len(s.ahead([6, 5, 6])) == 2 and len(s.ahead([6, 6, 6])) == 4
    s.append(5)
    with pytest.raises(InvalidRequestError, match="no token is left"):
        s.bias()


@given(ids, st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=6))
def test_states_ahead_know_repetitions_and_ask_processors_about_the_drafts(prompt, output, drafts):
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, logit_bias={3: 1.0})
    processor = lambda prompt, output: ([4, 1], [float(len(output)), float(sum(output))]) if output else None
    made = lambda tokens: state(params, prompt, dry=Dry(params, [*prompt, *tokens], frozenset()), processors=[processor])
    s = state(params, prompt, dry=Dry(params, prompt, frozenset()), processors=[processor])
    for token in output:
        s.append(token)
    rows = s.ahead(drafts)
    for j, row in enumerate([*rows, s]):
        tokens = output + drafts[:j] if j < len(rows) else output
        want = dict(zip(*(a.tolist() for a in made(tokens)._dry.penalties())))
        want[3] = want.get(3, 0) + 1
        for i, value in ((4, len(tokens)), (1, sum(tokens))) if tokens else ():
            want[i] = want.get(i, 0) + value
        inputs = build_inputs([(row, 9, -1)], V)
        assert inputs.bias_ids.tolist() == sorted(want)
        assert dict(zip(inputs.bias_ids.tolist(), inputs.bias.tolist())) == pytest.approx(want, rel=1e-5)


def test_a_mask_and_bans_that_leave_nothing_are_an_error_even_if_the_mask_is_new():
    s = state(SamplingParams(bad_words=["x"]), bad_words=[(3,)])
    s.append(1)
    s.mask = np.array([1 << 3, 0], np.uint32)
    with pytest.raises(InvalidRequestError, match="no token is left: bad_words"):
        build_inputs([(s, 1, -1)], V)
