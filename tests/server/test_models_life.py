"""When models are loaded and given up, and what the calls see of it."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHAT, events, loader, running
from trivium import SamplingParams, errors
from trivium_server import Models, Slot
from trivium_server.faults import Refusal
from trivium_server.ollama import kept

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
LONG = {**CHAT, "max_completion_tokens": 400, "stream": True}


class Made:
    """What Models asks of an AsyncLLM. log: gets what happens to it."""

    def __init__(self, name, log):
        memory = SimpleNamespace(weights=3, kv=4)
        session, traced = SimpleNamespace(memory=lambda: memory), SimpleNamespace(states=(1,))
        self.loaded = SimpleNamespace(max_model_len=8, architecture="made", session=session, traced=traced)
        self.tokenizer = SimpleNamespace(chat_template=None, tokens=lambda: ["a"])
        self.name, self.log, self.is_ready = name, log, True
        self.takes_images = self.cross_encoder = False
        log.append(f"+{name}")

    def default_params(self):
        return SamplingParams()

    async def stats(self):
        from trivium.engine import Stats

        return Stats(steps=2, running=1)

    def close(self):
        self.log.append(f"-{self.name}")


def made(names, **options):
    """(Models of that name, the log of what is loaded and closed)."""
    log = []
    return Models([Slot(name, lambda name=name: Made(name, log)) for name in names], **options), log


async def visit(models, name, **options):
    async with models.use(name, **options):
        pass


async def until(true):
    """Lets the others run until it is so."""
    while not true():
        await asyncio.sleep(0.001)


def test_the_least_recently_used_makes_room():
    models, log = made("abc", max_loaded=2)

    async def run():
        await models.start()
        assert log == ["+a", "+b"] and models.ready
        await visit(models, "a")
        await visit(models, "c")
        await visit(models, "a")
        await visit(models, "b")

    asyncio.run(run())
    assert log == ["+a", "+b", "-b", "+c", "-c", "+b"]


def test_a_model_that_has_calls_stays_and_then_makes_room_for_who_waited():
    models, log = made("ab", max_loaded=1)

    async def run():
        async with models.use("a") as served:
            other = asyncio.ensure_future(visit(models, "b"))
            await until(lambda: models.find("a")._leaving)
            late = asyncio.ensure_future(visit(models, "a"))
            await asyncio.sleep(0)
            assert served.llm.is_ready and not other.done() and not late.done() and log == ["+a"]
        await asyncio.gather(other, late)

    asyncio.run(run())
    assert log == ["+a", "-a", "+b", "-b", "+a"]


def test_who_does_not_wait_any_more_unloads_nobody():
    models, log = made("ab", max_loaded=1)

    async def run():
        async with models.use("a"):
            with pytest.raises(errors.DeadlineError, match="before b was loaded"):
                await visit(models, "b", seconds=0.01)
            await visit(models, "a")
        assert models.find("a").usable

    asyncio.run(run())
    assert log == ["+a"]


def test_a_call_may_come_just_as_the_last_one_gives_up():
    models, log = made("ab", max_loaded=1)

    async def run():
        async with models.use("a"):
            first = asyncio.ensure_future(visit(models, "b"))
            await until(lambda: models.find("a")._leaving)
            first.cancel()
            second = asyncio.ensure_future(visit(models, "b"))
            await asyncio.wait({first})
            assert first.cancelled() and not second.done()
        await second

    asyncio.run(run())
    assert log == ["+a", "-a", "+b"]


def test_how_many_may_wait():
    models, _ = made("a", max_waiting=1)

    async def run():
        results = await asyncio.gather(visit(models, "a"), visit(models, "a"), return_exceptions=True)
        assert results[0] is None and isinstance(results[1], errors.OverloadedError)
        await visit(models, "a")

    asyncio.run(run())


def test_keep_alive_says_when_a_model_goes():
    models, log = made("a", idle_seconds=3600)
    slot = models.find("a")

    async def run():
        await visit(models, "a")
        assert 3500 < models.expires(slot) <= 3600
        await visit(models, "a", keep=60)
        await visit(models, "a")
        assert 50 < models.expires(slot) <= 60
        await visit(models, "a", keep=math.inf)
        assert models.expires(slot) == math.inf
        async with models.use("a", keep=0):
            async with models.use("a"):
                pass
            await asyncio.sleep(0.01)
            assert log == ["+a"]
        await until(lambda: slot.llm is None)
        await visit(models, "a")
        assert models.expires(slot) > 3500 and slot.facts.size == 7

    asyncio.run(run())
    assert log == ["+a", "-a", "+a"]


def test_a_call_that_comes_before_the_time_is_up_keeps_it():
    models, log = made("a")

    async def run():
        await visit(models, "a", keep=0)
        async with models.use("a", keep=math.inf):
            pass
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert log == ["+a"]


def test_a_load_that_failed_is_tried_again():
    faults = [errors.CapacityError("no room for it"), OSError("/secret/path")]
    log = []

    def load():
        if faults:
            raise faults.pop(0)
        return Made("a", log)

    models = Models([Slot("a", load)], retry=60)
    slot = models.find("a")

    async def run():
        with pytest.raises(Refusal) as first:
            await visit(models, "a")
        with pytest.raises(Refusal) as again:
            await visit(models, "a")
        assert first.value.message == again.value.message == "a could not be loaded: no room for it"
        assert (first.value.status, first.value.code) == (503, "model_unavailable") and int(first.value.headers["retry-after"]) > 50
        assert len(faults) == 1, "before its time it is not tried again"
        slot._retry_at = 0.0
        with pytest.raises(Refusal) as second:
            await visit(models, "a")
        assert "OSError" in second.value.message and "secret" not in second.value.message
        slot._retry_at = 0.0
        await visit(models, "a")

    asyncio.run(run())
    assert log == ["+a"] and (slot.loads, slot.failed_loads) == (1, 2)


def test_an_engine_that_has_stopped_is_replaced():
    models, log = made("a")

    async def run():
        await models.start()
        models.find("a").llm.is_ready = False
        assert not models.ready
        await visit(models, "a")
        assert models.ready and (await models.find("a").stats()).steps == 4

    asyncio.run(run())
    assert log == ["+a", "-a", "+a"]


def test_what_fails_at_the_start_is_raised_as_it_is():
    def load():
        raise errors.CheckpointError("damaged")

    async def run():
        models = Models([Slot("a", load)])
        with pytest.raises(errors.CheckpointError, match="damaged"):
            await models.start()
        assert not models.ready

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, 0), (2.5, 2.5), (-1, math.inf), ("5m", 300), ("1h30m", 5400), ("-1s", math.inf), ("0", 0), ("1.5s", 1.5)],
)  # fmt: skip
def test_durations_are_written_as_ollamas_clients_do(given, seconds):
    assert kept(given) == seconds


def test_a_duration_without_a_unit_is_refused(http):
    for wrong in ("300", "5 m", "", "soon", "m5"):
        reply = http.post("/api/generate", json={"model": "tiny", "prompt": "a", "keep_alive": wrong})
        assert reply.status_code == 400 and "keep_alive" in reply.json()["error"]


def test_an_idle_model_gives_its_memory_back_and_comes_back(folder):
    import httpx

    models = Models([Slot("tiny", loader(folder))], idle_seconds=0.05)
    slot = models.find("tiny")
    with running(folder, models=models) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        text = client.post(CHATS, json=CHAT).json()["choices"][0]["message"]["content"]

        def made():
            return float(re.search(r'generation_tokens_total{model_name="tiny",.*} (\S+)', client.get("/metrics").text)[1])

        def unload():
            gone = weakref.ref(slot.llm.loaded.session) if slot.llm is not None else lambda: None
            while slot.llm is not None or gone() is not None:
                time.sleep(0.01)
                gc.collect()

        unload()
        assert client.get("/health").status_code == 200 and client.get("/api/ps").json() == {"models": []}
        [listed] = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["max_model_len"]) == ("tiny", 512)
        before = made()
        assert slot.llm is None, "asking how it is does not wake it"
        stream = events(client.post(CHATS, json={**CHAT, "stream": True}).text)
        assert "".join(c["delta"].get("content") or "" for chunk in stream[:-1] for c in chunk["choices"]) == text
        assert slot.loads == 2
        unload()
        assert made() == before + CHAT["max_completion_tokens"]


def test_ollamas_clients_load_and_unload(folder):
    import httpx

    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        asked = {"model": "tiny"}
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
        assert client.post("/api/generate", json={**asked, "keep_alive": "1h"}).json()["done_reason"] == "load"
        [model] = client.get("/api/ps").json()["models"]
        assert model["size"] == model["size_vram"] > 0 and not model["expires_at"].startswith("9999")
        assert client.post("/api/chat", json={**asked, "keep_alive": 0}).json()["done_reason"] == "unload"
        while client.get("/api/ps").json()["models"]:
            pass
        assert client.post("/api/generate", json={**asked, "keep_alive": 0}).json()["done_reason"] == "unload"
        assert server.llm is None, "what is not loaded is not loaded to be unloaded"
        assert client.post("/api/show", json=asked).json()["details"]["family"].startswith("Llama") and server.llm is None
        assert len(client.post("/api/embed", json={**asked, "input": "a"}).json()["embeddings"]) == 1


def test_a_stream_goes_on_while_another_model_loads(folder, tmp_path):
    import httpx

    may, begun = threading.Event(), threading.Event()
    second = make_chat_model(tmp_path / "second")

    def load():
        begun.set()
        may.wait(60)
        return loader(second)()

    models = Models([Slot("tiny", loader(folder)), Slot("slow", loader(second))])
    with running(folder, models=models) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        models.find("slow").load = load
        client.post("/api/generate", json={"model": "slow", "keep_alive": 0})
        while models.find("slow").llm is not None:
            pass
        slow, replies = {**CHAT, "model": "slow"}, []

        def ask():
            replies.append(httpx.post(server.url + CHATS, json=slow, headers=AUTH, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        begun.wait(60)
        stream = events(client.post(CHATS, json=LONG).text)
        assert stream[-1] == "[DONE]" and not replies
        late = client.post(CHATS, json={**slow, "timeout": 0.05})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        late = client.post("/api/chat", json={"model": "slow", "messages": CHAT["messages"]}, headers={"x-request-timeout": "0.05"})
        assert late.status_code == 504
        may.set()
        thread.join()
        assert replies[0].status_code == 200 and replies[0].headers["x-model-version"] == "slow"


def test_health_waits_for_the_start_and_lists_do_not():
    from trivium_server import App

    may = threading.Event()
    models, log = made("a")
    first = models.find("a").load
    models.find("a").load = lambda: (may.wait(60), first())[1]

    async def ask(path):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        await App(models)(scope, receive, send)
        return sent[0]["status"]

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b""} if not asked.pop() else await asyncio.Event().wait()

    asked = [True, False] * 9

    async def run():
        starting = asyncio.ensure_future(models.start())
        await until(lambda: models.find("a")._begun)
        assert await ask("/health") == 503 and await ask("/v1/models") == 200 and await ask("/live") == 200
        may.set()
        await starting
        assert await ask("/health") == 200

    asyncio.run(run())
    assert log == ["+a"]
