"""What a web framework costs: server CPU time a streamed token, by candidate, printed as JSON.

    python benchmarks/server_wire.py [--streams 32] [--tokens 300] [--rate 1500] [--repeat 3] [CANDIDATE ...]

Every candidate answers POST / with one server-sent event a token, as a chat chunk, from a made-up engine: a thread that wakes the
event loop once a step, for all streams. The server is a process of its own on loopback; its CPU time (user and system, its engine
included) is read before and after. "trivium" is the server as it is, with that engine for a model. The best of `repeat` runs
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

from trivium import CompletionOutput, RequestOutput, SamplingParams
from trivium.text.events import ContentDelta

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 16, "temperature": 0.0}


class Ticker:
    """The made-up engine: `rate` tokens a second over all streams, a step for all of them at once."""

    def __init__(self, streams: int, tokens: int, rate: float) -> None:
        self.streams, self.tokens, self.seconds = streams, tokens, streams / rate
        self.events: list[asyncio.Event] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.seconds)
            if self.loop is not None and len(self.events) == self.streams:
                self.loop.call_soon_threadsafe(lambda: [event.set() for event in self.events])

    async def news(self) -> AsyncIterator[str]:
        """The text of one stream, a token at a time."""
        self.loop, event = asyncio.get_running_loop(), asyncio.Event()
        self.events = [*self.events, event]
        for _ in range(self.tokens):
            await event.wait()
            event.clear()
            yield " token"
        self.events = [other for other in self.events if other is not event]


def chunk(text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def asgi(ticker: Ticker) -> Any:
    """msgspec types, no framework."""
    import msgspec

    Body = msgspec.defstruct("Body", [("model", str), ("messages", list[dict[str, Any]]), ("stream", bool), ("max_tokens", int)])
    decode, encode = msgspec.json.Decoder(Body).decode, msgspec.json.Encoder().encode

    async def app(scope: Any, receive: Any, send: Any) -> None:
        decode((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async for text in ticker.news():
            await send({"type": "http.response.body", "body": b"data: " + encode(chunk(text)) + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


def starlette(ticker: Ticker) -> Any:
    """msgspec types, Starlette's routes and its StreamingResponse."""
    import msgspec
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    Body = msgspec.defstruct("Body", [("model", str), ("messages", list[dict[str, Any]]), ("stream", bool), ("max_tokens", int)])
    encode = msgspec.json.Encoder().encode

    async def answer(request: Any) -> Any:
        msgspec.json.decode(await request.body(), type=Body)

        async def events() -> AsyncIterator[bytes]:
            async for text in ticker.news():
                yield b"data: " + encode(chunk(text)) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


def litestar(ticker: Ticker) -> Any:
    """Litestar with a msgspec type and its Stream."""
    import msgspec
    from litestar import Litestar, post
    from litestar.response import Stream

    Body = msgspec.defstruct("Body", [("model", str), ("messages", list[dict[str, Any]]), ("stream", bool), ("max_tokens", int)])
    encode = msgspec.json.Encoder().encode

    async def answer(data: Any) -> Any:
        async def events() -> AsyncIterator[bytes]:
            async for text in ticker.news():
                yield b"data: " + encode(chunk(text)) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return Stream(events(), media_type="text/event-stream")

    answer.__annotations__ = {"data": Body, "return": Stream}
    return Litestar([post("/")(answer)], openapi_config=None)


def fastapi(ticker: Ticker) -> Any:
    """FastAPI with pydantic types in both directions."""
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import create_model

    many = list[dict[str, Any]]
    Body = create_model("Body", model=(str, ...), messages=(many, ...), stream=(bool, ...), max_tokens=(int, ...))
    Chunk = create_model("Chunk", id=(str, ...), object=(str, ...), created=(int, ...), model=(str, ...), choices=(many, ...))
    app = FastAPI()

    async def answer(body: Any) -> Any:
        async def events() -> AsyncIterator[str]:
            async for text in ticker.news():
                yield f"data: {Chunk(**chunk(text)).model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    answer.__annotations__ = {"body": Body}
    app.post("/")(answer)
    return app


class Model:
    """What trivium's server asks of a model, answered by the made-up engine."""

    is_ready = True

    def __init__(self, ticker: Ticker) -> None:
        session = SimpleNamespace(memory=lambda: SimpleNamespace(weights=0, kv=0))
        self.loaded = SimpleNamespace(max_model_len=1 << 20, architecture="none", session=session)
        self.ticker, self.tokenizer = ticker, SimpleNamespace(chat_template=None)

    def default_params(self, **fields: Any) -> Any:
        return SamplingParams(**fields)

    async def stream(self, prompt: Any, params: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        yield RequestOutput(1, [1], [], finished=False)
        async for text in self.ticker.news():
            yield RequestOutput(1, [1], [CompletionOutput(0, text, [1], None, events=[ContentDelta(text)])], finished=False)
        yield RequestOutput(1, [1], [CompletionOutput(0, "", [], "length", events=[])], finished=True)


def trivium(ticker: Ticker) -> Any:
    """trivium's own server."""
    from trivium_server import App, Models, Slot

    return App(Models([Slot("m", lambda: cast(Any, Model(ticker)))]))


CANDIDATES: dict[str, Callable[[Ticker], Any]] = {f.__name__: f for f in (asgi, starlette, litestar, fastapi, trivium)}
PATHS = {"trivium": "/v1/chat/completions"}
LOOPS = {"asgi-h11-asyncio": ("asgi", "h11", "asyncio")}
"""Candidates with another parser and event loop than httptools and uvloop."""


def serve(name: str, streams: int, tokens: int, rate: float) -> None:
    """The server process: prints its port, then answers; GET /cpu is its CPU time."""
    import uvicorn

    build, parser, loop = LOOPS.get(name, (name, "httptools", "uvloop"))
    inner = CANDIDATES[build](Ticker(streams, tokens, rate))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/cpu":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": str(time.process_time()).encode()})
        else:
            await inner(scope, receive, send)

    config = uvicorn.Config(app, port=0, http=parser, loop=loop, log_level="warning", access_log=False, lifespan="off")
    sock = config.bind_socket()
    sock.listen()
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(config).run([sock])


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = b"".join([piece async for piece in pieces(reader)])
    writer.close()
    return answer


async def pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def load(port: int, streams: int, path: str) -> tuple[float, int]:
    """(CPU seconds of the server, events) of all streams at once."""
    body = json.dumps(BODY).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{kind}\r\n\r\n"
    cpu = b"GET /cpu HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    before = await spent(port, cpu)
    answers = await asyncio.gather(*[ask(port, head.encode() + body) for _ in range(streams)])
    events = sum(answer.count(b"data: {") for answer in answers)
    return await spent(port, cpu) - before, events


async def spent(port: int, request: bytes) -> float:
    lines = (await ask(port, request)).split(b"\r\n\r\n", 1)[1].split(b"\r\n")
    return float(lines[1] if len(lines) > 1 else lines[0])  # chunked or not


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    path = PATHS.get(name, "/")
    command = [sys.executable, __file__, "--serve", name, "--streams", str(args.streams), "--tokens", str(args.tokens)]
    with subprocess.Popen([*command, "--rate", str(args.rate)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            asyncio.run(load(port, args.streams, path))  # warm
            runs = [asyncio.run(load(port, args.streams, path)) for _ in range(args.repeat)]
        finally:
            server.terminate()
    seconds = min(cpu / events for cpu, events in runs)
    return {"cpu_us_per_token": round(seconds * 1e6, 1), "core_share_at_1500_tokens_per_s": round(seconds * 1500, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("candidates", nargs="*", default=[*CANDIDATES, *LOOPS])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1500)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", metavar="CANDIDATE", help="be the server process")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.streams, args.tokens, args.rate)
        return
    print(json.dumps({name: measure(name, args) for name in args.candidates}, indent=1))


if __name__ == "__main__":
    main()
