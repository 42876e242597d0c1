"""A step is a transaction: what fails is undone, and hits only the requests it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trivium.engine.runner as runner_module
from async_device import async_model
from engine_runs import engine_of, greedy, prompts_of, run_all
from fake_model import Fault, continuation, fake_model
from hypothesis import given, settings, strategies as st
from trivium.engine import Engine, RequestOutput
from trivium.errors import BackendError, TriviumError
from trivium.ops import Batch, Sampled

POISON = 66
KINDS: dict[str, tuple[Any, ...]] = {"full": (None,), "window": (None, 6), "recurrent": (None, "recurrent")}


def snapshot(engine: Engine) -> tuple[Any, ...]:
    """Everything a client or a later step could notice."""
    s = engine.scheduler
    seqs = [(q.order, q.computed, q.length, q.scored, q.running, engine.kv.held(q)) for q in s.running + s.waiting]
    requests = [
        (r.id, r.clock.metrics(0.0), list(r.prompt_logprobs), r.started, [c.token_ids[:] for c in r.completions])
        for r in engine._requests.values()
    ]
    samplers = [c.sampler.generated for c in engine._completions.values()]
    stats = {k: v for k, v in vars(engine.stats).items() if not k.endswith("seconds")}
    return seqs, requests, samplers, stats, engine.kv.pool.available


@contextmanager
def broken(engine: Engine, point: str) -> Iterator[None]:
    """Makes every step fail at `point`."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Fault(point)

    hook = lambda at, batch: fail() if at == point else None
    owner, name, value = {
        "run": (engine.model.executable, "hook", hook), "tokens": (engine.model.executable, "hook", hook),
        "nonsense": (engine.model.executable, "run", _Nonsense), "plan": (engine.scheduler, "plan", fail),
        "admit": (engine.kv, "adopt", fail), "grow": (engine.kv, "grow", fail), "inputs": (runner_module, "build_inputs", fail),
        "batch": (runner_module, "make_batch", fail),
    }[point]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def whole_step(engine: Engine) -> list[Any]:
    """One step that nobody tries again."""
    flight = engine.runner.launch(engine.runner.prepare(engine.scheduler.plan(), 0.0))
    engine._wait(flight)
    engine._finish(flight)
    moved, engine._moved = engine._moved, []
    return moved


class _Nonsense:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def tokens(self) -> Sampled:
        return Sampled(self.batch.sample_rows + 10_000)


def busy_engine(windows: tuple[Any, ...]) -> tuple[Engine, list[list[int]]]:
    """Requests in every state: decoding, in the middle of a prompt, waiting, with prefix hits to come, n > 1, scored."""
    engine = engine_of(windows, max_num_seqs=5, max_num_batched_tokens=24)
    prompts = prompts_of(6, 50, seed=3)
    prompts[5] = prompts[0] + [4] * 9
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(14, n=2 if i == 1 else 1, prompt_logprobs=1 if i == 2 else None, logprobs=0))
    for _ in range(4):
        engine.step()
    return engine, prompts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["plan", "admit", "grow", "inputs", "batch", "run", "tokens", "nonsense"])
def test_a_failed_step_leaves_pages_requests_and_counters_as_they_were(kind: str, point: str) -> None:
    engine, prompts = busy_engine(KINDS[kind])
    done: dict[int, RequestOutput] = {}
    for _ in range(9):
        before = snapshot(engine)
        outputs = []
        with broken(engine, point):
            try:
                outputs = engine._report(whole_step(engine))
            except (Fault, BackendError):
                assert _settled(snapshot(engine), point) == _settled(before, point)
        engine.check()
        done |= {o.request_id: o for o in outputs + engine.step() if o.finished}
    done |= run_all(engine)
    for number, prompt in enumerate(prompts, 1):
        assert all(c.token_ids == continuation(prompt, 14, KINDS[kind]) for c in done[number].outputs)


def _settled(state: tuple[Any, ...], point: str) -> tuple[Any, ...]:
    """After a run, the last, partly filled page of a sequence is computed again: positions count in whole pages then."""
    seqs, *rest = state
    if point not in ("run", "tokens", "nonsense"):
        return seqs, *rest
    return [(order, length, scored, running) for order, _, length, scored, running, _ in seqs], *rest[:-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["run", "tokens"])
def test_a_fault_of_one_request_hits_that_request_only(kind: str, point: str) -> None:
    engine = engine_of(KINDS[kind], max_num_seqs=6, max_num_batched_tokens=40)
    prompts = prompts_of(10, 40, seed=5)
    prompts[4] = [POISON] * 20
    seen: list[Batch] = []

    def hook(at: str, batch: Batch | None) -> None:
        if batch is not None:
            seen.append(batch)
        if at == point and POISON in seen[-1].token_ids[: len(seen[-1].token_ids)] and (seen[-1].token_ids == POISON).sum() > 5:
            raise Fault("poisoned")

    engine.model.executable.hook = hook
    ids = [engine.add_request(p, greedy(10)) for p in prompts]
    done = run_all(engine)
    for i, (number, prompt) in enumerate(zip(ids, prompts)):
        output = done[number]
        if i == 4:
            assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
            assert isinstance(output.error, BackendError) and "poisoned" in str(output.error)
        else:
            assert output.outputs[0].token_ids == continuation(prompt, 10, KINDS[kind]) and output.error is None
    assert engine.stats.failed_steps == 1


def test_a_typed_error_of_the_backend_reaches_the_client_as_it_is() -> None:
    engine, fault = engine_of(), BackendError("device lost")

    def hook(at: str, batch: Batch | None) -> None:
        raise fault

    engine.model.executable.hook = hook
    ids = [engine.add_request([5, 6, 7], greedy(4)) for _ in range(3)]
    outputs = engine.step()
    assert [o.request_id for o in outputs] == ids and all(o.error is fault and o.finished for o in outputs)
    assert not engine.has_unfinished()
    engine.check()


def test_a_fault_that_passes_costs_nothing_but_time() -> None:
    engine = engine_of((None, 6), pages=60)
    calls = [0]

    def hook(at: str, batch: Batch | None) -> None:
        calls[0] += batch is not None and batch.seqs > 1
        if batch is not None and batch.seqs > 1 and calls[0] % 3 == 0:
            raise Fault("now and then")

    engine.model.executable.hook = hook
    prompts = prompts_of(12, 40, seed=6)
    ids = [engine.add_request(p, greedy(8, temperature=1.0, seed=3)) for p in prompts]
    done = run_all(engine)
    assert engine.stats.failed_steps > 3
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 8, (None, 6), temperature=1.0, seed=3)


def test_a_fault_in_the_commit_ends_that_request_and_no_other() -> None:
    engine = engine_of()
    ids = [engine.add_request([n + 3] * 6, greedy(6)) for n in range(3)]
    engine.step()
    victim = engine._requests[ids[1]].completions[0]

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("text")

    victim._text.push = broken  # type: ignore[method-assign]
    done = run_all(engine)
    assert [done[i].outputs[0].finish_reason for i in ids] == ["length", "error", "length"]
    assert "ValueError: text" in str(done[ids[1]].error)


def test_one_output_that_fails_ends_its_siblings_too() -> None:
    engine = engine_of()
    number = engine.add_request([5] * 9, greedy(6, n=3))
    other = engine.add_request([6] * 9, greedy(6))
    engine.step()
    engine._requests[number].completions[2].sampler.append = None  # type: ignore[assignment, method-assign]
    done = run_all(engine)
    assert [c.finish_reason for c in done[number].outputs] == ["error"] * 3
    assert done[other].outputs[0].finish_reason == "length"


def test_an_interrupt_in_a_step_is_passed_on_and_undone() -> None:
    engine = engine_of()
    number = engine.add_request([5] * 9, greedy(4))
    engine.step()

    def hook(at: str, batch: Batch | None) -> None:
        engine.model.executable.hook = lambda at, batch: None
        raise KeyboardInterrupt

    engine.model.executable.hook = hook
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    assert run_all(engine)[number].outputs[0].token_ids == continuation([5] * 9, 4, (None,))


def test_fail_all_answers_everybody() -> None:
    engine, fault = engine_of(max_num_seqs=1), TriviumError("over")
    ids = [engine.add_request([5] * 9, greedy(4)) for _ in range(3)]
    engine.step()
    outputs = engine.fail_all(fault)
    assert [o.request_id for o in outputs] == ids and all(o.error is fault for o in outputs)
    engine.kv.check_idle()


LIMIT = 40
"""Tokens of context behind which the device of the tests below fails."""


def deep_engine(
    kind: str, fails: Callable[[Batch], bool], *, model: Callable[..., Any] = fake_model, page_size: int = 64, pages: int = 12,
    seqs: int = 4, tokens: int = 8,
) -> Engine:  # fmt: skip
    """A step has fewer tokens than a page, so what a failed step drops takes several to compute again."""
    made = model(KINDS[kind], page_size=page_size, pages=pages)
    engine = engine_of(model=made, max_num_seqs=seqs, max_num_batched_tokens=tokens)

    def hook(at: str, batch: Batch | None) -> None:
        if batch is not None and fails(batch):
            raise Fault("too deep")

    engine.model.executable.hook = hook
    return engine


def bounded(engine: Engine, steps: int) -> dict[int, RequestOutput]:
    """Steps to the end, which must come."""
    done: dict[int, RequestOutput] = {}
    for _ in range(steps):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        if not engine.has_unfinished():
            assert not engine.model.executable.violations
            return done
    raise AssertionError(f"{steps} steps and no end: {engine.stats.failed_steps} of them failed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [fake_model, async_model])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("prompt", [LIMIT + 20, LIMIT - 5])
def test_a_request_that_fails_behind_what_one_step_computes_again_ends(kind: str, model: Any, others: int, prompt: int) -> None:
    engine = deep_engine(kind, lambda batch: max(batch.context_lens) > LIMIT, model=model)
    neighbours = prompts_of(others, LIMIT - 12)
    ids = [engine.add_request(p, greedy(10)) for p in neighbours]
    victim = engine.add_request([POISON] * prompt, greedy(30))
    done = bounded(engine, 200)
    assert done[victim].outputs[0].finish_reason == "error" and "too deep" in str(done[victim].error)
    assert done[victim].outputs[0].token_ids == continuation([POISON] * prompt, max(LIMIT + 1 - prompt, 0), KINDS[kind])
    for number, p in zip(ids, neighbours):
        assert done[number].outputs[0].token_ids == continuation(p, 10, KINDS[kind]) and done[number].error is None
    assert engine.stats.failed_steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_fails_with_deep_batches_still_ends_every_request(kind: str) -> None:
    engine = deep_engine(kind, lambda batch: batch.seqs > 1 and max(batch.context_lens) > LIMIT // 2)
    prompts = prompts_of(9, LIMIT, seed=2)
    ids = [engine.add_request(p, greedy(20)) for p in prompts]
    done = bounded(engine, 3000)
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 20, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_can_leave_and_others_come_while_one_computes_again_what_failed(kind: str) -> None:
    engine = deep_engine(kind, lambda batch: max(batch.context_lens) > LIMIT)
    victim = engine.add_request([POISON] * (LIMIT + 20), greedy(5))
    neighbour = engine.add_request([5] * 9, greedy(3))
    while not engine.stats.failed_steps:
        engine.step()
    late = engine.add_request([6] * 9, greedy(3))
    engine.step()
    aborted = engine.abort(victim)
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    done = bounded(engine, 60)
    assert done[late].outputs[0].token_ids == continuation([6] * 9, 3, KINDS[kind])
    assert neighbour not in done or done[neighbour].error is None


@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from([fake_model, async_model]), st.sampled_from([4, 16, 64]), st.integers(2, 4),
    st.integers(1, 6), st.integers(0, 12), st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_fault_that_depends_on_the_context_ends_what_reaches_it_and_nothing_else(
    kind: str, model: Any, page_size: int, room: int, seqs: int, more: int, seed: int
) -> None:
    """Also where pages are short and some are preempted, and with outputs that share pages."""
    pages = 1 + len(KINDS[kind]) * room * -(-(2 * LIMIT) // page_size)
    fails = lambda batch: max(batch.context_lens) > LIMIT
    engine = deep_engine(kind, fails, model=model, page_size=page_size, pages=pages, seqs=seqs, tokens=seqs + more)
    prompts, counts = prompts_of(8, LIMIT + 10, seed), [3 + (seed >> i) % 30 for i in range(8)]
    ids = [engine.add_request(p, greedy(c, n=1 + i % 2), priority=i % 3) for i, (p, c) in enumerate(zip(prompts, counts))]
    done = bounded(engine, 4000)
    for number, prompt, count in zip(ids, prompts, counts):
        fits, right = len(prompt) + count - 1 <= LIMIT, continuation(prompt, count, KINDS[kind])
        for output in done[number].outputs:
            assert output.finish_reason == ("length" if fits else "error")
            assert output.token_ids == right[: count if fits else len(output.token_ids)]
