"""Calls and replies over ASGI: what a dialect's handler gets and returns, and the one place where answers are sent and streamed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from trivium import errors

from trivium_server.faults import ErrorShape, Refusal, bad, openai_error, refusal
from trivium_server.keys import Key
from trivium_server.limits import check_depth
from trivium_server.models import Served

if TYPE_CHECKING:
    from trivium_server.app import App

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
_Number = TypeVar("_Number", int, float)
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
JSON = "application/json"
_PIECE = 1 << 20
LAST = 2**31 - 1
"""The priority of what may wait for everything else."""
_SMALL = 64 << 10


@dataclass(frozen=True)
class Call:
    """One HTTP call that was let in. rest: what stands for {name} in the route's path. reply: headers of its reply. arrival: Unix
    seconds; began: the same moment by the monotonic clock. query: what follows the path. background: nobody waits for the answer,
    so it comes after all others and may take its time. held: what it has until it ends; whoever runs a handler closes it."""

    app: App
    request_id: str
    headers: Mapping[bytes, bytes]
    key: Key | None = None
    rest: str = ""
    reply: dict[str, str] = field(default_factory=dict)
    arrival: float = field(default_factory=time.time)
    query: bytes = b""
    background: bool = False
    began: float = field(default_factory=time.monotonic)
    held: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def use(self, model: str | None, body: object = None, *, keep: float | None = None) -> Served:
        """The model of that name, loaded, and kept so until the call ends; keep: and how many seconds longer. Raises
        ModelNotFoundError, DeadlineError, OverloadedError, or Refusal where it could not be loaded."""
        session, charge = self.session(body), partial(self.app.charge, self.key)
        one = self.app.models.use(model, session=session, seconds=self.left(body), keep=keep, charge=charge)
        served = await self.held.enter_async_context(one)
        self.reply["x-model-version"] = served.version
        return replace(served, max_pixels=self.app.settings.max_image_pixels)

    def session(self, body: object) -> str:
        """By what calls are told to belong together: the header x-session-id, the body's user (Anthropic: metadata.user_id) or its
        cache_salt."""
        header = self.headers.get(b"x-session-id", b"").decode("latin-1")
        metadata = getattr(body, "metadata", None) or {}
        found = header or getattr(body, "user", None) or metadata.get("user_id") or getattr(body, "cache_salt", None)
        return str(found or "")

    def left(self, body: object) -> float | None:
        """Seconds until its deadline: of the server, the body's field timeout or the header x-request-timeout. Raises Refusal or
        DeadlineError."""
        asked = [getattr(body, "timeout", None), self._number(b"x-request-timeout", float)]
        if wrong := [t for t in asked if t is not None and not 0 < t < math.inf]:
            raise bad(f"timeout must be a number of seconds above 0, not {wrong[0]}", "timeout")
        own = None if self.background else self.app.settings.request_timeout
        limits = [t for t in (own, *asked) if t is not None]
        if not limits:
            return None
        if (left := min(limits) - (time.monotonic() - self.began)) <= 0:
            raise errors.DeadlineError("the request's timeout was over before it could begin")
        return left

    def options(self, body: object) -> dict[str, Any]:
        """trivium's Options of a request: the key's salt, the deadline, and the priority (the body's, or the header x-priority)."""
        salt = (self.key.salt if self.key else "") + (getattr(body, "cache_salt", None) or "")
        options: dict[str, Any] = {"request_id": self.request_id, "cache_salt": salt}
        if (left := self.left(body)) is not None:
            options["timeout"] = left
        if self.background:
            return {**options, "priority": LAST}
        priority = getattr(body, "priority", None) or self._number(b"x-priority", int)
        if self.key is not None and self.key.priority is not None:
            priority = self.key.priority if priority is None else max(priority, self.key.priority)
        return {**options, "priority": priority} if priority else options

    def _number(self, header: bytes, kind: Callable[[bytes], _Number]) -> _Number | None:
        if (text := self.headers.get(header)) is None:
            return None
        try:
            return kind(text)
        except ValueError:
            raise bad(f"{header.decode()} must be a number, not {text[:80].decode('latin-1')!r}", header.decode()) from None


class Plain(NamedTuple):
    """A reply that is no JSON, or has a status or headers of its own."""

    body: bytes
    media: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


class Download(NamedTuple):
    """A reply that is a file. It is shown by no browser, whatever is in it."""

    path: Path
    media: str = "application/octet-stream"


def sse(event: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(event) + b"\n\n"


def named(event: Mapping[str, Any]) -> bytes:
    """A server-sent event that is called by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(event.get("type", "error")).encode(), encode(event))


def line(event: Any) -> bytes:
    """A line of newline-delimited JSON."""
    return b"%b\n" % encode(event)


class Stream(NamedTuple):
    """A reply in pieces. events: what comes, the first as soon as the request is taken: what it raises before that is an ordinary
    error reply, and later an event. ping: what a silent stream sends, if anything. end: the last bytes."""

    events: AsyncGenerator[Any, None]
    frame: Callable[[Any], bytes] = sse
    end: bytes = b"data: [DONE]\n\n"
    media: str = "text/event-stream; charset=utf-8"
    ping: bytes = b": still working\n\n"


Handler = Callable[[Call, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Route:
    """method and path ("/…/{name}": the rest of the path, slashes included; "/…/{name}/tail"), what answers, and the types that
    validate and describe it: of the body (of a GET: the query), and of the reply (a media type where it is no JSON). public: needs
    no key. open: is answered also while the server drains. upload: the handler reads the body itself, piece by piece, and the type
    only describes it."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    reply: Any = None
    error: ErrorShape = openai_error
    public: bool = False
    open: bool = False
    status: int = 200
    upload: bool = False
    scope: str | None = "inference"


class Exchange:
    """A call under way: reads its body, sends its reply. headers: of every reply."""

    def __init__(self, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        self._receive, self._send = receive, send
        self.headers = headers
        self.started = False
        self._last = 0.0

    async def pieces(self, limit: int, seconds: float) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises Refusal if it is too long or too slow, Gone if the client leaves."""
        until, size, more = asyncio.get_running_loop().time() + seconds, 0, True
        while more:
            try:
                async with asyncio.timeout_at(until):
                    message = await self._receive()
            except TimeoutError:
                late = f"the body has not arrived in {seconds:g} s"
                raise Refusal(408, "body_timeout", late, headers={"connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise Gone
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size > limit:
                raise too_large(limit)
            yield piece

    async def body(self, limit: int, seconds: float) -> bytes:
        """The whole body; raises as pieces()."""
        return b"".join([piece async for piece in self.pieces(limit, seconds)])

    async def download(self, file: Download) -> None:
        """Sends a file, read as fast as the client takes it."""
        with await asyncio.to_thread(file.path.open, "rb") as source:
            left = os.fstat(source.fileno()).st_size
            await self._start(200, {"content-type": file.media, "content-length": str(left)})
            while left and (piece := await asyncio.to_thread(source.read, min(left, _PIECE))):
                left -= len(piece)
                await self._piece(piece)
        await self._send({"type": "http.response.body", "body": b""})

    async def reply(self, body: bytes, media: str = JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole reply."""
        await self._start(status, {"content-type": media, "content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, stream: Stream, error: Callable[[BaseException], Any], ping: float) -> None:
        """Sends a reply in pieces. error: the event that tells of one."""
        async with contextlib.aclosing(stream.events) as events:
            first = await anext(events)
            own = {"content-type": stream.media, "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, own)
            pings = asyncio.ensure_future(self._ping(stream.ping, ping)) if stream.ping else None
            try:
                await self._piece(stream.frame(first))
                async for event in events:
                    await self._piece(stream.frame(event))
            except Exception as fault:
                await self._piece(stream.frame(error(fault)))
            finally:
                if pings is not None:
                    pings.cancel()
        await self._send({"type": "http.response.body", "body": stream.end})

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, which is cancelled if the client leaves; then Gone."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone
            task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in {**self.headers, **headers}.items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _piece(self, body: bytes) -> None:
        self._last = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _ping(self, body: bytes, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            if asyncio.get_running_loop().time() - self._last >= seconds:
                await self._piece(body)


class Gone(Exception):
    """The client has left."""


def too_large(limit: int) -> Refusal:
    """Of a body."""
    return Refusal(413, "body_too_large", f"the body is larger than {limit} bytes", headers={"connection": "close"})


_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decode(body: bytes, kind: Any, what: str = "the body") -> Any:
    """A body as its type. Raises Refusal with the place of what is wrong; what: the whole is called so."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(error, what) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"{what} is not valid JSON: {str(error) or 'nested too deeply'}") from None
    check_depth(found)
    return found


def decode_query(query: bytes, kind: Any) -> Any:
    """As decode(), of what follows a path; numbers are read from their text."""
    try:
        return msgspec.convert(dict(parse_qsl(query.decode("latin-1"), max_num_fields=100)), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _misfit(error, "the query") from None
    except ValueError as error:
        raise bad(f"the query can't be read: {error}") from None


def _misfit(error: msgspec.ValidationError, what: str) -> Refusal:
    place = _PLACE.search(str(error))
    field, wrong = (place[1] if place else ""), _PLACE.sub("", str(error))
    return bad(f"{field or what}: {wrong[0].lower()}{wrong[1:]}", field.partition("[")[0].partition(".")[0] or None)


async def answer(route: Route, call: Call, exchange: Exchange, body: bytes | AsyncGenerator[bytes, None]) -> None:
    """Runs a route's handler and sends what it returns; errors that come before the reply began are raised. body: what has arrived,
    or for an upload what arrives."""
    if isinstance(body, bytes) and len(body) >= _SMALL and route.body is not None:
        given = await asyncio.to_thread(_given, route, call, body)  # what takes long to read must not hold up the others
    else:
        given = _given(route, call, body)
    async with call.held:
        reply = await route.handler(call, given)
        if isinstance(reply, Stream):
            await exchange.stream(reply, lambda fault: route.error(told(call, fault), call.request_id), call.app.settings.ping)
        elif isinstance(reply, Plain):
            await exchange.reply(reply.body, reply.media, reply.status, reply.headers)
        elif isinstance(reply, Download):
            await exchange.download(reply)
        else:
            await exchange.reply(encode(reply), status=route.status)


def _given(route: Route, call: Call, body: Any) -> Any:
    """What the handler gets."""
    if route.upload or route.body is None:
        return body if route.upload else None
    return decode_query(call.query, route.body) if route.method == "GET" else decode(body, route.body)


def told(call: Call, fault: BaseException) -> Refusal:
    """A fault as a refusal, counted."""
    found = refusal(fault)
    call.app.meters.refused(found.code)
    return found
