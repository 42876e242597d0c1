"""The engine behind asyncio. No test waits for time to pass: every wait is for an event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from async_device import async_model
from engine_runs import engine_of, greedy, prompts_of
from fake_model import FakeTokenizer, Fault, continuation
from trivium.engine import Engine, RequestOutput
from trivium.engine.async_engine import AsyncEngine
from trivium.errors import BackendError, ClosedError, InvalidRequestError, OverloadedError


def run(engine: Engine, body: Callable[[AsyncEngine], Awaitable[Any]]) -> Any:
    """Runs `body` against the engine and closes it; fails instead of hanging."""

    async def main() -> Any:
        async with AsyncEngine(engine) as served:
            return await asyncio.wait_for(body(served), 60)

    return asyncio.run(main())


async def collect(served: AsyncEngine, prompt: list[int], **fields: Any) -> list[RequestOutput]:
    return [output async for output in served.stream(prompt, greedy(12, **fields))]


async def until_idle(served: AsyncEngine) -> int:
    """Waits for the engine to have nothing to do; returns its free pages."""
    while await served.call(lambda engine: engine.has_unfinished()):
        await asyncio.sleep(0)
    return int(await served.call(lambda engine: engine.kv.pool.available))


def test_many_tasks_get_their_own_tokens_streamed_and_whole() -> None:
    prompts = prompts_of(12, 40)

    async def body(served: AsyncEngine) -> None:
        streams = [collect(served, p) for p in prompts]
        whole = [served.generate(p, greedy(12)) for p in prompts]
        results = await asyncio.gather(*streams, *whole)
        for prompt, news, output in zip(prompts, results, results[len(prompts) :]):
            expected = continuation(prompt, 12, (None,))
            assert [t for o in news for t in o.outputs[0].token_ids] == output.outputs[0].token_ids == expected
            assert news[-1].finished and news[-1].metrics is not None

    run(engine_of(max_num_seqs=5), body)


def test_bad_requests_are_refused_to_the_caller() -> None:
    async def body(served: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            await served.generate([-1], greedy(3))
        assert (await served.generate([5], greedy(3))).outputs[0].finish_reason == "length"

    run(engine_of(), body)


@pytest.mark.faults
def test_o18_a_client_that_goes_away_frees_its_pages() -> None:
    engine = engine_of(max_model_len=100_000, pages=30_000, enable_prefix_caching=False)

    async def body(served: AsyncEngine) -> None:
        stream = served.stream([5, 6, 7], greedy(90_000))
        first = await anext(stream)
        assert not first.finished
        await stream.aclose()
        assert await served.call(lambda engine: list(engine._requests)) == []  # it is gone before whatever is asked next
        assert await until_idle(served) == 30_000
        task = asyncio.create_task(served.generate([5, 6, 7], greedy(90_000)))
        while not await served.call(lambda engine: engine.has_unfinished()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await until_idle(served) == 30_000

    run(engine, body)


@pytest.mark.faults
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("state", ["decoding", "in its prompt", "waiting"])
def test_o18_pages_are_free_within_two_steps_of_the_client_leaving(state: str, ahead: bool) -> None:
    sizes: dict[str, Any] = {"max_model_len": 2000, "pages": 600}
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    engine = engine_of(model=async_model(**sizes), **limits) if ahead else engine_of(**sizes, **limits)
    prompt = [5] * (900 if state == "in its prompt" else 6)
    steps: list[set[int]] = []
    step = engine.step

    def counted() -> list[RequestOutput]:
        outputs = step()
        steps.append({c.request.id for c in engine._completions.values()})
        return outputs

    engine.step = counted  # type: ignore[method-assign]

    async def body(served: AsyncEngine) -> None:
        others = [served.stream([7 + n], greedy(1900)) for n in range(2 if state == "waiting" else 1)]
        for other in others:
            await anext(other)
        task = asyncio.create_task(served.generate(prompt, greedy(1000)))
        while not await served.call(lambda engine: len(engine._requests) > len(others)):
            await asyncio.sleep(0)
        await anext(others[0])
        task.cancel()
        left_at = len(steps)
        with pytest.raises(asyncio.CancelledError):
            await task
        while await served.call(lambda engine: len(engine._requests) > len(others)):
            await asyncio.sleep(0)
        assert (await served.stats()).aborted_requests == 1
        number = len(others) + 1
        assert not any(number in alive for alive in steps[left_at + 2 :])
        await served.call(Engine.check)  # pages are held by those that run and nobody else
        for other in others:
            await other.aclose()

    run(engine, body)


@pytest.mark.faults
def test_o22_requests_of_one_client_id_are_told_apart() -> None:
    async def body(served: AsyncEngine) -> None:
        one, two = (served.stream([n, 8], greedy(300), client_id="same") for n in (5, 6))
        first, second = await anext(one), await anext(two)
        assert first.request_id != second.request_id and first.client_id == second.client_id == "same"
        assert await served.abort(first.request_id) and not await served.abort(first.request_id)
        last = [first, *[output async for output in one]][-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"
        tokens = second.outputs[0].token_ids + [t async for output in two for t in output.outputs[0].token_ids]
        assert tokens == continuation([6, 8], 300, (None,))

    run(engine_of(), body)


def test_news_of_a_slow_reader_become_one_piece_without_loss() -> None:
    async def body(served: AsyncEngine) -> None:
        stream = served.stream([5, 6, 7], greedy(200, n=2, logprobs=1))
        news = [await anext(stream)]
        while await served.call(lambda engine: engine.has_unfinished()):
            await asyncio.sleep(0)
        news += [output async for output in stream]
        assert len(news) <= 3 and news[-1].finished
        for index in (0, 1):
            parts = [c for output in news for c in output.outputs if c.index == index]
            tokens = [t for c in parts for t in c.token_ids]
            assert tokens == continuation([5, 6, 7], 200, (None,))
            assert "".join(c.text for c in parts) == FakeTokenizer().text(tokens)
            assert [next(iter(p)) for c in parts for p in c.logprobs or []] == tokens
            assert parts[-1].finish_reason == "length" and parts[-1].cumulative_logprob is not None

    run(engine_of(), body)


def test_streams_of_several_event_loops_share_the_engine() -> None:
    prompts = prompts_of(6, 20)
    with ThreadPoolExecutor(3) as pool:
        served = AsyncEngine(engine_of(max_num_seqs=4))
        gather = lambda some: asyncio.run(_all(served, some))
        results = [news for some in pool.map(gather, (prompts[:2], prompts[2:4], prompts[4:])) for news in some]
        served.close()
    for prompt, news in zip(prompts, results):
        assert [t for o in news for t in o.outputs[0].token_ids] == continuation(prompt, 12, (None,))


async def _all(served: AsyncEngine, prompts: list[list[int]]) -> list[list[RequestOutput]]:
    return await asyncio.gather(*[collect(served, prompt) for prompt in prompts])


def test_a_loop_that_was_closed_under_its_stream_aborts_it() -> None:
    engine = engine_of(max_model_len=100_000, pages=30_000)
    served = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    stream = served.stream([5], greedy(90_000))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def idle() -> None:
        await until_idle(served)

    asyncio.run(asyncio.wait_for(idle(), 60))
    served.close()
    assert engine.stats.aborted_requests == 1


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt])
def test_what_looks_like_an_interrupt_in_a_backend_does_not_end_the_thread(fault: type[BaseException]) -> None:
    engine = engine_of()
    left = [1]

    def hook(at: str, batch: Any) -> None:
        if batch is not None and 66 in batch.token_ids and (fault is SystemExit or left):
            left.clear()
            raise fault("the backend's own")

    engine.model.executable.hook = hook

    async def body(served: AsyncEngine) -> None:
        output = await served.generate([66, 66], greedy(3))
        if fault is SystemExit:
            assert output.outputs[0].finish_reason == "error" and "SystemExit: the backend's own" in str(output.error)
        else:
            assert output.outputs[0].token_ids == continuation([66, 66], 3, (None,))
        assert served.is_ready and (await served.generate([5], greedy(1))).error is None

    run(engine, body)


def test_a_backend_that_interrupts_every_step_stops_the_engine_with_the_reason() -> None:
    engine = engine_of()

    def hook(at: str, batch: Any) -> None:
        raise KeyboardInterrupt("always")

    engine.model.executable.hook = hook

    async def body(served: AsyncEngine) -> None:
        outputs = await asyncio.gather(*[served.generate([5 + n], greedy(3)) for n in range(4)])
        assert all("KeyboardInterrupt: always" in str(o.error) for o in outputs) and not served.is_ready
        with pytest.raises(BackendError, match="stopped after 3 failed steps"):
            await served.generate([5], greedy(1))

    run(engine, body)


def test_too_much_is_refused_with_a_hint_and_what_runs_goes_on() -> None:
    async def body(served: AsyncEngine) -> None:
        streams = [served.stream([5 + n], greedy(300)) for n in range(2)]
        firsts = [await anext(stream) for stream in streams]
        waiting = asyncio.create_task(served.generate([9], greedy(2)))
        while not (await served.stats()).waiting:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="max_waiting_requests 1") as refusal:
            await served.generate([10], greedy(2))
        assert refusal.value.code == "overloaded" and refusal.value.retry_after > 0
        for stream, first in zip(streams, firsts):
            await served.abort(first.request_id)
            assert [output async for output in stream][-1].finished
        assert (await waiting).outputs[0].token_ids == continuation([9], 2, (None,))

    run(engine_of(max_num_seqs=2, max_waiting_requests=1), body)


def test_a_fault_of_a_step_reaches_its_client_and_the_loop_goes_on() -> None:
    engine = engine_of()

    def hook(at: str, batch: Any) -> None:
        if batch is not None and 66 in batch.token_ids:
            raise Fault("poison")

    engine.model.executable.hook = hook

    async def body(served: AsyncEngine) -> None:
        bad = await served.generate([66, 66], greedy(3))
        assert bad.outputs[0].finish_reason == "error" and isinstance(bad.error, BackendError)
        assert (await served.generate([5], greedy(1))).error is None

    run(engine, body)


def test_an_engine_that_cannot_step_stops_and_answers_everybody() -> None:
    engine = engine_of()

    async def body(served: AsyncEngine) -> None:
        stream = served.stream([5], greedy(400))
        await anext(stream)
        await served.call(lambda engine: setattr(engine.scheduler, "plan", None))
        last = [output async for output in stream][-1]
        assert last.finished and last.outputs[0].finish_reason == "error"
        assert "stopped after 3 failed steps: TypeError" in str(last.error)
        with pytest.raises(BackendError, match="stopped"):
            await served.generate([5], greedy(1))

    run(engine, body)


def test_closing_ends_what_runs() -> None:
    async def body(served: AsyncEngine) -> None:
        stream = served.stream([5], greedy(400))
        await anext(stream)
        await asyncio.to_thread(served.close)
        assert [output async for output in stream][-1].outputs[0].finish_reason in ("error", "length")
        with pytest.raises(ClosedError, match="closed"):
            await served.generate([5], greedy(1))

    run(engine_of(), body)
