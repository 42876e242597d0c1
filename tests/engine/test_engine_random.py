"""Random lives of an engine: whatever comes together, every request ends as it would alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from engine_runs import engine_of, greedy
from fake_model import EOS, VOCAB, Fault, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.engine import Engine, RequestOutput
from trivium.ops import Batch
from trivium.ops.sample import derive_seed

KINDS: list[tuple[Any, ...]] = [(None,), (None, 7), (5,), (None, "recurrent"), (None, 6, "recurrent")]


@dataclass
class Asked:
    """One request and what came back."""

    prompt: list[int]
    count: int
    n: int
    temperature: float
    seed: int
    aborted: bool = False
    output: RequestOutput | None = None

    def check(self, windows: tuple[Any, ...]) -> None:
        assert self.output is not None, "a request was lost"
        for c in self.output.outputs:
            seed = derive_seed(self.seed, c.index)
            expected = continuation(
                self.prompt, self.count, windows, ends=frozenset({EOS}), temperature=self.temperature, seed=seed
            )
            assert c.token_ids == (expected[: len(c.token_ids)] if self.aborted else expected)
            assert c.finish_reason in (("abort", "stop", "length") if self.aborted else ("stop", "length"))


def life(engine: Engine, windows: tuple[Any, ...], rng: random.Random, requests: int) -> list[Asked]:
    """Adds, steps and aborts at random until everything has ended."""
    asked: dict[int, Asked] = {}
    stem = [rng.randrange(3, VOCAB) for _ in range(30)]
    while len(asked) < requests or engine.has_unfinished():
        if len(asked) < requests and rng.random() < 0.5:
            a = Asked(
                stem[: rng.randrange(30)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9))],
                rng.randrange(1, 14), rng.choice([1, 1, 3]), rng.choice([0.0, 1.0]), rng.randrange(2**32),
            )  # fmt: skip
            params = greedy(a.count, n=a.n, temperature=a.temperature, seed=a.seed, ignore_eos=False, logit_bias=None)
            asked[engine.add_request(a.prompt, params, priority=rng.randrange(2))] = a
        if asked and rng.random() < 0.03:
            number = rng.choice(sorted(asked))
            output = engine.abort(number)
            if output is not None:
                asked[number].output, asked[number].aborted = output, True
        for output in engine.step():
            asked[output.request_id].output = output
        engine.check()
    engine.kv.check_idle()
    return list(asked.values())


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
        if last[0] > 1 and rng.random() < 0.1:
            raise Fault("one step in twenty or so")

    engine.model.executable.hook = hook
    for asked in life(engine, windows, rng, 40):
        asked.check(windows)
    assert engine.stats.failed_steps > 3
