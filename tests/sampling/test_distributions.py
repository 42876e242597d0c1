"""What the filters leave, in closed form from float64 probabilities, against many seeded draws on both backends (chi square)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sampling_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.conformance.kit import open_lab
from trivium.conformance.sampler import draw
from trivium.ops import Case
from trivium.ops.sample import plain_inputs, sample
from trivium.plugin import find_backends

HERE = [s.name for s in find_backends() if s.devices and s.name in ("reference", "cpu")]
PROBABILITIES = np.array([0.3, 0.02, 0.2, 0.15, 0.01, 0.12, 0.08, 0.07, 0.05])
DRAWS = 6000


def typical(p: np.ndarray, mass: float) -> list[int]:
    """Locally typical sampling as the paper has it: surprise nearest to the entropy first, up to `mass`."""
    entropy = -sum(q * math.log(q) for q in p)
    order = sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - entropy))
    return order[: 1 + int(np.searchsorted(np.cumsum(p[order]), mass))]


def near_the_top(p: np.ndarray, sigmas: float) -> list[int]:
    x = np.log(p)
    return [i for i in range(len(p)) if x[i] >= x.max() - sigmas * x.std()]


def without_top(p: np.ndarray, threshold: float) -> list[int]:
    top = sorted((i for i in range(len(p)) if p[i] >= threshold), key=lambda i: -p[i])
    return [i for i in range(len(p)) if i not in top[:-1]]


def among(p: np.ndarray, ids: list[int]) -> np.ndarray:
    left = np.where(np.isin(np.arange(len(p)), ids), p, 0)
    return left / left.sum()


P = PROBABILITIES
HOT = among(P**0.5, list(range(len(P))))
CASES = {
    "all": ({}, P),
    "temperature": ({"temperature": 2.0}, HOT),
    "top_k": ({"top_k": 4}, among(P, [0, 2, 3, 5])),
    "top_p": ({"top_p": 0.7}, among(P, [0, 2, 3, 5])),
    "min_p": ({"min_p": 0.25}, among(P, [0, 2, 3, 5, 6])),
    "typical_p": ({"typical_p": 0.5}, among(P, typical(P, 0.5))),
    "typical_p at a temperature": ({"typical_p": 0.6, "temperature": 2.0}, among(HOT, typical(HOT, 0.6))),
    "top_n_sigma": ({"top_n_sigma": 1.0}, among(P, near_the_top(P, 1.0))),
    "top_n_sigma at a temperature": ({"top_n_sigma": 1.0, "temperature": 2.0}, among(HOT, near_the_top(P, 1.0))),
    "XTC always": ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, among(P, without_top(P, 0.1))),
    "XTC now and then": (
        {"xtc_probability": 0.25, "xtc_threshold": 0.1},
        0.25 * among(P, without_top(P, 0.1)) + 0.75 * P,
    ),
    "XTC below its threshold": ({"xtc_probability": 1.0, "xtc_threshold": 0.25}, P),
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution_that_the_filters_leave(backend: str, name: str) -> None:
    fields, want = CASES[name]
    rows = DRAWS // 24
    logits = np.log(P).astype(np.float32)[None].repeat(rows, 0)
    lab, counts = open_lab(backend), np.zeros(len(P))
    for seed in range(24):
        inputs = plain_inputs(rows, **{"temperature": 1.0, "seed": seed, "position": np.arange(rows), **fields})
        counts += np.bincount(draw(lab, Case((logits, inputs), {"vocab_size": len(P)}))[0].ids, minlength=len(P))
    possible = want > 0
    assert not counts[~possible].any()
    expected = want[possible] * DRAWS
    # Below the 1e-5 point of chi square for up to 8 degrees of freedom.
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 40


@pytest.mark.parametrize("backend", [name for name in HERE if name != "reference"])
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 33, 700]), st.sampled_from([0.5, 2.0**-10]), st.sampled_from([1.0, 4.0]))
def test_any_mixture_of_parameters_gives_the_reference_ids(backend: str, seed: int, vocab: int, grid: float, spread: float) -> None:
    rows = oracle.random_rows(np.random.default_rng(seed), vocab, 60, grid=grid, spread=spread)
    logits, inputs = oracle.to_arrays(rows, 2)
    got, seen = draw(open_lab(backend), Case((logits, inputs), {"vocab_size": vocab}))
    want = sample(seen, inputs, vocab_size=vocab)
    assert np.asarray(got.ids).tolist() == want.ids.tolist()
    assert np.asarray(got.top_ids).tolist() == want.top_ids.tolist()
