"""A server for tests: the application over a tiny model, on a port of loopback, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trivium import AsyncLLM

SECRET = "k1"
AUTH = {"authorization": f"Bearer {SECRET}"}
LETTERS = [*range(97, 123), 32]
SPELL = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
"""Greedy, in letters and blanks: every token of the answer is one character of its text."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 24, **SPELL}
LONG = {**CHAT, "max_completion_tokens": 60}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


class Running:
    """A server that answers at `url`; `app` is the application."""

    def __init__(self, url: str, app: Any, server: Any) -> None:
        self.url, self.app, self._server = url, app, server

    @property
    def llm(self) -> AsyncLLM:
        """The first model."""
        return next(iter(self.app.models)).llm

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._server.server_state.connections)


@contextlib.contextmanager
def running(
    folder: Path | None, *, keys: tuple[str, ...] = (SECRET,), loading: dict[str, Any] | None = None, models: Any = None,
    **settings: Any,
) -> Iterator[Running]:  # fmt: skip
    """Serves the model in `folder` as "tiny", or `models`; keys: lines of a key file; settings: of
    trivium_server.Settings."""
    import uvicorn
    from trivium_server import App, Models, Settings, Slot
    from trivium_server.keys import Key, Keys
    from trivium_server.protocol import configured

    if models is None:
        assert folder is not None
        models = Models([Slot("tiny", loader(folder, **(loading or {})))], [("other", "tiny")])
    app = App(models, Settings(keys=Keys(map(Key.line, keys)), **settings))
    config = configured(app)
    server, started = uvicorn.Server(config), threading.Event()
    fault: list[BaseException] = []

    async def run() -> None:
        try:
            await models.start()
        except BaseException as error:
            fault.append(error)
            return
        finally:
            started.set()
        await server.serve([sock])

    with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.closing(models):
        thread = threading.Thread(target=lambda: asyncio.Runner(loop_factory=config.get_loop_factory()).run(run()))
        thread.start()
        started.wait()
        try:
            if fault:
                raise fault[0]
            yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", app, server)
        finally:
            server.should_exit = True
            thread.join()


def loader(folder: Path, **options: Any) -> Callable[[], AsyncLLM]:
    """Loads the model in `folder` with the reference backend."""
    exact = {"backend": "reference", "dtype": "float32", "progress": False}
    return lambda: AsyncLLM(folder, **{**exact, **options})


def until(true: Callable[[], bool], what: str) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of server-sent events, in order; [DONE] as the string."""
    lines = [part.removeprefix("data: ") for part in text.splitlines() if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in lines]


@contextlib.contextmanager
def beside(http: Any, known: str) -> Iterator[None]:
    """A stream that has begun and must give the known text, whatever happens in the meantime."""
    with http.stream("POST", CHATS, json={**LONG, "stream": True}) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        yield
        chunks = events("\n".join([first, *lines]))
    text = "".join(c["delta"].get("content") or "" for chunk in chunks[:-1] for c in chunk["choices"])
    assert chunks[-1] == "[DONE]" and text == known
    assert http.post(CHATS, json=LONG).json()["choices"][0]["message"]["content"] == known


def metric(http: Any, name: str, **labels: str) -> float:
    """Of /metrics, summed over what has the labels."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())
