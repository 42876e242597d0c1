"""The engine gives each request the tokens that it would get alone, whatever else runs and however little memory there is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_model import EOS, VOCAB, FakeTokenizer, continuation, fake_model
from trivium.engine import Engine, EngineConfig, RequestOutput
from trivium.sampling import SamplingParams

KINDS: dict[str, tuple[Any, ...]] = {
    "full": (None,), "window": (None, 9, 9), "windows only": (5, 12), "recurrent": (None, "recurrent"), "state only": ("recurrent",),
}  # fmt: skip


def greedy(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **fields})


def prompts_of(count: int, longest: int, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run_all(engine: Engine) -> dict[int, RequestOutput]:
    """Steps to the end, invariants checked after every step."""
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.check()
    assert not engine.model.executable.violations
    return done


def pages_needed(prompts: list[list[int]], count: int, windows: tuple[Any, ...]) -> int:
    """Pages of 4 tokens that all requests together would take."""
    return sum(1 if w == "recurrent" else (len(p) + count + 3) // 4 for p in prompts for w in windows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [2048, 64, 16])
@pytest.mark.parametrize("share", [1, 4])
def test_32_unequal_requests_together_give_what_each_gives_alone(kind: str, budget: int, share: int) -> None:
    prompts, windows = prompts_of(32, 60), KINDS[kind]
    model = fake_model(windows, pages=pages_needed(prompts, 12, windows) // share)
    engine = Engine(model, FakeTokenizer(), EngineConfig(max_num_seqs=24, max_num_batched_tokens=budget))
    ids = [engine.add_request(p, greedy(12)) for p in prompts]
    done = run_all(engine)
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 12, windows)
        assert done[number].outputs[0].finish_reason == "length"
    assert engine.stats.generated_tokens == 32 * 12
    assert max(b.tokens for b in model.executable.batches) <= budget
    if (kind, budget, share) == ("full", 2048, 4):
        assert engine.stats.preemptions == sum(done[i].metrics.num_preemptions for i in ids) > 0


def test_end_tokens_end_an_output() -> None:
    engine = Engine(fake_model(), FakeTokenizer())
    prompts = prompts_of(40, 30)
    ids = [engine.add_request(p, greedy(60, ignore_eos=False)) for p in prompts]
    done = run_all(engine)
    reasons = {done[i].outputs[0].finish_reason for i in ids}
    assert reasons == {"stop", "length"}
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 60, (None,), ends=frozenset({EOS}))
