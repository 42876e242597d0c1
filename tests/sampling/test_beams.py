"""The search itself, over tables of transitions, against brute force and against a search written down plainly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_beams import Next, Ranked, every_sequence, log_softmax, plain_search
from trivium.errors import InvalidRequestError
from trivium.sampling import BeamSearch, SamplingParams

VOCAB, END = 5, 2


def table_of(seed: int) -> Next:
    """Transitions by place and last token: with the last token alone, walks around a cycle would tie."""
    rows = np.random.default_rng(seed).normal(0, 2, (10, VOCAB, VOCAB))
    return lambda tokens: log_softmax(rows[len(tokens), tokens[-1] if tokens else 0])


def search(
    next_of: Next, width: int, longest: int, penalty: float, early: bool | str = False, ends: frozenset[int] = frozenset({END})
) -> Ranked:
    params = SamplingParams(beam_width=min(width, 128), length_penalty=penalty, early_stopping=early)
    beams = BeamSearch(params, ends, longest)
    if width > 128:
        beams.width, beams.candidates = width, 2 * width
    steps = 0
    while beams.live:
        rows = []
        for hypothesis in beams.live:
            values = next_of([step.token for step in hypothesis.path()])
            likeliest = np.argsort(-values, kind="stable")[: beams.candidates]
            rows.append(({int(i): float(values[i]) for i in likeliest}, None))
        beams.advance(rows)
        steps += 1
        assert steps <= longest, "the search never ends"
    return [(beams.score(h), h.total, [step.token for step in h.path()]) for h in beams.best(width)]


def same(a: Ranked, b: Ranked) -> None:
    assert [tokens for _, _, tokens in a] == [tokens for _, _, tokens in b]
    np.testing.assert_allclose([x[:2] for x in a], [x[:2] for x in b], rtol=1e-9)


@pytest.mark.faults
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("longest", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_o03_a_width_of_everything_finds_what_brute_force_finds(seed: int, longest: int, penalty: float) -> None:
    best = every_sequence(table_of(seed), VOCAB, {END}, longest, penalty)
    same(search(table_of(seed), VOCAB**longest, longest, penalty, "never")[:20], best[:20])


@pytest.mark.faults
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_o03_the_length_penalty_ranks_by_generated_tokens(width: int, penalty: float) -> None:
    for seed in range(30):
        same(search(table_of(seed), width, 4, penalty), plain_search(table_of(seed), width, {END}, 4, penalty))
        assert len(search(table_of(seed), width, 10, penalty)) == width


@given(
    st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 9), st.floats(-2, 3), st.sampled_from([True, False, "never"]),
    st.sets(st.integers(0, VOCAB - 1), max_size=3),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_it_is_the_plain_search(seed: int, width: int, longest: int, penalty: float, early: bool | str, ends: set[int]) -> None:
    same(
        search(table_of(seed), width, longest, penalty, early, frozenset(ends)),
        plain_search(table_of(seed), width, ends, longest, penalty, early),
    )


def test_never_stopping_early_loses_nothing_that_the_live_ones_could_still_become() -> None:
    """A high length_penalty prefers a long output whose total is worse than that of the pool; the heuristic misses it."""
    missed = 0
    for seed in range(60):
        exact, quick = (search(table_of(seed), 3, 8, 2.0, early) for early in ("never", False))
        assert exact[0][0] >= quick[0][0] - 1e-12
        missed += exact[0][0] > quick[0][0] + 1e-9
    assert missed


def test_ties_go_to_the_better_parent_and_the_lower_token() -> None:
    flat: Next = lambda tokens: np.full(VOCAB, -np.log(VOCAB))
    assert [tokens for _, _, tokens in search(flat, 3, 2, 1.0, ends=frozenset())] == [[0, 0], [0, 1], [0, 2]]


def test_banned_tokens_are_no_hypotheses() -> None:
    row = np.array([0.0, -np.inf, -np.inf, -np.inf, -np.inf])
    assert [tokens for _, _, tokens in search(lambda _: row, 4, 3, 1.0)] == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 129}, "beam_width"), ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"), ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"), ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "stop": "x"}, "stop"), ({"beam_width": 2, "logit_bias": {1: 1}}, "logit_bias"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"), ({"beam_width": 2, "min_tokens": 1}, "min_tokens"),
        ({"beam_width": 2, "bad_words": ["x"]}, "bad_words"), ({"beam_width": 2, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"length_penalty": 11}, "length_penalty"), ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"), ({"early_stopping": 1}, "early_stopping"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_beams_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param and str(refused.value).startswith(param)


@pytest.mark.parametrize("temperature", [0, 1, 0.0, 1.0])
def test_a_temperature_that_means_nothing_is_taken(temperature: float) -> None:
    assert SamplingParams(beam_width=2, temperature=temperature, seed=3, logprobs=2).beam_width == 2
