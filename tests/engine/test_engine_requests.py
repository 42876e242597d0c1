"""What a request may ask and what it gets: the door, ends, logprobs, streams, the clock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from engine_runs import engine_of, generate, greedy, prompts_of, run_all, run_streams
from fake_model import EOS, VOCAB, Clock, FakeTokenizer, continuation, logits_of, mix
from trivium.engine import EngineConfig
from trivium.errors import CapacityError, ContextLengthError, InvalidRequestError, UnsupportedError
from trivium.plugin.contract import Capabilities
from trivium.sampling import SamplingParams

TEXT = FakeTokenizer()
PLAIN = next([7, n] for n in range(3, VOCAB) if min(continuation([7, n], 20, (None,))) > 2)
"""A prompt that no special token follows."""


def log_softmax(tokens: list[int]) -> np.ndarray:
    logits = logits_of([mix(tokens)]).astype(np.float64)
    return logits - math.log(np.exp(logits).sum())


@pytest.mark.faults
@pytest.mark.parametrize("prompt", [[-1], [VOCAB], [2**63], [1.5], [True], [3, -3], ["a"]])
def test_o02_ids_outside_the_vocabulary_are_refused_before_anything_changes(prompt: list[Any]) -> None:
    engine = engine_of()
    other = engine.add_request([3, 4, 5], greedy(5))
    with pytest.raises(InvalidRequestError, match="out of the vocabulary"):
        engine.add_request(prompt, greedy(5))
    engine.check()
    assert run_all(engine)[other].outputs[0].token_ids == continuation([3, 4, 5], 5, (None,))


@pytest.mark.faults
def test_o06_any_mixture_of_top_k_runs_in_one_batch() -> None:
    engine, prompt = engine_of(), [9, 8, 7]
    sets = [(1.0, 9_999_999), (0.0, 0), (1.0, 1), (1.0, -1)]
    ids = [engine.add_request(prompt, greedy(12, seed=4, temperature=t, top_k=k)) for t, k in sets]
    done = run_all(engine)
    everything, best, only_best, off = (done[i].outputs[0].token_ids for i in ids)
    assert best == only_best == continuation(prompt, 12, (None,))
    assert everything == off == continuation(prompt, 12, (None,), temperature=1.0, seed=4) != best


@pytest.mark.faults
def test_o07_stop_token_ids_outside_the_vocabulary_are_refused_and_the_neighbour_is_untouched() -> None:
    engine = engine_of()
    other = engine.add_request([3, 4, 5], greedy(9))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        engine.add_request([3, 4], greedy(9, stop_token_ids=[VOCAB + 10], min_tokens=4))
    assert run_all(engine)[other].outputs[0].text == TEXT.text(continuation([3, 4, 5], 9, (None,)))


@pytest.mark.faults
def test_o09_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    params, expected = greedy(16, temperature=0.8, seed=42), continuation([5, 6], 16, (None,), temperature=0.8, seed=42)
    for neighbours in ([], [None], [7], [None, 8]):
        for before in (True, False):
            engine = engine_of()
            first = [engine.add_request([9], greedy(16, temperature=0.8, seed=s)) for s in neighbours if before]
            number = engine.add_request([5, 6], params)
            first += [engine.add_request([9], greedy(16, temperature=0.8, seed=s)) for s in neighbours if not before]
            assert run_all(engine)[number].outputs[0].token_ids == expected


def test_unseeded_requests_differ_and_repeat_with_the_seed_of_the_engine() -> None:
    def outputs(seed: int | None) -> list[list[int]]:
        engine = engine_of(seed=seed)
        ids = [engine.add_request([5, 6], greedy(16, temperature=1.0)) for _ in range(3)]
        done = run_all(engine)
        return [done[i].outputs[0].token_ids for i in ids]

    assert outputs(1) == outputs(1) != outputs(2)
    assert outputs(None) != outputs(None)
    assert len(set(map(tuple, outputs(1)))) == 3


@pytest.mark.faults
@pytest.mark.parametrize("bos_id", [None, 1])
def test_o20_an_empty_prompt_begins_with_bos_or_is_refused(bos_id: int | None) -> None:
    engine = engine_of(bos_id=bos_id)
    other = engine.add_request([3, 4, 5], greedy(5))
    if bos_id is None:
        with pytest.raises(InvalidRequestError, match="empty"):
            engine.add_request([], greedy(5))
        done = run_all(engine)
    else:
        number = engine.add_request([], greedy(5))
        done = run_all(engine)
        assert done[number].prompt_token_ids == [1]
        assert done[number].outputs[0].token_ids == continuation([1], 5, (None,))
    assert done[other].outputs[0].token_ids == continuation([3, 4, 5], 5, (None,))


@pytest.mark.faults
def test_o21_output_does_not_depend_on_the_chunk_and_no_event_comes_before_the_first_token() -> None:
    prompts = [[(i * 7 + n) % 80 + 3 for i in range(n)] for n in (15, 16, 17, 31, 32, 33, 48)]
    params = greedy(12, logprobs=2, prompt_logprobs=1)
    results = []
    for budget in (16, 2048):
        engine = engine_of((None, 6), max_num_batched_tokens=budget)
        ids = [engine.add_request(p, params, stream=True) for p in prompts]
        news = run_streams(engine)
        assert all(o.outputs[0].token_ids for i in ids for o in news[i]), "an event without a token"
        results.append([([t for o in news[i] for t in o.outputs[0].token_ids], news[i][-1].prompt_logprobs) for i in ids])
        assert [tokens for tokens, _ in results[-1]] == [continuation(p, 12, (None, 6)) for p in prompts]
    assert results[0] == results[1]


@pytest.mark.faults
def test_o22_two_live_requests_with_one_client_id_do_not_meet() -> None:
    engine = engine_of()
    a, b = (engine.add_request([3, n], greedy(8), stream=True, client_id="same") for n in (4, 5))
    assert a != b
    engine.step()
    ended = engine.abort(a)
    assert ended is not None and ended.client_id == "same" and ended.outputs[0].finish_reason == "abort"
    news = run_streams(engine)
    assert list(news) == [b] and news[b][-1].client_id == "same"
    assert engine.abort(a) is None


@pytest.mark.faults
@pytest.mark.parametrize(
    ("length", "max_tokens", "made"),
    [(62, 0, 0), (62, 1, 1), (62, 2, 2), (62, None, 2), (63, 0, 0), (63, 1, 1), (63, 2, None), (63, None, 1), (64, 0, 0),
     (64, 1, None), (64, None, None), (65, 0, None), (65, 1, None), (65, None, None)],
)  # fmt: skip
def test_o23_prompt_and_output_together_may_fill_the_context_exactly(length: int, max_tokens: int | None, made: int | None) -> None:
    engine, prompt = engine_of(max_model_len=64), [5] * length
    params = greedy(max_tokens, prompt_logprobs=0 if max_tokens == 0 else None)
    if made is None:
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.* 64;"):
            engine.add_request(prompt, params)
        return
    output = generate(prompt, params, engine)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (made, "length")
    if max_tokens == 0:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length


@pytest.mark.faults
def test_o17_scoring_makes_no_token_and_gives_every_prompt_token_its_logprob() -> None:
    prompt = prompts_of(1, 60, seed=17)[0]
    engine = engine_of(max_num_batched_tokens=7, max_num_seqs=5)
    numbers = [engine.add_request(prompt, greedy(0, prompt_logprobs=2)) for _ in range(2)]
    done = run_all(engine)
    for number in numbers:
        output = done[number]
        assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("", [], "length")
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            entry, expected = output.prompt_logprobs[i], log_softmax(prompt[:i])
            assert entry is not None and next(iter(entry)) == prompt[i]
            assert entry[prompt[i]].logprob == pytest.approx(expected[prompt[i]], abs=1e-4)
            assert entry[prompt[i]].rank == 1 + int((expected > expected[prompt[i]]).sum())
            assert set(np.argsort(-expected)[:2].tolist()) <= set(entry)
    assert done[numbers[0]].metrics.time_to_first_token is None


@pytest.mark.faults
@pytest.mark.parametrize("top", [0, 1, 3, -1])
def test_o11_o12_every_token_has_its_logprob_and_exactly_the_alternatives_asked_for(top: int) -> None:
    prompt = [4, 5, 6]
    output = generate(prompt, greedy(12, logprobs=top)).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 12
    tokens = list(prompt)
    for token, entry in zip(output.token_ids, output.logprobs):
        expected = log_softmax(tokens)
        count = VOCAB if top < 0 else max(top, 1)
        assert list(entry) == np.argsort(-expected, kind="stable")[:count].tolist()
        assert [e.rank for e in entry.values()] == list(range(1, count + 1))
        assert [e.logprob for e in entry.values()] == pytest.approx([expected[i] for i in entry], abs=1e-4)
        assert entry[token].decoded_token == TEXT.token_text(token)
        tokens.append(token)
    total = sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids))
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.faults
@pytest.mark.parametrize(("start", "length"), [(0, 1), (3, 3), (5, 4), (19, 1)])
@pytest.mark.parametrize("include", [False, True])
def test_o13_o14_text_ends_before_the_stop_and_nothing_of_it_is_streamed(start: int, length: int, include: bool) -> None:
    prompt, whole = PLAIN, TEXT.text(continuation(PLAIN, 20, (None,)))
    stop = whole[start : start + length]
    end = whole.index(stop)
    params = greedy(20, stop=[stop, "never"], include_stop_str_in_output=include)
    output = generate(prompt, params).outputs[0]
    engine = engine_of()
    number = engine.add_request(prompt, params, stream=True)
    news = run_streams(engine)[number]
    assert "".join(o.outputs[0].text for o in news) == output.text == whole[: end + (length if include else 0)]
    assert [t for o in news for t in o.outputs[0].token_ids] == output.token_ids
    assert (output.finish_reason, output.stop_reason) == ("stop", stop) == (news[-1].outputs[0].finish_reason, stop)
    assert len(output.token_ids) == end + length


def test_stop_token_ids_and_the_end_token_say_what_ended_the_output() -> None:
    tokens = continuation(PLAIN, 20, (None,))
    stopped = generate(PLAIN, greedy(20, stop_token_ids=[tokens[6]])).outputs[0]
    assert stopped.token_ids == tokens[: tokens.index(tokens[6]) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", tokens[6])
    assert stopped.text == TEXT.text(stopped.token_ids[:-1])
    shown = generate(PLAIN, greedy(20, stop_token_ids=[tokens[6]], include_stop_str_in_output=True)).outputs[0]
    assert shown.text == TEXT.text(stopped.token_ids)
    biased = greedy(20, ignore_eos=False, logit_bias={EOS: 100.0})
    ended = generate([7, 3], biased).outputs[0]
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([EOS], "", "stop", None)


def test_min_tokens_hold_back_the_end_and_stop_strings() -> None:
    tokens = continuation(PLAIN, 20, (None,))
    ended = generate(PLAIN, greedy(20, ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=5)).outputs[0]
    assert len(ended.token_ids) == 6 and ended.token_ids[-1] == EOS and EOS not in ended.token_ids[:-1]
    first = TEXT.text(tokens[:1])
    output = generate(PLAIN, greedy(20, stop=[first], min_tokens=4)).outputs[0]
    whole = TEXT.text(tokens)
    at = whole.find(first, 4)
    assert output.text == (whole if at < 0 else whole[:at])


@pytest.mark.faults
def test_o18_an_aborted_request_gives_its_pages_back_at_once_in_every_state() -> None:
    engine = engine_of(max_num_seqs=2, max_num_batched_tokens=16, enable_prefix_caching=False)
    decoding, prefilling, waiting = (engine.add_request([n] * 30, greedy(50, n=2)) for n in (5, 6, 7))
    for _ in range(3):
        engine.step()
    assert [s.order[1] for s in engine.scheduler.running] == [decoding, prefilling] or engine.scheduler.waiting
    for number in (waiting, prefilling, decoding):
        output = engine.abort(number)
        assert output is not None and output.finished and [c.finish_reason for c in output.outputs] == ["abort"] * 2
        engine.check()
    assert not engine.has_unfinished() and engine.kv.pool.available == 400


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    engine = engine_of(pages=5)
    with pytest.raises(CapacityError, match="21 tokens need 6 pages"):
        engine.add_request([5] * 10, greedy(12))
    assert len(generate([5] * 10, greedy(11), engine).outputs[0].token_ids) == 11


@pytest.mark.faults
def test_o08_a_parameter_that_the_backend_lacks_is_refused_at_the_door_and_the_neighbour_goes_on() -> None:
    engine = engine_of()
    reasons = {"min_p": "its sampler stops at top_p"}
    capabilities = Capabilities(("float32",), (), ("float32",), sampling=frozenset({"temperature"}), unsupported=reasons)
    engine.model.capabilities = capabilities
    other = engine.add_request([5, 6], greedy(3))
    with pytest.raises(UnsupportedError, match="min_p: its sampler stops at top_p"):
        engine.add_request([5], greedy(3, temperature=1.0, min_p=0.1))
    assert run_all(engine)[other].outputs[0].token_ids == continuation([5, 6], 3, (None,))


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_sizes_that_cannot_work_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        EngineConfig(**{field: value})


def test_the_smallest_sizes_work() -> None:
    output = generate([5, 6, 7], greedy(4, prompt_logprobs=1), max_num_seqs=1, max_num_batched_tokens=1, page_size=1)
    assert output.outputs[0].token_ids == continuation([5, 6, 7], 4, (None,))


def test_the_clock_follows_the_definitions() -> None:
    clock = Clock()
    engine = engine_of(clock=clock, max_num_seqs=1, max_num_batched_tokens=8)

    def hook(at: str, batch: Any) -> None:
        clock.now += 1.0 if at == "run" else 0.5

    engine.model.executable.hook = hook
    clock.now = 10.0
    first = engine.add_request([5] * 12, greedy(3))
    clock.now = 11.0
    second = engine.add_request([5] * 12 + [6], greedy(1))
    done = run_all(engine)
    m = done[first].metrics
    # Steps take 1.5 s; the prompt two of them, then two more tokens.
    assert (m.queue_time, m.prefill_time, m.decode_time) == (1.0, 3.0, 3.0)
    assert (m.time_to_first_token, m.mean_itl, m.e2e_time, m.num_cached_tokens) == (4.0, 1.5, 7.0, 0)
    m = done[second].metrics
    assert (m.queue_time, m.prefill_time, m.decode_time, m.time_to_first_token) == (6.0, 1.5, 0.0, 7.5)
    assert (done[first].metrics.arrival, m.arrival) == (10.0, 11.0)
    assert (m.mean_itl, m.num_cached_tokens, m.num_preemptions) == (None, 12, 0)
    assert (engine.stats.steps, engine.stats.device_seconds, engine.stats.host_seconds) == (5, 7.5, 0.0)


def test_time_after_a_preemption_is_counted_apart() -> None:
    clock = Clock()
    engine = engine_of(clock=clock, pages=10, enable_prefix_caching=False)

    def hook(at: str, batch: Any) -> None:
        clock.now += at == "run"

    engine.model.executable.hook = hook
    ids = [engine.add_request([n] * 12, greedy(20)) for n in (5, 6)]
    done = run_all(engine)
    metrics = [done[i].metrics for i in ids]
    assert [m.num_preemptions for m in metrics] == [0, 1]
    assert metrics[1].preempted_time > 0 == metrics[0].preempted_time
    assert all(m.queue_time == 0 for m in metrics)
    assert metrics[1].decode_time == pytest.approx(19 + metrics[1].preempted_time)
    assert all(done[i].outputs[0].token_ids == continuation([n] * 12, 20, (None,)) for i, n in zip(ids, (5, 6)))


def test_a_more_urgent_request_is_served_first() -> None:
    engine = engine_of(max_num_seqs=1)
    low = engine.add_request([5], greedy(9), priority=1)
    engine.step()
    high = engine.add_request([6], greedy(9))
    order = []
    while engine.has_unfinished():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == [high, low]


def test_params_default_to_sixteen_tokens() -> None:
    assert len(generate([5, 6], SamplingParams(ignore_eos=True)).outputs[0].token_ids) == 16
