"""AsyncLLM: the same answers as LLM, many tasks at once, cancellation, the end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from chat_models import make_chat_model

from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import ClosedError, DeadlineError, InvalidRequestError, OverloadedError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def want(folder):
    with LLM(folder, backend="reference") as llm:
        return {p: llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in ("ab", "cd", "[user]hi[assistant]")}


def with_model(folder, job):
    async def run():
        async with AsyncLLM(folder, backend="reference") as llm:
            return await job(llm)

    return asyncio.run(run())


async def collect(llm, prompt):
    return [t async for out in llm.stream(prompt, GREEDY) for t in out.outputs[0].token_ids]


def test_tasks_get_what_they_would_get_alone(folder, want):
    async def job(llm):
        chat = [{"role": "user", "content": "hi"}]
        return await asyncio.gather(
            llm.generate(["ab", "cd"], GREEDY), collect(llm, "ab"), llm.chat(chat, GREEDY), collect(llm, chat)
        )

    batch, stream, chat, chat_stream = with_model(folder, job)
    assert [o.outputs[0].token_ids for o in batch] == [want["ab"], want["cd"]]
    assert stream == want["ab"] and chat[0].outputs[0].token_ids == chat_stream == want["[user]hi[assistant]"]


def test_a_bad_request_is_refused_and_the_others_go_on(folder, want):
    async def job(llm):
        good = asyncio.ensure_future(collect(llm, "ab"))
        with pytest.raises(InvalidRequestError, match="out of the vocabulary"):
            await llm.generate(["cd", [10**6]], GREEDY)
        return await good

    assert with_model(folder, job) == want["ab"]


def test_leaving_a_stream_or_cancelling_aborts_the_request(folder):
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def job(llm):
        stream = llm.stream("ab", endless)
        await anext(stream)
        await stream.aclose()
        task = asyncio.ensure_future(llm.generate("cd", endless))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await llm.async_engine.call(lambda engine: (engine.has_unfinished(), engine.check()))

    assert with_model(folder, job) == (False, None)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_requests_are_aborted_by_id_counted_and_timed(folder, backend):
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def run():
        async with AsyncLLM(folder, backend) as llm:
            stream = llm.stream("ab", endless, priority=1)
            first = await anext(stream)
            assert llm.is_ready and (await llm.stats()).running == 1
            assert await llm.abort(first.request_id) and not await llm.abort(first.request_id)
            assert [out async for out in stream][-1].outputs[0].finish_reason == "abort"
            with pytest.raises(DeadlineError, match="timeout was over"):
                await llm.generate("cd", endless, timeout=1e-6)
            stats = await llm.stats()
            assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
            assert (stats.aborted_requests, stats.finished_requests) == (1, 2)
        assert not llm.is_ready

    asyncio.run(run())


def test_more_than_may_wait_is_refused_whole(folder, want):
    async def run():
        async with AsyncLLM(folder, backend="reference", max_num_seqs=1, max_waiting_requests=2) as llm:
            with pytest.raises(OverloadedError, match="max_waiting_requests"):
                await llm.generate(["ab", "cd"] * 40, GREEDY)
            assert await collect(llm, "ab") == want["ab"]

    asyncio.run(run())
    with LLM(folder, backend="reference", max_num_seqs=1, max_waiting_requests=2) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(["ab", "cd"] * 4, GREEDY)] == [want["ab"], want["cd"]] * 4


def test_a_closed_model_refuses(folder):
    async def run():
        llm = AsyncLLM(folder, backend="reference")
        async with llm:
            pass
        with pytest.raises(ClosedError, match="closed") as refusal:
            await llm.generate("ab", GREEDY)
        return str(refusal.value)

    said = asyncio.run(run())
    llm = LLM(folder, backend="reference")
    llm.close()
    with pytest.raises(ClosedError) as refusal:
        llm.generate("ab", GREEDY)
    assert str(refusal.value) == said


def test_while_a_prompt_is_cut_into_tokens_others_go_on(folder, want, monkeypatch):
    may = threading.Event()

    async def job(llm):
        encode = llm.tokenizer.encode

        def slow(text, **options):
            if text == "cd":
                assert may.wait(60)
            return encode(text, **options)

        monkeypatch.setattr(llm.tokenizer, "encode", slow)
        waiting = [asyncio.ensure_future(llm.generate("cd", GREEDY)), asyncio.ensure_future(collect(llm, "cd"))]
        assert await collect(llm, "ab") == want["ab"] and not any(task.done() for task in waiting)
        may.set()
        [output], streamed = await asyncio.gather(*waiting)
        assert output.outputs[0].token_ids == streamed == want["cd"]

    with_model(folder, job)
