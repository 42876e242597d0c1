"""Beam search in the engine: the plain search's outputs, whatever else runs, however little memory there is, whatever fails."""

from __future__ import annotations

import random
from typing import Any

import fake_model
import numpy as np
import pytest
from async_device import async_model
from engine_runs import engine_of, generate, greedy, prompts_of, run_all
from fake_model import EOS, Fault, continuation, logits_of, mix
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_beams import Next, Ranked, every_sequence, log_softmax, plain_search
from trivium.engine import Engine, RequestOutput
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.ops import Batch
from trivium.sampling import SamplingParams

KINDS: list[tuple[Any, ...]] = [(None,), (None, 7), (5,), (None, "recurrent"), ("recurrent",)]


def next_of(prompt: list[int], windows: tuple[Any, ...]) -> Next:
    def row(tokens: list[int]) -> np.ndarray:
        known = [*prompt, *tokens]
        return log_softmax(logits_of([mix(known if w in (None, "recurrent") else known[-w:]) for w in windows]))

    return row


def beams(width: int, count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"beam_width": width, "n": width, "max_tokens": count, **fields})


def check(output: RequestOutput, want: Ranked, *, ends: frozenset[int] = frozenset({EOS}), logprobs: int | None = None) -> None:
    assert [c.token_ids for c in output.outputs] == [tokens for _, _, tokens in want]
    assert [c.index for c in output.outputs] == list(range(len(want)))
    np.testing.assert_allclose([c.cumulative_logprob for c in output.outputs], [total for _, total, _ in want], rtol=1e-4)
    for c in output.outputs:
        assert c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length")
        assert (c.logprobs is None) is (logprobs is None)
        if c.logprobs is not None:
            assert [next(iter(row)) for row in c.logprobs] == c.token_ids
            assert all(logprobs <= len(row) <= (logprobs or 0) + 1 for row in c.logprobs)
            assert sum(row[t].logprob for row, t in zip(c.logprobs, c.token_ids)) == pytest.approx(c.cumulative_logprob)


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_the_engine_finds_what_the_plain_search_finds(windows: tuple[Any, ...], width: int, logprobs: int | None) -> None:
    prompt = prompts_of(1, 25, seed=width)[0]
    for penalty, early in ((0.0, False), (1.0, "never"), (2.0, True)):
        params = beams(width, 9, length_penalty=penalty, early_stopping=early, logprobs=logprobs, stop_token_ids=[3, 4, 5, 6, 7])
        ends = frozenset({EOS, 3, 4, 5, 6, 7})
        output = generate(prompt, params, windows=windows)
        check(output, plain_search(next_of(prompt, windows), width, ends, 9, penalty, early), ends=ends, logprobs=logprobs)
        assert all(c.stop_reason == (c.token_ids[-1] if c.token_ids[-1] in range(3, 8) else None) for c in output.outputs)


@pytest.mark.faults
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_o03_a_table_of_five_tokens(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths 2 and 4 as the plain search has it, 125 as brute force has it, and ten tokens come to an end."""
    table = np.random.default_rng(3).normal(0, 2, (5, 5)).astype(np.float32)
    tilt = np.random.default_rng(4).normal(0, 1, (20, 5)).astype(np.float32)
    monkeypatch.setattr(fake_model, "VOCAB", 5)
    monkeypatch.setattr(fake_model, "mix", lambda tokens: (len(tokens), tokens[-1]))
    monkeypatch.setattr(fake_model, "logits_of", lambda reads: table[reads[0][1]] + tilt[reads[0][0]])
    following: Next = lambda tokens: log_softmax(table[[1, *tokens][-1]] + tilt[len(tokens) + 2])
    for width in (2, 4):
        output = generate([4, 1], beams(width, 4, length_penalty=penalty))
        check(output, plain_search(following, width, {EOS}, 4, penalty))
    everything = generate([4, 1], beams(125, 3, length_penalty=penalty, early_stopping="never", n=10))
    check(everything, every_sequence(following, 5, {EOS}, 3, penalty)[:10])
    assert len(generate([4, 1], beams(4, 10, length_penalty=penalty)).outputs) == 4
    assert 1 <= len(generate([4, 1], beams(8, 1)).outputs) <= 5


def test_the_end_of_the_model_does_not_count_with_ignore_eos() -> None:
    prompt = [5, 6, 7]
    output = generate(prompt, beams(3, 8, ignore_eos=True))
    check(output, plain_search(next_of(prompt, (None,)), 3, (), 8, 1.0), ends=frozenset())


def crowd(engine: Engine, windows: tuple[Any, ...], rng: random.Random, faults: float = 0.0) -> None:
    """Beam searches among other requests, all as they would be alone."""
    last = [1]

    def hook(at: str, batch: Batch | None) -> None:
        last[0] = batch.seqs if batch is not None else last[0]
        if at != "copy" and last[0] > 1 and rng.random() < faults:
            raise Fault("now and then")

    engine.model.executable.hook = hook
    searches: dict[int, Ranked] = {}
    others: dict[int, list[int]] = {}
    for prompt in prompts_of(4, 16, seed=rng.randrange(1000)):
        width, count, n = rng.randrange(1, 6), rng.randrange(1, 10), rng.randrange(1, 4)
        number = engine.add_request(prompt, beams(width, count, n=1), priority=rng.randrange(2))
        searches[number] = plain_search(next_of(prompt, windows), width, {EOS}, count, 1.0)[:1]
        number = engine.add_request(prompt, greedy(count, n=n), priority=rng.randrange(2))
        others[number] = continuation(prompt, count, windows)
    done = run_all(engine)
    for number, want in searches.items():
        check(done[number], want)
    for number, tokens in others.items():
        assert all(c.token_ids == tokens for c in done[number].outputs)
    engine.kv.check_idle()


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(20, 120), st.integers(1, 9), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_in_a_crowd_with_few_seats_and_pages_everybody_gets_their_own(
    windows: tuple[Any, ...], seed: int, pages: int, seqs: int, budget: int, caching: bool
) -> None:
    engine = engine_of(windows, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    crowd(engine, windows, random.Random(seed))


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_one_step_in_ten_fails_and_nothing_changes(windows: tuple[Any, ...], seed: int) -> None:
    engine = engine_of(windows, pages=60, max_num_seqs=6, max_num_batched_tokens=24)
    crowd(engine, windows, random.Random(seed), faults=0.1)


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(20, 120), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_on_a_device_that_runs_ahead(windows: tuple[Any, ...], seed: int, pages: int, seqs: int) -> None:
    engine = engine_of(model=async_model(windows, pages=pages), max_num_seqs=seqs, max_num_batched_tokens=24)
    crowd(engine, windows, random.Random(seed))


def test_a_pool_that_holds_one_beam_at_a_time_still_gives_all() -> None:
    engine, prompt = engine_of(pages=6, max_num_seqs=8), [9] * 13
    number = engine.add_request(prompt, beams(4, 10))
    check(run_all(engine)[number], plain_search(next_of(prompt, (None,)), 4, {EOS}, 10, 1.0))
    assert engine.stats.preemptions


@pytest.mark.parametrize("windows", [(5, None, 5), (None, "recurrent", "recurrent", "recurrent")])
def test_searches_that_wait_for_their_beams_make_way_in_every_pool_that_holds_one(windows: tuple[Any, ...]) -> None:
    """In a full pool a beam may wait behind an earlier request's, which has no room while the later one's siblings sit there."""
    prompts = [[3 + 7 * i * n % 20 for i in range(n)] for n in (1, 3, 4, 5, 8, 9, 11, 2)]
    want = [plain_search(next_of(prompt, windows), 3, set(), 7, 1.0) for prompt in prompts]
    least = engine_of(windows).kv.peak_pages(11 + 7)
    for pages in range(least, least + 10):
        for seqs in (3, 4, 8):
            engine = engine_of(windows, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=8, enable_prefix_caching=False)
            numbers = [engine.add_request(prompt, beams(3, 7, ignore_eos=True)) for prompt in prompts]
            done = run_all(engine)
            for number, ranked in zip(numbers, want, strict=True):
                check(done[number], ranked, ends=frozenset())


@pytest.mark.parametrize("steps", range(6))
def test_an_aborted_search_gives_what_it_has_and_frees_everything(steps: int) -> None:
    engine = engine_of((None, "recurrent"))
    number = engine.add_request([5] * 9, beams(3, 9, n=2, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    output = engine.abort(number)
    assert output is not None and output.finished
    made = max(steps - 1, 0)  # the first step ends at a page edge within the prompt
    assert [len(c.token_ids) for c in output.outputs] == [made] * (2 if made else 1)
    assert {c.finish_reason for c in output.outputs} == {"abort"}
    engine.check()
    engine.kv.check_idle()


def test_a_search_that_fails_twice_ends_with_an_error() -> None:
    engine = engine_of()
    number = engine.add_request([5] * 20, beams(3, 9))
    other = engine.add_request([6] * 9, greedy(6))

    def hook(at: str, batch: Batch | None) -> None:
        if batch is not None and (batch.positions == 22).any():
            raise Fault("down")

    engine.model.executable.hook = hook
    done = run_all(engine)
    assert {c.finish_reason for c in done[number].outputs} == {"error"} and done[number].error is not None
    assert done[other].outputs[0].token_ids == continuation([6] * 9, 6, (None,))
    engine.kv.check_idle()


def test_live_beams_share_the_prompt() -> None:
    engine, prompt = engine_of(enable_prefix_caching=False), [5 + i % 80 for i in range(40)]
    engine.add_request(prompt, beams(6, 9, ignore_eos=True))
    for step in range(8):
        engine.step()
        alive = len(engine.scheduler.running)
        used = engine.kv.pool.pages - engine.kv.pool.available
        assert used <= 10 + alive * -(-step // 4)
    assert engine.stats.computed_tokens == 40 + 7 * 6


def test_metrics_tell_when_tokens_were_made() -> None:
    clock = fake_model.Clock()
    engine = engine_of(clock=clock)
    engine.model.executable.hook = lambda at, batch: setattr(clock, "now", clock.now + (at == "run"))
    number = engine.add_request([5] * 6, beams(3, 5, ignore_eos=True))
    m = run_all(engine)[number].metrics
    assert m is not None and (m.time_to_first_token, m.decode_time, m.mean_itl, m.e2e_time) == (1.0, 4.0, 1.0, 5.0)


def test_prompt_logprobs_come_with_beams() -> None:
    a, b = (generate([5, 6, 7, 8], SamplingParams(max_tokens=3, prompt_logprobs=2, beam_width=w)) for w in (None, 2))
    assert a.prompt_logprobs == b.prompt_logprobs


def test_beams_are_not_streamed() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match="nothing to stream") as refused:
        engine.add_request([5], beams(2, 3), stream=True)
    assert refused.value.param == "stream" and not engine.has_unfinished()


def test_a_backend_without_logprobs_has_no_beams() -> None:
    engine = engine_of()
    engine.model.capabilities = type(engine.model.capabilities)(("float32",), (), ("float32",), sampling=frozenset({"temperature"}))
    with pytest.raises(UnsupportedError, match="logprobs"):
        engine.add_request([5], beams(2, 3))
    assert not engine.has_unfinished()
