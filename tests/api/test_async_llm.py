"""AsyncLLM: the same answers as LLM, many tasks at once, cancellation, the end."""

from __future__ import annotations

import asyncio

import pytest
from chat_models import make_chat_model

from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import InvalidRequestError, TriviumError

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


def test_a_closed_model_refuses(folder):
    async def run():
        llm = AsyncLLM(folder, backend="reference")
        async with llm:
            pass
        with pytest.raises(TriviumError, match="closed"):
            await llm.generate("ab", GREEDY)

    asyncio.run(run())
