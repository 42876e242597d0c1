"""On a device whose run() returns early the next step is ready before this one is done, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trivium.engine.runner as runner_module
from async_device import async_model
from engine_runs import engine_of, greedy, prompts_of, run_all, run_streams
from fake_model import EOS, Clock, Fault, FakeTokenizer, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.engine import Engine, RequestOutput
from trivium.engine.request import Completion
from trivium.ops import Batch
from trivium.sampling import SamplingParams

KINDS: dict[str, tuple[Any, ...]] = {"full": (None,), "window": (None, 6), "recurrent": (None, "recurrent")}


def ahead_of(windows: Any = (None,), *, clock: Clock | None = None, **options: Any) -> Engine:
    """An engine on an asynchronous device."""
    sizes = {k: options.pop(k) for k in ("page_size", "pages", "max_model_len") if k in options}
    return engine_of(model=async_model(windows, clock=clock, **sizes), clock=clock, **options)


def timed(engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Lets the host's work take simulated time: 0.25 to plan, 0.125 to build what needs the tokens, 0.5 for the text of each."""

    def slow(owner: Any, name: str, seconds: float) -> None:
        work = getattr(owner, name)

        def timed_work(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            events.append(name)
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, timed_work)

    slow(engine.scheduler, "plan", 0.25)
    slow(runner_module, "build_inputs", 0.125)
    slow(Completion, "accept", 0.5)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_device_waits_only_for_the_tokens_to_be_filled_in(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = ahead_of(clock=clock)
    device = engine.model.executable
    if not asynchronous:
        engine.model.capabilities = type(engine.model.capabilities)(("float32",), (), ("float32",))
    device.seconds = 4.0
    timed(engine, clock, monkeypatch, device.events)
    for prompt in ([5, 6, 7], [8, 9]):
        engine.add_request(prompt, greedy(6))
    done = run_all(engine)
    assert [done[i].outputs[0].token_ids for i in (1, 2)] == [continuation(p, 6, (None,)) for p in ([5, 6, 7], [8, 9])]
    assert device.idle[1:6] == [0.125] * 5 if asynchronous else [0.25 + 0.125 + 2 * 0.5] * 5
    assert len(device.idle) == 6, "no step more than the tokens that were asked for"
    step = ["plan", "tokens", "build_inputs", "run", "accept", "accept"] if asynchronous else None
    assert not asynchronous or device.events[:15] == ["plan", "build_inputs", "run", *step[:6], *step[:6]]
    assert engine.stats.device_seconds == 24.0
    assert engine.stats.host_seconds == pytest.approx(sum(device.idle) + 1.0)


def test_outputs_come_in_the_step_that_made_them() -> None:
    engine = ahead_of()
    engine.add_request([5, 6, 7], greedy(3), stream=True)
    for token in continuation([5, 6, 7], 3, (None,)):
        (output,) = engine.step()
        assert output.outputs[0].token_ids == [token]
    assert output.finished and not engine.has_unfinished()


def test_a_sequence_that_ends_by_surprise_costs_a_row_and_nothing_else() -> None:
    engine = ahead_of()
    prompts = prompts_of(8, 20, seed=11)
    ids = [engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=300)) for p in prompts]
    done = run_all(engine)
    for number, prompt in zip(ids, prompts):
        expected = continuation(prompt, 300, (None,), ends=frozenset({EOS}))
        assert done[number].outputs[0].token_ids == expected and done[number].outputs[0].finish_reason == "stop"
    assert not engine.has_unfinished() and engine.step() == []


requests = st.lists(
    st.tuples(
        st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 25), st.integers(1, 2),
        st.sampled_from([None, 3, 9]), st.booleans(), st.booleans(),
    ),  # prompt, new tokens, priority, step of arrival, n, aborted after so many steps, a stop string, scored
    min_size=1, max_size=10,
)  # fmt: skip


def drive(engine: Engine, arrivals: list[Any], seed: int) -> dict[int, RequestOutput | None]:
    """Everything that has not been aborted, by place in `arrivals`."""
    rng, steps = random.Random(seed), 0
    todo = sorted(enumerate(arrivals), key=lambda item: item[1][3])
    ids: dict[int, int] = {}
    done: dict[int, RequestOutput | None] = {}
    while todo or engine.has_unfinished():
        while todo and (todo[0][1][3] <= steps or not engine.has_unfinished()):
            at, (length, new, priority, _, n, _, stop, scored) = todo.pop(0)
            prompt = [rng.randrange(3, 6) for _ in range(length)]
            text = FakeTokenizer().text(continuation(prompt, 12, (None,), temperature=0.0))
            params = greedy(new, n=n, stop=[text[4:6]] if stop else [], prompt_logprobs=1 if scored else None)
            ids[engine.add_request(prompt, params, priority=priority)] = at
        for output in engine.step():
            done[ids[output.request_id]] = output
        steps += 1
        for number, at in ids.items():
            if arrivals[at][5] is not None and steps == arrivals[at][3] + arrivals[at][5] and engine.abort(number):
                done[at] = None
        engine.check()
    assert not engine.model.executable.violations
    engine.kv.check_idle()
    return done


@given(st.sampled_from(sorted(KINDS)), requests, st.integers(26, 60), st.integers(2, 6), st.integers(2, 20), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_arrivals_give_what_a_synchronous_device_gives(
    kind: str, arrivals: list[Any], pages: int, max_seqs: int, max_tokens: int, seed: int
) -> None:
    limits = {"pages": pages, "max_num_seqs": max_seqs, "max_num_batched_tokens": max_tokens, "max_model_len": 43}
    got = drive(ahead_of(KINDS[kind], **limits), arrivals, seed)
    want = drive(engine_of(KINDS[kind], **limits), arrivals, seed)
    assert got.keys() == want.keys()
    for at in got:
        if (one := got[at]) is not None and (two := want[at]) is not None:
            assert one.outputs == two.outputs and one.prompt_logprobs == two.prompt_logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["run", "tokens"])
def test_a_fault_undoes_the_plan_ahead_first_and_hits_only_the_request_it_must(kind: str, point: str) -> None:
    engine = ahead_of(KINDS[kind], max_num_seqs=6, max_num_batched_tokens=40)
    prompts = prompts_of(10, 40, seed=5)
    prompts[4] = [66] * 20

    def hook(at: str, batch: Batch) -> None:
        if at == point and (batch.token_ids == 66).sum() > 5:
            raise Fault("poisoned")

    engine.model.executable.hook = hook
    ids = [engine.add_request(p, greedy(10)) for p in prompts]
    done = run_all(engine)
    for i, (number, prompt) in enumerate(zip(ids, prompts)):
        if i == 4:
            assert done[number].outputs[0].finish_reason == "error" and "backend 'fake'" in str(done[number].error)
        else:
            assert done[number].outputs[0].token_ids == continuation(prompt, 10, KINDS[kind])
    assert engine.stats.failed_steps == 1


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_faults_that_pass_change_no_token(kind: str, seed: int) -> None:
    rng, engine = random.Random(seed), ahead_of(KINDS[kind], pages=60, max_num_seqs=5, max_num_batched_tokens=24)

    def hook(at: str, batch: Batch) -> None:
        if batch.seqs > 1 and rng.random() < 0.2:
            raise Fault("now and then")

    engine.model.executable.hook = hook
    prompts = prompts_of(8, 40, seed=seed)
    ids = [engine.add_request(p, greedy(8, temperature=1.0, seed=3)) for p in prompts]
    done = run_all(engine)
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 8, KINDS[kind], temperature=1.0, seed=3)


def test_a_plan_that_needs_a_preemption_is_made_on_facts() -> None:
    engine = ahead_of(pages=12, max_num_seqs=4, max_model_len=40)
    prompts = [[n + 3] * 8 for n in range(4)]
    ids = [engine.add_request(p, greedy(24)) for p in prompts]
    done = run_all(engine)
    assert engine.stats.preemptions > 0
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 24, (None,))


@pytest.mark.faults
def test_o18_an_abort_under_way_frees_its_pages_at_once() -> None:
    engine = ahead_of(enable_prefix_caching=False)
    number, other = (engine.add_request(p, greedy(20)) for p in ([5] * 9, [6] * 9))
    engine.step()
    engine.step()
    before = engine.kv.pool.available
    output = engine.abort(number)
    assert output is not None and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == continuation([5] * 9, 2, (None,))
    assert engine.kv.pool.available - before == 3
    late = engine.add_request([7] * 9, greedy(20))
    done = run_all(engine)
    assert done[other].outputs[0].token_ids == continuation([6] * 9, 20, (None,))
    assert done[late].outputs[0].token_ids == continuation([7] * 9, 20, (None,))


@pytest.mark.parametrize("point", ["run", "tokens"])
def test_an_interrupt_is_passed_on_and_undone(point: str) -> None:
    engine = ahead_of()
    number = engine.add_request([5] * 9, greedy(6))
    engine.step()

    def hook(at: str, batch: Batch) -> None:
        if at == point:
            engine.model.executable.hook = lambda at, batch: None
            raise KeyboardInterrupt

    engine.model.executable.hook = hook
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):  # what run() raises is raised when that step is waited for
            engine.step()
    engine.check()
    assert run_all(engine)[number].outputs[0].token_ids == continuation([5] * 9, 6, (None,))


def test_streams_are_whole() -> None:
    engine = ahead_of((None, 6), max_num_seqs=3, max_num_batched_tokens=16)
    prompts = prompts_of(6, 30, seed=2)
    ids = [engine.add_request(p, greedy(9, n=2), stream=True) for p in prompts]
    news = run_streams(engine)
    for number, prompt in zip(ids, prompts):
        for index in (0, 1):
            tokens = [t for o in news[number] for c in o.outputs if c.index == index for t in c.token_ids]
            assert tokens == continuation(prompt, 9, (None, 6))
