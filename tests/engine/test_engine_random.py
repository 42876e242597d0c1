"""Random lives of an engine: whatever comes together, every request ends as it would alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_runs import engine_of
from fake_model import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from random_lives import KINDS, life
from trivium.ops import Batch


@given(
    st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(48, 140), st.integers(1, 9), st.integers(1, 40), st.booleans()
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_life_gives_every_request_its_own_tokens(
    windows: tuple[Any, ...], seed: int, pages: int, seqs: int, budget: int, caching: bool
) -> None:
    engine = engine_of(windows, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for asked in life(engine, windows, random.Random(seed), 10):
        asked.check(windows)
    assert not engine.model.executable.violations


@pytest.mark.parametrize("windows", KINDS)
def test_faults_that_pass_change_no_token(windows: tuple[Any, ...]) -> None:
    rng = random.Random(50)
    engine = engine_of(windows, pages=90, max_num_seqs=6, max_num_batched_tokens=30)
    last = [1]

    def hook(at: str, batch: Batch | None) -> None:
        last[0] = batch.seqs if batch is not None else last[0]
        if at != "copy" and last[0] > 1 and rng.random() < 0.1:  # copies come before it is known how many run
            raise Fault("one step in twenty or so")

    engine.model.executable.hook = hook
    for asked in life(engine, windows, rng, 40):
        asked.check(windows)
    assert engine.stats.failed_steps > 3
