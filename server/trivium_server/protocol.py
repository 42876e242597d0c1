"""How uvicorn is set up, and what it leaves open: clients that never finish their headers, never read what they asked for, or offer
another protocol along with a body (as Java's own client does), which is answered in this one."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trivium_server.app import App

_READ = 256 << 10
"""Bytes that may come at once, and be partly of a body."""
_OFFERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


def configured(app: App) -> uvicorn.Config:
    """HTTP/1.1 alone; signals, and what is logged of calls, are the caller's."""
    own = app.settings
    protocol: Any = functools.partial(Protocol, seconds=own.body_timeout, max_head=own.max_headers + _READ)
    return uvicorn.Config(
        app, http=protocol, ws="none", loop="uvloop", lifespan="on", log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=1, ssl_certfile=own.certificate, ssl_keyfile=own.private_key,
    )  # fmt: skip


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, seconds: float, max_head: int, **kwargs: Any) -> None:
        """seconds: in which a head must have come, and a reader have taken something. max_head: bytes of a head."""
        super().__init__(*args, **kwargs)
        self._seconds, self._max_head = seconds, max_head
        self._head: int | None = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait("head", transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._plainly(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._head is not None:
            self._head += len(data)
            if self._head > self._max_head:
                self.transport.abort()
        elif self.cycle is not None and self.cycle.response_complete and "head" not in self._timers:
            self._wait("head", self.transport.abort)  # what comes is neither a new head nor a body that anybody waits for

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._wait("head", self.transport.abort)

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop("head")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _plainly(self, rest: bytes) -> None:
        """Reads a request that offers another protocol once more, without the offer; rest: what came behind its head."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This server is no proxy.")
            return
        kept = [b"%b: %b" % pair for pair in self.headers if pair[0] not in _OFFERS]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([b"%b %b HTTP/1.1" % (method, self.url), *kept, b"", rest]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("reader", functools.partial(self._check_reader, self.transport.get_write_buffer_size()))

    def resume_writing(self) -> None:
        self._stop("reader")
        super().resume_writing()

    def _check_reader(self, left: int) -> None:
        """left: bytes that waited the last time."""
        now = self.transport.get_write_buffer_size()
        if now >= left:
            self.transport.abort()
        else:
            self._wait("reader", functools.partial(self._check_reader, now))

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _wait(self, name: str, then: Any) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(self._seconds, then)
