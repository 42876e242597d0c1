"""Grammars in the step loop of the fake model: drafts, steps that fail, devices that return early."""

from __future__ import annotations

import re
from typing import Any

import pytest
from async_device import async_model
from engine_runs import engine_of, generate, run_all
from fake_model import Fault, fake_model

from trivium.sampling import SamplingParams


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_drafts_and_failed_steps_change_no_token(kind: str) -> None:
    """On the fake model, whose ids are characters; every third step of several sequences fails once."""
    wanted = [
        SamplingParams(temperature=t, seed=4, max_tokens=40, structured_outputs={"regex": r}, n=2)
        for t in (0.0, 1.0) for r in ("(AB|CD){4,9}", "[A-C]{30}", "(A{6}|B{6})[0-9]+X", "[0-~]+")
    ]  # fmt: skip
    prompts = [[40, 5 + i, 40] for i in range(len(wanted))]
    accepted = 0
    alone = [generate(prompt, params).outputs for prompt, params in zip(prompts, wanted, strict=True)]
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 4}, {"method": "suffix", "num_speculative_tokens": 3}):
        model, steps = (async_model() if kind == "asynchronous" else fake_model()), [0]

        def hook(at: str, batch: Any, steps: list[int] = steps) -> None:
            steps[0] += at == "run" and batch.seqs > 1
            if at == "run" and batch.seqs > 1 and steps[0] % 3 == 0:
                raise Fault("every third")

        engine = engine_of(model=model, speculative=speculative)
        model.executable.hook = hook
        numbers = [engine.add_request(prompt, params) for prompt, params in zip(prompts, wanted, strict=True)]
        done = run_all(engine)
        assert [[c.token_ids for c in done[n].outputs] for n in numbers] == [[c.token_ids for c in outputs] for outputs in alone]
        assert engine.stats.failed_steps > 3
        accepted += engine.stats.accepted_tokens
    assert accepted > 10
    for outputs, params in zip(alone, wanted, strict=True):
        pattern = params.structured_outputs.regex
        assert all(re.fullmatch(pattern, c.text) for c in outputs if c.finish_reason == "stop")
