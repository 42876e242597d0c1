"""What is refused because too much waits, policies, and requests that take too long."""

from __future__ import annotations

from typing import Any

import pytest
from async_device import async_model
from engine_runs import engine_of, greedy, run_all
from fake_model import Clock, continuation
from fake_session import moving_model
from trivium.engine import EngineConfig, RequestState
from trivium.errors import DeadlineError, InvalidRequestError, OverloadedError
from trivium.ops import Batch


def test_requests_wait_up_to_the_limit_beyond_free_seats() -> None:
    engine = engine_of(max_num_seqs=3, max_waiting_requests=2)
    for n in range(5):  # three find a seat as soon as somebody plans
        engine.add_request([5 + n], greedy(4))
    with pytest.raises(OverloadedError, match="2 wait and 1 more would exceed max_waiting_requests 2; try again in"):
        engine.add_request([11], greedy(4))
    patient = engine.add_request([12], greedy(4), patient=True)
    assert run_all(engine)[patient].outputs[0].token_ids == continuation([12], 4, (None,))
    engine.add_request([11], greedy(4))
    assert len(run_all(engine)) == 1


def test_waiting_prompt_tokens_are_limited_but_one_prompt_alone_never_is() -> None:
    engine = engine_of(max_num_seqs=1, max_num_batched_tokens=16, max_waiting_tokens=20)
    engine.add_request([5] * 40, greedy(4))
    engine.add_request([6] * 30, greedy(4))
    engine.step()
    with pytest.raises(OverloadedError, match="30 wait and 5 more would exceed max_waiting_tokens 20"):
        engine.add_request([7] * 5, greedy(4))
    run_all(engine)
    assert engine.scheduler.waiting_tokens == 0


def test_the_hint_is_what_the_excess_takes_at_the_throughput_so_far() -> None:
    clock = Clock()
    engine = engine_of(clock=clock, max_num_seqs=1, max_waiting_requests=1, max_waiting_tokens=50)

    def hook(at: str, batch: Batch | None) -> None:
        clock.now += 0.5 if at == "run" else 0

    engine.model.executable.hook = hook
    for n in range(2):
        engine.add_request([5 + n], greedy(4), patient=True)
    run_all(engine)  # 2 requests of 4 steps and tokens, half a second each: 2 seconds a request, 2 tokens a second
    for n in range(3):
        engine.add_request([8 + n], greedy(4), patient=True)
    with pytest.raises(OverloadedError) as refusal:
        engine.add_request([20], greedy(4))
    assert refusal.value.retry_after == pytest.approx(2 * 2.0)  # 2 wait, 1 may: two must go
    with pytest.raises(OverloadedError) as refusal:
        engine_limits = EngineConfig(max_num_seqs=1, max_waiting_tokens=50)
        engine.config = engine_limits
        engine.add_request([20] * 57, greedy(4))
    assert refusal.value.retry_after == pytest.approx(10 / 2)  # 3 and 57 tokens, 50 may wait


def test_a_refused_request_leaves_no_trace() -> None:
    engine = engine_of(max_num_seqs=1, max_waiting_requests=1)
    ids = [engine.add_request([5 + n] * 4, greedy(4)) for n in range(2)]
    before = vars(engine.snapshot()).copy()
    with pytest.raises(OverloadedError):
        engine.add_request([9] * 4, greedy(4), timeout=3)
    assert vars(engine.snapshot()) == before and not engine._deadlines
    engine.check()
    assert set(run_all(engine)) == set(ids)


@pytest.mark.parametrize("priority", [1, -1, True, 0.0, "0"])
def test_first_come_first_served_refuses_a_priority(priority: Any) -> None:
    engine = engine_of(scheduling_policy="fcfs")
    with pytest.raises(InvalidRequestError, match=r"needs scheduling_policy 'priority'|must be of type int") as refusal:
        engine.add_request([5], greedy(2), priority=priority)
    assert refusal.value.param == "priority"
    engine.add_request([5], greedy(2), priority=0)
    assert len(run_all(engine)) == 1


@pytest.mark.parametrize(
    "field, value",
    [("scheduling_policy", "lifo"), ("max_waiting_requests", 0), ("max_waiting_tokens", True), ("max_num_seqs", None)],
)
def test_settings_that_can_not_work_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_ends_with_what_it_has_when_its_time_is_over(asynchronous: bool) -> None:
    clock = Clock()
    limits: dict[str, Any] = {"max_num_seqs": 2, "clock": clock}
    engine = engine_of(model=async_model(clock=clock), **limits) if asynchronous else engine_of(**limits)
    if not asynchronous:
        engine.model.executable.hook = lambda at, batch: setattr(clock, "now", clock.now + (at == "run"))
    slow = engine.add_request([5], greedy(50), timeout=4.5)
    other = engine.add_request([6], greedy(12), timeout=100)
    queued = engine.add_request([7], greedy(2), timeout=2.5)
    done = run_all(engine)
    assert done[slow].outputs[0].finish_reason == done[queued].outputs[0].finish_reason == "abort"
    assert isinstance(done[slow].error, DeadlineError) and "timeout was over 5.0 seconds after" in str(done[slow].error)
    made = done[slow].outputs[0].token_ids
    assert len(made) == 5 and made == continuation([5], 5, (None,))
    assert done[queued].outputs[0].token_ids == [] and isinstance(done[queued].error, DeadlineError)
    assert done[other].outputs[0].token_ids == continuation([6], 12, (None,)) and done[other].error is None


def test_a_deadline_moves_with_the_request() -> None:
    home, away = Clock(), Clock()
    source, target = (engine_of(model=moving_model(), clock=clock) for clock in (home, away))
    number, away.now = source.add_request([5], greedy(50), timeout=4.0), 900.0
    source.step()
    home.now = 3.0
    number = target.import_request(RequestState.from_bytes(source.export_request(number, pages=False).to_bytes()))
    target.step()
    away.now = 901.5
    ended = run_all(target)[number]
    assert isinstance(ended.error, DeadlineError) and ended.outputs[0].token_ids == continuation([5], 2, (None,))
    home.now = 9.0
    assert not source.has_unfinished()


@pytest.mark.parametrize("timeout", [0, -1.0, "3", float("nan"), float("inf"), True])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match="timeout must be a number of seconds above 0"):
        engine.add_request([5], greedy(2), timeout=timeout)
    assert not engine.has_unfinished()


def test_an_interrupt_after_a_deadline_does_not_lose_the_news() -> None:
    clock = Clock()
    engine = engine_of(clock=clock)
    late, other = engine.add_request([5], greedy(9), timeout=1), engine.add_request([6], greedy(9))
    engine.step()
    clock.now = 2.0

    def hook(at: str, batch: Batch | None) -> None:
        engine.model.executable.hook = lambda at, batch: None
        raise KeyboardInterrupt

    engine.model.executable.hook = hook
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done = run_all(engine)
    assert isinstance(done[late].error, DeadlineError) and done[other].outputs[0].token_ids == continuation([6], 9, (None,))
