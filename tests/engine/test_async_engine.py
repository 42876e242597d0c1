"""The engine behind asyncio. No test waits for time to pass: every wait is for an event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engine_runs import engine_of, greedy, prompts_of
from fake_model import Fault, continuation
from trivium.engine import AsyncEngine, Engine, RequestOutput
from trivium.errors import BackendError, InvalidRequestError


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
        with pytest.raises(BackendError, match="closed"):
            await served.generate([5], greedy(1))

    run(engine_of(), body)
