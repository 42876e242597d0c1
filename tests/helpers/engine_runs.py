"""Short ways to run an Engine on the fake model of fake_model.py."""

from __future__ import annotations

import random
from typing import Any

from fake_model import VOCAB, FakeTokenizer, fake_model
from trivium.engine import Engine, EngineConfig, RequestOutput
from trivium.sampling import SamplingParams


def greedy(count: int | None, **fields: Any) -> SamplingParams:
    """Greedy, without the model's own end."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **fields})


def prompts_of(count: int, longest: int, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def engine_of(windows: Any = (None,), *, bos_id: int | None = None, clock: Any = None, model: Any = None, **options: Any) -> Engine:
    """`options`: a drafter, those of EngineConfig, the others go to fake_model."""
    config = {k: options.pop(k) for k in list(options) if k in EngineConfig.__dataclass_fields__}
    extra = {key: value for key, value in (("clock", clock), ("drafter", options.pop("drafter", None))) if value}
    return Engine(model or fake_model(windows, **options), FakeTokenizer(bos_id), EngineConfig(**config), **extra)


def run_all(engine: Engine) -> dict[int, RequestOutput]:
    """Steps to the end, with the invariants checked after every step."""
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
    assert not engine.model.executable.violations
    return done


def run_streams(engine: Engine) -> dict[int, list[RequestOutput]]:
    """Everything that came out, by request."""
    news: dict[int, list[RequestOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            news.setdefault(output.request_id, []).append(output)
        engine.check()
    return news


def generate(prompt: list[int], params: SamplingParams, engine: Engine | None = None, **options: Any) -> RequestOutput:
    """One request alone."""
    engine = engine or engine_of(**options)
    number = engine.add_request(prompt, params)
    return run_all(engine)[number]
