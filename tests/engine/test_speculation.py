"""Speculation: whatever the drafts, outputs are those of an engine without them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from async_device import AsyncDevice
from drafters import Knowing
from engine_runs import engine_of, generate, greedy, prompts_of, run_all, run_streams
from fake_model import EOS, VOCAB, Clock, Fault, fake_model, logits_of, mix
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.engine import Engine, RequestOutput
from trivium.engine.speculation.drafter import Speculative
from trivium.engine.speculation.model import ModelDrafter
from trivium.errors import InvalidRequestError
from trivium.sampling import SamplingParams

KINDS: list[tuple[Any, ...]] = [(None,), (None, 7), (5,), (None, 6, 3), (None, "recurrent"), ("recurrent",), (6, "recurrent")]
ALWAYS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


def params_of(rng: random.Random) -> SamplingParams:
    """Any parameters: each field is at its default half of the time."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.5]), "top_k": rng.choice([1, 3, 20]), "top_p": rng.choice([0.3, 0.9]),
        "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.4, "n": rng.choice([1, 2, 3]),
        "logit_bias": {rng.randrange(3, VOCAB): rng.choice([-3.0, 6.0]) for _ in range(3)}, "min_tokens": rng.randrange(5),
        "allowed_token_ids": [EOS, *rng.sample(range(3, VOCAB), 12)], "bad_words": [chr(48 + rng.randrange(3, VOCAB))],
        "logprobs": rng.randrange(4), "prompt_logprobs": 1, "stop": [chr(48 + rng.randrange(3, VOCAB)) for _ in range(3)],
        "stop_token_ids": rng.sample(range(3, VOCAB), 3), "ignore_eos": True, "include_stop_str_in_output": True,
    }  # fmt: skip
    chosen = {name: value for name, value in fields.items() if rng.random() < 0.5}
    return SamplingParams(**{"temperature": 1.0, "max_tokens": rng.randrange(5, 24), "seed": rng.randrange(2**32), **chosen})


def seen(output: RequestOutput) -> Any:
    return [
        (c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs, c.cumulative_logprob) for c in output.outputs
    ], output.prompt_logprobs


def requests_of(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    stem = [rng.randrange(3, VOCAB) for _ in range(20)]
    return [(stem[: rng.randrange(20)] + [rng.randrange(3, VOCAB)] * rng.randrange(1, 6), params_of(rng)) for _ in range(count)]


def streams_of(requests: Any, windows: Any) -> tuple[list[Any], list[list[int]]]:
    """What each request gives alone without speculation, and its whole token streams."""
    alone = [generate(prompt, params, windows=windows) for prompt, params in requests]
    return [seen(o) for o in alone], [prompt + c.token_ids for (prompt, _), o in zip(requests, alone) for c in o.outputs]


@given(
    st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(60, 140), st.integers(1, 6), st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 9), st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_any_drafts_change_nothing_in_any_life(
    windows: Any, seed: int, pages: int, seqs: int, budget: int, quality: float, length: int, faulty: bool
) -> None:
    rng = random.Random(seed)
    requests = requests_of(rng, 6)
    expected, streams = streams_of(requests, windows)
    engine = engine_of(
        windows, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget, drafter=Knowing(streams, quality),
        speculative={**ALWAYS, "num_speculative_tokens": length},
    )  # fmt: skip
    if faulty:
        engine.model.executable.hook = some_fail(rng)
    numbers = [engine.add_request(prompt, params, priority=rng.randrange(2)) for prompt, params in requests]
    aborted = {n: engine.abort(n) for n in numbers if rng.random() < 0.1}
    done = run_all(engine)
    for number, want in zip(numbers, expected):
        if number not in aborted:
            assert seen(done[number]) == want
    engine.kv.check_idle()
    assert not engine.model.executable.violations


def some_fail(rng: random.Random) -> Any:
    """A hook that makes one step in twenty fail, and never one of a sequence alone."""
    last = [1]

    def hook(at: str, batch: Any) -> None:
        last[0] = batch.seqs if batch is not None else last[0]
        if at != "copy" and last[0] > 1 and rng.random() < 0.05:
            raise Fault("this step fails")

    return hook


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_looked_up_drafts_change_nothing_and_some_come_true(method: str) -> None:
    # with temperature 0 and a window of one token the model runs in circles, which lookups find
    plain, fast = (engine_of((1,), speculative=s) for s in (None, {**ALWAYS, "method": method}))
    for engine in (plain, fast):
        for prompt in prompts_of(8, 30):
            engine.add_request(prompt, greedy(60))
    assert {n: seen(o) for n, o in run_all(fast).items()} == {n: seen(o) for n, o in run_all(plain).items()}
    assert fast.stats.accepted_tokens > 200 and fast.stats.steps < plain.stats.steps


def test_right_drafts_save_steps_and_wrong_ones_none() -> None:
    prompt = [5, 6, 7]
    [(_, ids, *_)], _ = seen(generate(prompt, greedy(21)))
    for quality, steps, accepted in ((1.0, 5, 16), (0.0, 21, 0)):
        engine = engine_of(drafter=Knowing([prompt + ids], quality), speculative=ALWAYS)
        output = generate(prompt, greedy(21), engine)
        assert output.outputs[0].token_ids == ids
        assert (engine.stats.steps, engine.stats.accepted_tokens, engine.stats.generated_tokens) == (steps, accepted, 21)
        assert output.metrics is not None
        assert (output.metrics.num_accepted_tokens, output.metrics.num_draft_tokens) == (accepted, engine.stats.draft_tokens)
    assert engine.stats.draft_tokens == 4 * 16 + 3 + 2 + 1  # never past max_tokens
    assert engine.stats.accepted_by_position == [0] * 4


def test_a_stream_of_drafted_tokens_is_the_output_in_pieces() -> None:
    prompt, params = [9, 8, 7], greedy(30, logprobs=1, stop=["~never~"])
    whole = generate(prompt, params).outputs[0]
    engine = engine_of(drafter=Knowing([prompt + whole.token_ids], 0.8), speculative=ALWAYS)
    number = engine.add_request(prompt, params, stream=True)
    pieces = [o.outputs[0] for o in run_streams(engine)[number]]
    assert "".join(p.text for p in pieces) == whole.text and [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [one for p in pieces for one in p.logprobs or ()] == whole.logprobs and len(pieces) < 30


def test_drafts_never_preempt_anybody() -> None:
    # 4 sequences of 3 prompt tokens and 12 more take 4 pages each: just enough, but for drafts nothing is to spare at the end
    engine = engine_of(pages=16, page_size=4, drafter=Knowing(), speculative=ALWAYS, max_num_seqs=4)
    for i in range(4):
        engine.add_request([i + 3] * 4, greedy(12))
    run_all(engine)
    assert engine.stats.preemptions == 0 and engine.stats.draft_tokens > 0


def test_drafts_stay_within_the_token_budget() -> None:
    drafter = Knowing()
    engine = engine_of(
        drafter=drafter, speculative={**ALWAYS, "num_speculative_tokens": 9}, max_num_batched_tokens=7, max_num_seqs=5
    )
    for i in range(5):
        engine.add_request([i + 3], greedy(20))
    run_all(engine)
    assert max(batch.tokens for batch in engine.model.executable.batches) == 7 and max(drafter.asks) == 2


def test_the_drafter_hears_of_every_end() -> None:
    drafter = Knowing()
    engine = engine_of(pages=12, drafter=drafter, speculative=ALWAYS)
    for prompt in prompts_of(6, 12):
        engine.add_request(prompt, greedy(20))
    number = engine.add_request([3, 4, 5], greedy(20))
    engine.step()
    engine.abort(number)
    run_all(engine)
    assert drafter.ended == 7 and engine.stats.preemptions > 0


def test_rejected_drafts_keep_no_pages() -> None:
    engine = engine_of(page_size=2, drafter=Knowing(quality=0.0), speculative=ALWAYS)
    engine.add_request([5, 6, 7], greedy(20))
    while engine.has_unfinished():
        engine.step()
        assert all(seq.blocks == engine.kv.blocks(seq.computed) for seq in engine.scheduler.running)
    assert engine.stats.draft_tokens > 0


def test_a_drafter_that_raises_costs_its_drafts_and_in_the_end_its_place() -> None:
    class Failing(Knowing):
        def propose(self, asks: Any) -> Any:
            super().propose(asks)
            raise Fault("no idea")

    drafter = Failing()
    engine = engine_of(drafter=drafter, speculative=ALWAYS)
    want = generate([5, 6], greedy(20)).outputs[0].token_ids
    assert generate([5, 6], greedy(20), engine).outputs[0].token_ids == want
    assert engine.stats.failed_drafts == len(drafter.asks) == 3 and engine.stats.failed_steps == 0


def test_drafts_that_no_model_could_take_cost_a_step_and_nobody_an_answer() -> None:
    class Absurd(Knowing):
        def propose(self, asks: Any) -> Any:
            return [[VOCAB + 5] * ask.limit for ask in asks]

    def hook(at: str, batch: Any) -> None:
        if batch is not None and batch.token_ids.max() >= VOCAB:
            raise IndexError("no such token")

    engine = engine_of(drafter=Absurd(), speculative=ALWAYS)
    engine.model.executable.hook = hook
    want = generate([5, 6], greedy(9)).outputs[0].token_ids
    assert generate([5, 6], greedy(9), engine).outputs[0].token_ids == want and engine.stats.failed_steps > 0


@pytest.mark.parametrize(("quality", "step_seconds", "row_seconds", "low", "high"), [
    (1.0, 1.0, 0.1, 150, 200),  # cheap and right: nearly all tokens are drafted
    (0.0, 1.0, 0.3, 1, 40),  # never right: tried now and then
    (1.0, 1.0, 2.0, 0, 60),  # right and dearer than what they save
    (0.0, 1.0, 0.0, 400, 800),  # for free: why not
])  # fmt: skip
def test_drafts_are_as_long_as_measured_times_and_acceptance_make_worth_while(
    quality: float, step_seconds: float, row_seconds: float, low: int, high: int
) -> None:
    clock, prompt = Clock(), [5, 6, 7]
    ids = generate(prompt, greedy(200)).outputs[0].token_ids
    engine = engine_of(drafter=Knowing([prompt + ids], quality), clock=clock, speculative={**ALWAYS, "adaptive": True})

    def hook(at: str, batch: Any) -> None:
        if batch is not None:
            clock.now += step_seconds + row_seconds * (batch.tokens - 1)

    engine.model.executable.hook = hook
    assert generate(prompt, greedy(200), engine).outputs[0].token_ids == ids
    assert low <= engine.stats.draft_tokens <= high
    plain = step_seconds * 200
    assert clock.now <= plain * (0.6 if low == 150 else 1.05)


def test_a_slow_drafter_is_asked_rarely() -> None:
    class Slow(Knowing):
        def propose(self, asks: Any) -> Any:
            clock.now += 3.0
            return super().propose(asks)

    clock, prompt = Clock(), [5, 6, 7]
    ids = generate(prompt, greedy(200)).outputs[0].token_ids
    drafter = Slow([prompt + ids])
    engine = engine_of(drafter=drafter, clock=clock, speculative={**ALWAYS, "adaptive": True, "num_speculative_tokens": 1})
    engine.model.executable.hook = lambda at, batch: setattr(clock, "now", clock.now + 0.5)
    generate(prompt, greedy(200), engine)
    assert len(drafter.asks) < 12 and engine.stats.draft_seconds == 3.0 * len(drafter.asks)


def test_the_distribution_stays_the_targets() -> None:
    """Chi-square over pairs of tokens drawn in rows behind drafts, against the exact probabilities of a Markov chain."""
    ids = [10, 20, 30, 40]
    p = np.exp([logits_of([mix([t])])[ids].astype(np.float64) / 1.5 for t in ids])
    p /= p.sum(axis=1, keepdims=True)

    class Guessing(Knowing):
        def propose(self, asks: Any) -> Any:
            return [[self._rng.choice(ids) for _ in range(ask.limit)] for ask in asks]

    engine = engine_of((1,), drafter=Guessing(), pages=20000, speculative=ALWAYS, max_num_seqs=400, max_num_batched_tokens=2000)
    numbers = [
        engine.add_request(
            [5, 10], SamplingParams(n=10, temperature=1.5, seed=i, max_tokens=5, allowed_token_ids=ids, ignore_eos=True)
        )
        for i in range(300)
    ]
    done = run_all(engine)
    outputs = [[ids.index(t) for t in c.token_ids] for n in numbers for c in done[n].outputs]
    start = p[0] @ p  # of the second token; the first is drawn without drafts
    expected = len(outputs) * start[:, None] * p
    observed = np.zeros((4, 4))
    for o in outputs:
        observed[o[1], o[2]] += 1
    assert engine.stats.accepted_tokens > 500
    assert ((observed - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, p = 0.001


def drafting(model: Any, draft: Any, **options: Any) -> tuple[Engine, ModelDrafter]:
    drafter = ModelDrafter(draft, 8, 16)
    options = {"adaptive": False, "num_speculative_tokens": 4, **options}
    config = Speculative(method="draft", model="given", **options)
    return engine_of(model=model, drafter=drafter, speculative=config, max_num_seqs=8), drafter


@pytest.mark.parametrize("windows", KINDS)
def test_a_draft_model_that_thinks_alike_is_always_right_at_any_temperature(windows: Any) -> None:
    rng = random.Random(3)
    requests = [(prompt, SamplingParams(temperature=t, seed=rng.randrange(99), max_tokens=21, ignore_eos=True))
                for prompt, t in zip(prompts_of(8, 60), [0.0, 0.5, 1.0, 2.0] * 2)]  # fmt: skip
    expected, _ = streams_of(requests, windows)
    engine, drafter = drafting(fake_model(windows), fake_model(windows, page_size=8))
    numbers = [engine.add_request(*request) for request in requests]
    done = run_all(engine)
    assert [seen(done[n]) for n in numbers] == expected
    assert engine.stats.accepted_tokens == engine.stats.draft_tokens == 16 * 8
    assert not drafter._model.executable.violations
    drafter._kv.check_idle()


@given(
    st.sampled_from(KINDS), st.sampled_from([(3,), (3, "recurrent"), ("recurrent",)]), st.integers(0, 2**32), st.integers(4, 60),
    st.integers(60, 140),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_a_draft_model_that_thinks_otherwise_changes_nothing(
    windows: Any, thinks: Any, seed: int, draft_pages: int, pages: int
) -> None:
    rng = random.Random(seed)
    requests = requests_of(rng, 6)
    expected, _ = streams_of(requests, windows)
    engine, drafter = drafting(fake_model(windows, pages=pages), fake_model(thinks, page_size=2, pages=draft_pages))
    numbers = [engine.add_request(prompt, params, priority=rng.randrange(2)) for prompt, params in requests]
    failing = some_fail(rng)
    engine.model.executable.hook = drafter._model.executable.hook = failing
    done = run_all(engine)
    assert [seen(done[n]) for n in numbers] == expected
    drafter._kv.check_idle()
    assert not drafter._model.executable.violations


def test_preempted_sequences_give_their_draft_pages_back() -> None:
    engine, drafter = drafting(fake_model(pages=12), fake_model(pages=400))
    for prompt in prompts_of(6, 12):
        engine.add_request(prompt, greedy(20))
    preempted = 0
    while engine.has_unfinished():
        engine.step()
        if engine.stats.preemptions == preempted:  # no drafts in a step that preempts
            assert all(seq.running for seq in drafter._lanes)
        preempted = engine.stats.preemptions
    assert preempted > 0 and engine.stats.draft_tokens > 0
    drafter._kv.check_idle()


def test_an_asynchronous_device_waits_for_what_is_drafted() -> None:
    prompt = [5, 6, 7]
    ids = generate(prompt, greedy(30)).outputs[0].token_ids
    model, clock = fake_model(), Clock()
    device = AsyncDevice(model, clock)
    engine = engine_of(model=model, clock=clock, drafter=Knowing([prompt + ids], 0.7), speculative=ALWAYS)
    engine.add_request(prompt, greedy(30))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == ids and engine.stats.steps < 30
    assert not device.inner.violations


def test_sequences_without_draft_pages_go_on_without_drafts() -> None:
    engine, drafter = drafting(fake_model(), fake_model(pages=3, page_size=4))
    wants = []
    for prompt in ([3, 4, 5], [6, 7, 8], list(range(3, 40))):
        wants.append(generate(prompt, greedy(8)).outputs[0].token_ids)
        engine.add_request(prompt, greedy(8))
    done = run_all(engine)
    assert [done[n].outputs[0].token_ids for n in sorted(done)] == wants
    assert 0 < engine.stats.draft_tokens < 14
    drafter._kv.check_idle()


def test_what_can_not_be_is_refused() -> None:
    for wrong, part in [
        ({"method": "medusa"}, "ngram, suffix, draft"), ({}, "method"), ("ngram", "mapping"),
        ({"method": "ngram", "size": 3}, "num_speculative_tokens"), ({"method": "ngram", "num_speculative_tokens": 0}, "1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_max"), ({"method": "draft"}, "draft model"),
        ({"method": "ngram", "model": "x"}, "draft model"), ({"method": "ngram", "adaptive": 1}, "True or False"),
        ({"method": "draft", "model": "x"}, "loaded draft model"),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequestError, match=part) as raised:
            engine_of(speculative=wrong)
        assert raised.value.param == "speculative"
