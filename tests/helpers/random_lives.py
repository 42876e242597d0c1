"""Random lives of an engine on the fake model, and what must come of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from engine_runs import greedy
from fake_model import EOS, VOCAB, continuation
from trivium.engine import Engine, RequestOutput
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


def life(engine: Engine, windows: tuple[Any, ...], rng: random.Random, requests: int, stems: int = 1) -> list[Asked]:
    """Adds, steps and aborts at random until everything has ended. Prompts begin with some of one of `stems` texts."""
    asked: dict[int, Asked] = {}
    beginnings = [[rng.randrange(3, VOCAB) for _ in range(30)] for _ in range(stems)]
    while len(asked) < requests or engine.has_unfinished():
        if len(asked) < requests and rng.random() < 0.5:
            stem = beginnings[rng.randrange(stems)]
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
