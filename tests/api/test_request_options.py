"""What LLM and AsyncLLM take beside prompts and sampling parameters: priority, request_id, cache_salt."""

from __future__ import annotations

import asyncio
import threading

import pytest
from chat_models import make_chat_model

from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = "so long that it fills pages of the cache " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request, folder):
    with LLM(folder, backend=request.param, max_num_seqs=1, num_kv_blocks=60) as model:
        yield model
        model.engine.check()
        assert not model.engine.has_unfinished() and not model._inbox


def with_async(folder, backend, job):
    async def run():
        async with AsyncLLM(folder, backend=backend, max_num_seqs=1, num_kv_blocks=60) as model:
            return await job(model)

    return asyncio.run(run())


def finished_by(engine):
    """Notes the client's ids in the order in which requests end."""
    order, step = [], engine.step

    def noting():
        outputs = step()
        order.extend(output.client_id for output in outputs if output.finished)
        return outputs

    engine.step = noting
    return order


def test_request_ids_are_echoed_and_need_not_be_unique(llm):
    chat = [{"role": "user", "content": "hi"}]
    assert [o.client_id for o in llm.generate(["a", "b"], GREEDY, request_id=["x", "y"])] == ["x", "y"]
    same = llm.generate(["a", "b"], GREEDY, request_id="x")
    assert [o.client_id for o in same] == ["x", "x"] and same[0].request_id != same[1].request_id
    assert [o.client_id for o in llm.generate(["a", "b"], GREEDY, request_id=[None, ""])] == [None, ""]
    assert llm.chat(chat, GREEDY, request_id="x", add_generation_prompt=True)[0].client_id == "x"
    assert {o.client_id for p in ("a", chat) for o in llm.stream(p, GREEDY, request_id="z")} == {"z"}
    assert llm.embed(["a", "b"], request_id=["x", "y"])[1].client_id == "y"
    assert llm.generate("a", GREEDY)[0].client_id is None


def test_the_lower_priority_runs_first(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", llm.engine.step)
    order = finished_by(llm.engine)
    llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, -1], request_id=["2", "0", "-1"])
    llm.chat([[{"role": "user", "content": x}] for x in "ab"], GREEDY, priority=[1, 0], request_id=["1", "0"])
    assert order == ["-1", "0", "2", "0", "1"]


def cached(outputs):
    return [output.metrics.num_cached_tokens for output in outputs]


def test_pages_are_shared_between_equal_salts_only(llm):
    assert cached(llm.generate(LONG, GREEDY, cache_salt="mine")) == [0]
    assert cached(llm.generate(LONG, GREEDY, cache_salt="yours")) == cached(llm.generate(LONG, GREEDY)) == [0]
    mine, nobody, new = cached(llm.generate([LONG] * 3, GREEDY, cache_salt=["mine", "", "new"]))
    assert mine == nobody > 0 == new
    assert [o.metrics.num_cached_tokens for o in llm.stream(LONG, GREEDY, cache_salt="mine") if o.finished] == [mine]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_async_front_takes_the_same(folder, backend):
    async def job(llm):
        order = finished_by(llm.async_engine._engine)
        gate = threading.Event()
        held = asyncio.ensure_future(llm.async_engine.call(lambda engine: gate.wait()))
        asked = asyncio.ensure_future(llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, -1], request_id=["2", "0", "-1"]))
        for _ in range(20):
            await asyncio.sleep(0)  # every request is on its way before the engine looks
        gate.set()
        await held
        ids = [o.client_id for o in await asked]
        chat = [{"role": "user", "content": LONG}]
        salted = [cached(await llm.chat(chat, GREEDY, cache_salt=salt))[0] > 0 for salt in ("x", "y", "x")]
        streamed = [o async for o in llm.stream(chat, GREEDY, request_id="s", cache_salt="y")]
        with pytest.raises(InvalidRequestError, match="priority must be of type int"):
            await llm.generate("a", GREEDY, priority="high")
        return order[:3], ids, salted, streamed[-1].client_id, cached(streamed[-1:])[0] > 0

    assert with_async(folder, backend, job) == (["-1", "0", "2"], ["2", "0", "-1"], [False, False, True], "s", True)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("priority", "high"), ("priority", True), ("priority", 1.0), ("priority", [0]), ("priority", None), ("request_id", 0),
     ("request_id", ["x", 5]), ("request_id", ["x"] * 3), ("cache_salt", None), ("cache_salt", b"x"), ("cache_salt", [])],
)  # fmt: skip
def test_what_they_can_t_be_is_refused_by_name(llm, name, bad):
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate(["a", "b"], GREEDY, **{name: bad})
    assert refusal.value.param == name and not llm.engine.has_unfinished()


def test_other_names_are_no_arguments(llm):
    for name in ("stream", "client_id", "pooling", "salt"):
        with pytest.raises(TypeError, match=name):
            llm.generate("a", GREEDY, **{name: None})
    with pytest.raises(InvalidRequestError, match="belong to a chat"):
        next(llm.stream("a", GREEDY, salt="x"))
