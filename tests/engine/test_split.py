"""Prompts at one engine, decoding at another: the scheduling of it, on models without weights."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
from engine_runs import engine_of, greedy, run_all, run_streams
from fake_model import EOS, Clock, Fault, FakeTokenizer, continuation
from fake_session import moving_model
from hypothesis import given, settings
from hypothesis import strategies as st
from random_lives import KINDS
from trivium.engine import EngineConfig, RequestOutput
from trivium.engine.split import SplitEngine
from trivium.errors import BackendError, CapacityError, DeadlineError, OverloadedError, UnsupportedError
from trivium.ops.sample import derive_seed

PROMPT = [5 + i * 7 % 70 for i in range(31)]
OTHER = [9 + i * 11 % 70 for i in range(23)]


def loaded(windows: Any = (None,), *, seqs: int = 4, tokens: int = 12, **options: Any) -> Any:
    """A fake model as the loader gives one."""
    found = {**vars(moving_model(windows, **options)), "tokenizer": FakeTokenizer(), "name": "fake"}
    found |= {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return dataclasses.make_dataclass("Fake", found)(**found)


@pytest.fixture
def make(request):
    """A maker of SplitEngines, which are closed in the end."""

    def made(windows: Any = (None,), *, front: Any = None, decode: Any = None, clock: Any = None, **config: Any) -> SplitEngine:
        engine = split(windows, front=front, decode=decode, clock=clock, **config)
        request.addfinalizer(engine.close)
        return engine

    return made


def split(windows: Any = (None,), *, front: Any = None, decode: Any = None, clock: Any = None, **config: Any) -> SplitEngine:
    settings = EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 12, **config})
    more = {} if clock is None else {"clock": clock}
    return SplitEngine(decode or loaded(windows), front or loaded(windows, page_size=3), settings, **more)


def until(engine: SplitEngine, ready: Any) -> list[RequestOutput]:
    """Steps until `ready()`."""
    news = []
    while not ready():
        assert engine.has_unfinished()
        news += engine.step()
    return news


def decoding(engine: SplitEngine, number: int) -> bool:
    return number in engine._requests and engine._requests[number].completions[0].seq.running


def idle(engine: SplitEngine) -> None:
    """Nothing is held anywhere."""
    engine.check()
    assert not engine.has_unfinished() and not engine._ahead and not engine.front.has_unfinished()
    engine.kv.check_idle()
    engine.front.kv.check_idle()
    assert not engine.model.executable.violations + engine.front.model.executable.violations


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [c.token_ids for c in output.outputs]


@given(
    windows=st.sampled_from(KINDS), seed=st.integers(0, 2**32), sizes=st.tuples(*[st.sampled_from([2, 3, 4, 8])] * 2),
    n=st.sampled_from([1, 1, 3]), caching=st.booleans(), pages=st.sampled_from([26, 70]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_requests_get_the_tokens_that_one_engine_gives_them(
    windows: Any, seed: int, sizes: tuple[int, int], n: int, caching: bool, pages: int
) -> None:
    rng = random.Random(seed)
    front, decode = (loaded(windows, page_size=size, pages=pages * 4 // size + 8) for size in sizes)
    engine = split(windows, front=front, decode=decode, enable_prefix_caching=caching)
    try:
        asked, done, gone = {}, {}, set()
        for turn in range(40):
            if turn < 6:
                prompt = PROMPT[: rng.randrange(1, 31)] + [rng.randrange(3, 80)]
                sampling = {"n": n, "temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(99), "ignore_eos": False}
                params = greedy(rng.randrange(1, 14), **sampling)
                asked[engine.add_request(prompt, params, priority=rng.randrange(2), stream=rng.random() < 0.3)] = prompt, params
            if rng.random() < 0.1 and (left := [number for number in asked if number not in done]):
                gone.add(victim := rng.choice(left))
                if (last := engine.abort(victim)) is not None:
                    assert last.finished and last.request_id == victim
            for output in engine.step() if engine.has_unfinished() else []:
                earlier = done.get(output.request_id)
                if earlier is None:
                    done[output.request_id] = output
                else:
                    earlier.extend(output)
            engine.check()
        for output in run_streams(engine).values():
            for one in output:
                if one.request_id in done:
                    done[one.request_id].extend(one)
                else:
                    done[one.request_id] = one
        for number, (prompt, params) in asked.items():
            if number in gone:
                continue
            assert done[number].finished and len(done[number].outputs) == n
            for c in done[number].outputs:
                own = {"temperature": params.temperature, "seed": derive_seed(params.seed or 0, c.index)}
                assert c.token_ids == continuation(prompt, params.max_tokens or 0, windows, ends=frozenset({EOS}), **own)
        idle(engine)
    finally:
        engine.close()


def test_a_prompt_is_computed_while_others_are_decoded(make) -> None:
    engine = make()
    entered, go = threading.Event(), threading.Event()

    def hold(point: str, batch: Any) -> None:
        if point == "run" and OTHER[0] in batch.token_ids.tolist():
            entered.set()
            assert go.wait(60)

    engine.front.model.executable.hook = hold
    first = engine.add_request(PROMPT, greedy(200), stream=True)
    until(engine, lambda: decoding(engine, first))
    second = engine.add_request(OTHER, greedy(5))
    assert entered.wait(60)
    made = [token for _ in range(8) for output in engine.step() for token in output.outputs[0].token_ids]
    assert len(made) == 8 and not go.is_set()
    go.set()
    assert tokens_of(run_all(engine)[second]) == [continuation(OTHER, 5, (None,))]
    idle(engine)


def test_each_session_is_called_by_one_thread_at_a_time_and_prompts_never_by_the_callers(make) -> None:
    engine = make()
    seen: dict[str, set[str]] = {"front": set(), "decode": set()}
    for side, model in (("front", engine.front.model), ("decode", engine.model)):
        note = lambda *_, side=side: seen[side].add(threading.current_thread().name)
        model.executable.hook = model.session.hook = note
    for prompt in (PROMPT, OTHER, PROMPT[:9]):
        engine.add_request(prompt, greedy(6))
    run_all(engine)
    assert {name.partition("_")[0] for name in seen["front"]} == {"trivium-prefill"}
    assert seen["decode"] == {threading.current_thread().name}
    assert max(len(b.token_ids) - len(b.query_starts) + 1 for b in engine.model.executable.batches) == 0  # one token each
    idle(engine)


@pytest.mark.faults
def test_o13_a_fault_at_the_front_ends_the_requests_it_must_and_decoding_goes_on(make) -> None:
    engine = make()

    def fail(point: str, batch: Any) -> None:
        if point == "run" and OTHER[0] in batch.token_ids.tolist():
            raise Fault("the chip is gone")

    first = engine.add_request(PROMPT, greedy(200))
    until(engine, lambda: decoding(engine, first))
    engine.front.model.executable.hook = fail
    bad, good = engine.add_request(OTHER, greedy(5)), engine.add_request(PROMPT[:17], greedy(5))
    done = run_all(engine)
    assert isinstance(done[bad].error, BackendError) and "the chip is gone" in str(done[bad].error)
    assert [c.finish_reason for c in done[bad].outputs] == ["error"]
    assert tokens_of(done[first]) == [continuation(PROMPT, 200, (None,))]
    assert tokens_of(done[good]) == [continuation(PROMPT[:17], 5, (None,))]
    idle(engine)


@pytest.mark.faults
def test_o13_a_front_that_throws_what_no_step_should_loses_its_own_requests_only(make) -> None:
    engine = make()
    first = engine.add_request(PROMPT, greedy(200))
    until(engine, lambda: decoding(engine, first))

    def fail(point: str, batch: Any) -> None:
        raise KeyboardInterrupt

    engine.front.model.executable.hook = fail
    bad = engine.add_request(OTHER, greedy(5))
    done = {o.request_id: o for o in until(engine, lambda: bad not in engine._ahead) if o.finished}
    done |= {o.request_id: o for o in engine.step() if o.finished}
    assert isinstance(done[bad].error, BackendError)
    engine.front.model.executable.hook = lambda point, batch: None
    again = engine.add_request(OTHER, greedy(5))
    done |= run_all(engine)
    assert tokens_of(done[first]) == [continuation(PROMPT, 200, (None,))]
    assert tokens_of(done[again]) == [continuation(OTHER, 5, (None,))]
    idle(engine)


@pytest.mark.faults
@pytest.mark.parametrize("side", ["export", "import"])
def test_o13_a_fault_in_the_hand_over_leaks_nothing_and_hits_nobody_else(make, side: str) -> None:
    engine = make()
    broken = engine.front.model.session if side == "export" else engine.model.session
    first = engine.add_request(PROMPT, greedy(200))
    until(engine, lambda: decoding(engine, first))

    def fail(point: str) -> None:
        if point == side:
            raise Fault("a page is lost")

    broken.hook = fail
    bad = engine.add_request(OTHER, greedy(5, n=2, temperature=1.0, seed=3))
    done = run_all(engine)
    if side == "export":
        assert "a page is lost" in str(done[bad].error) and {c.finish_reason for c in done[bad].outputs} == {"error"}
    else:  # what did not arrive is computed again
        expected = [continuation(OTHER, 5, (None,), temperature=1.0, seed=derive_seed(3, i)) for i in range(2)]
        assert tokens_of(done[bad]) == expected
    assert tokens_of(done[first]) == [continuation(PROMPT, 200, (None,))]
    idle(engine)


@pytest.mark.parametrize("moment", ["waiting", "prefill", "decoding", "ended"])
def test_an_abort_ends_a_request_wherever_it_is(make, moment: str) -> None:
    engine = make(front=loaded(page_size=3, seqs=1))
    other = engine.add_request(OTHER, greedy(12))
    number = engine.add_request(PROMPT, greedy(9 if moment != "ended" else 1), stream=True)
    news = []
    if moment == "prefill":
        news = until(engine, lambda: other not in engine._ahead)
    elif moment == "decoding":
        news = until(engine, lambda: decoding(engine, number))
    elif moment == "ended":
        assert run_all(engine)[number].finished
    last = engine.abort(number)
    if moment == "ended":
        assert last is None
    else:
        assert last is not None and last.finished and last.outputs[0].finish_reason == "abort"
        made = [t for o in [*news, last] if o.request_id == number for t in o.outputs[0].token_ids]
        assert made == continuation(PROMPT, 9, (None,))[: len(made)]
        assert (len(made) > 0) is (moment == "decoding") or moment == "prefill"
        done = {o.request_id: o for o in news if o.finished} | run_all(engine)
        assert tokens_of(done[other]) == [continuation(OTHER, 12, (None,))]
    idle(engine)


def settled(engine: SplitEngine) -> None:
    """The front has nothing to do; what it says has not been heard yet."""
    while engine._ask(engine.front.has_unfinished):
        pass


def test_an_abort_hands_out_what_nobody_has_heard_yet_and_nothing_comes_after_it(make) -> None:
    engine = make()
    ended, moved = engine.add_request(PROMPT, greedy(1), stream=True), engine.add_request(OTHER, greedy(9), stream=True)
    settled(engine)
    last = engine.abort(ended)
    assert last.finished and last.outputs[0].finish_reason == "length" and tokens_of(last) == [continuation(PROMPT, 1, (None,))]
    last = engine.abort(moved)
    assert last.finished and last.outputs[0].finish_reason == "abort" and tokens_of(last) == [continuation(OTHER, 1, (None,))]
    assert not engine.has_unfinished() and engine.step() == []
    assert engine.abort(ended) is None
    idle(engine)


@pytest.mark.faults
def test_o13_a_fault_where_tokens_are_decoded_does_not_reach_the_front(make) -> None:
    engine = make()
    first = engine.add_request(PROMPT, greedy(200))
    until(engine, lambda: decoding(engine, first))

    def fail(point: str, batch: Any) -> None:
        if point == "run" and first in engine._requests:
            raise Fault("the other chip is gone")

    engine.model.executable.hook = fail
    second = engine.add_request(OTHER, greedy(5))
    done = run_all(engine)
    assert "the other chip is gone" in str(done[first].error)
    assert tokens_of(done[second]) == [continuation(OTHER, 5, (None,))]
    idle(engine)


def test_a_deadline_counts_on_both_sides(make) -> None:
    clock = Clock()
    engine = make(clock=clock)
    late, early = engine.add_request(PROMPT, greedy(400), timeout=100.0), engine.add_request(OTHER, greedy(400), timeout=5.0)
    until(engine, lambda: decoding(engine, late) and decoding(engine, early))
    clock.now = 6.0
    done = {o.request_id: o for o in until(engine, lambda: early not in engine._requests)}
    assert isinstance(done[early].error, DeadlineError) and 0 < len(done[early].outputs[0].token_ids) < 400
    entered, go = threading.Event(), threading.Event()

    def hold(point: str, batch: Any) -> None:
        entered.set()
        assert go.wait(60)

    engine.front.model.executable.hook = hold
    stuck = engine.add_request(OTHER, greedy(5), timeout=10.0)
    assert entered.wait(60)
    clock.now = 50.0
    go.set()
    done = run_all(engine)
    assert isinstance(done[stuck].error, DeadlineError)
    assert tokens_of(done[late]) == [continuation(PROMPT, 400, (None,))]
    idle(engine)


def test_what_is_preempted_after_the_hand_over_continues_exactly(make) -> None:
    engine = make(decode=loaded(page_size=4, pages=15), enable_prefix_caching=False)
    asked = {engine.add_request(prompt, greedy(20)): prompt for prompt in (PROMPT[:14], OTHER[:14], PROMPT[5:19])}
    done = run_all(engine)
    assert engine.stats.preemptions > 0 and any(o.metrics.num_preemptions for o in done.values())
    for number, prompt in asked.items():
        assert tokens_of(done[number]) == [continuation(prompt, 20, (None,))]
    idle(engine)


def test_prefixes_are_found_at_the_front_and_nothing_is_computed_twice(make) -> None:
    engine = make()
    for _ in range(2):
        number = engine.add_request(PROMPT, greedy(5))
        output = run_all(engine)[number]
        assert tokens_of(output) == [continuation(PROMPT, 5, (None,))]
    assert output.metrics.num_cached_tokens == 30 == engine.snapshot().cached_tokens  # ten pages of three
    assert engine.front.stats.computed_tokens == 31 + 1
    assert engine.stats.computed_tokens == 2 * 4  # the tokens that were drawn but for the last one
    idle(engine)


def test_a_stream_has_the_news_that_one_engine_has(make) -> None:
    params = greedy(12, stop=["zz"], logprobs=2, n=2, temperature=0.9, seed=4)
    one, two = engine_of(model=moving_model(), max_num_seqs=4, max_num_batched_tokens=12), make()
    whole = []
    for engine in (one, two):
        number = engine.add_request(PROMPT, params, stream=True)
        first, *rest = run_streams(engine)[number]
        for output in rest:
            first.extend(output)
        whole.append(first)
    for a, b in zip(sorted(whole[0].outputs, key=lambda c: c.index), sorted(whole[1].outputs, key=lambda c: c.index), strict=True):
        assert (a.token_ids, a.text, a.logprobs, a.finish_reason) == (b.token_ids, b.text, b.logprobs, b.finish_reason)
    idle(two)


def test_the_clock_shows_queue_first_token_and_transfer(make) -> None:
    clock = Clock()
    engine = make(clock=clock)
    engine.front.model.executable.hook = lambda point, batch: setattr(clock, "now", clock.now + (2.0 if point == "run" else 0.0))
    engine.front.model.session.hook = lambda point: setattr(clock, "now", clock.now + 0.25)
    engine.model.session.hook = lambda point: setattr(clock, "now", clock.now + 0.5)
    number = engine.add_request(PROMPT, greedy(4))  # three chunks of 12 tokens at most
    metrics = run_all(engine)[number].metrics
    assert (metrics.queue_time, metrics.prefill_time, metrics.time_to_first_token) == (0.0, 6.0, 6.0)
    assert metrics.transfer_time == 0.75 and metrics.decode_time == 0.75
    assert engine.snapshot().finished_requests == 1


def test_work_goes_on_at_the_front_while_the_other_side_is_full(make) -> None:
    engine = make(decode=loaded(seqs=1), max_num_seqs=1)
    prompts = [PROMPT[i : i + 6] for i in range(10)]
    numbers = [engine.add_request(prompt, greedy(9)) for prompt in prompts]
    most = 0
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
        most = max(most, len(engine.scheduler.waiting))
    assert most <= 1
    for number, prompt in zip(numbers, prompts, strict=True):
        assert tokens_of(done[number]) == [continuation(prompt, 9, (None,))]
    idle(engine)


def test_too_much_that_waits_is_refused(make) -> None:
    engine = make(front=loaded(page_size=3, seqs=1), max_waiting_requests=2)
    go = threading.Event()
    engine.front.model.executable.hook = lambda point, batch: go.wait(60)
    numbers = [engine.add_request(PROMPT, greedy(3)) for _ in range(3)]
    with pytest.raises(OverloadedError, match="2 wait and 1 more would exceed max_waiting_requests 2"):
        engine.add_request(PROMPT, greedy(3))
    engine.add_request(PROMPT, greedy(3), patient=True)
    go.set()
    assert set(numbers) < run_all(engine).keys()
    idle(engine)


def test_what_the_front_can_never_take_is_refused_at_the_door(make) -> None:
    engine = make(front=loaded(page_size=3, pages=5))
    before = dataclasses.replace(engine.snapshot())
    with pytest.raises(CapacityError, match="31 tokens need 11 pages of the KV cache, which has 5 of 3 tokens each"):
        engine.add_request(PROMPT, greedy(3))
    assert engine.snapshot() == before and not engine.has_unfinished()
    front = loaded()
    front.capabilities = dataclasses.replace(front.capabilities, sampling=frozenset({"temperature"}))
    engine = make(front=front)
    with pytest.raises(UnsupportedError, match="top_k"):
        engine.add_request(PROMPT, greedy(3, temperature=1.0, top_k=3))


def test_an_embedding_and_a_single_token_end_at_the_front(make) -> None:
    from trivium.engine import PoolingParams

    engine = make()
    one, vector = engine.add_request(PROMPT, greedy(1)), engine.add_request(OTHER, pooling=PoolingParams())
    done = run_all(engine)
    assert tokens_of(done[one]) == [continuation(PROMPT, 1, (None,))]
    alone = engine_of(model=moving_model(), max_num_seqs=4, max_num_batched_tokens=12)
    expected = run_all_one(alone, OTHER, PoolingParams())
    assert done[vector].embedding.tolist() == expected.embedding.tolist()
    assert not engine.model.executable.batches
    idle(engine)


def run_all_one(engine: Any, prompt: list[int], pooling: Any) -> RequestOutput:
    number = engine.add_request(prompt, pooling=pooling)
    return run_all(engine)[number]


@pytest.mark.parametrize("width", [2, 4])
def test_beams_move_as_they_are(make, width: int) -> None:
    params = greedy(8, beam_width=width, n=2)
    alone = engine_of(model=moving_model(), max_num_seqs=8, max_num_batched_tokens=24)
    alone.add_request(PROMPT, params)
    expected = run_all(alone)
    front = loaded(page_size=3, seqs=8, tokens=24)
    engine = make(front=front, decode=loaded(seqs=8, tokens=24), max_num_seqs=8, max_num_batched_tokens=24)
    number = engine.add_request(PROMPT, params)
    assert tokens_of(run_all(engine)[number]) == tokens_of(expected[1])
    assert engine.stats.computed_tokens > 0
    idle(engine)


def test_a_request_can_leave_for_a_third_engine(make) -> None:
    engine, third = make(), engine_of(model=moving_model(), max_num_seqs=4, max_num_batched_tokens=12)
    number = engine.add_request(PROMPT, greedy(9))
    there = third.import_request(engine.export_request(number))
    idle(engine)
    assert tokens_of(run_all(third)[there]) == [continuation(PROMPT, 9, (None,))]
    back = make()
    number = third.add_request(OTHER, greedy(9))
    for _ in range(4):
        third.step()
    here = back.import_request(third.export_request(number))
    assert tokens_of(run_all(back)[here]) == [continuation(OTHER, 9, (None,))]


def test_the_end_of_an_engine_ends_what_is_on_both_sides() -> None:
    engine = split()
    first = engine.add_request(PROMPT, greedy(40))
    until(engine, lambda: decoding(engine, first))
    second = engine.add_request(OTHER, greedy(40))
    outputs = {o.request_id: o for o in engine.fail_all(BackendError("over"))}
    assert outputs.keys() == {first, second} and {str(o.error) for o in outputs.values()} == {"over"}
    idle(engine)
    engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("trivium-prefill") and t in engine._thread._threads]


def test_models_whose_pages_mean_something_else_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="in pages of other meaning"):
        split(front=loaded(fingerprint="another"))
    with pytest.raises(UnsupportedError, match="in pages of other meaning"):
        split(front=loaded((None, 5)))
