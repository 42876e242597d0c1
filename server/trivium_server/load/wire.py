"""An HTTP/1.1 client that costs little a streamed token: asyncio and llhttp (httptools), one request a connection at a time.

A time is read once for each piece that arrives, before anything is done with it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

Clock = Callable[[], float]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[tuple[Any, Any]]]
"""Makes a connection to the server, as loop.create_connection() does, for a protocol of this factory."""


class Failure(Exception):
    """A request without a whole answer. kind: connect, disconnected, timeout, protocol, event or http_STATUS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class Reader(Protocol):
    """Takes an answer as it comes."""

    def piece(self, status: int, body: bytes, now: float) -> None:
        """A piece of the body, and when it came."""


class Address(NamedTuple):
    """Of a server: where to connect, and what its paths begin with."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        """http://HOST[:PORT] or https://, with or without the path that the API has (/v1 if there is none). Raises ValueError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"{url!r} is no URL of a server; write http://HOST:PORT or https://HOST/v1")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/") or "/v1")

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connect(self) -> Connect:
        """Over TCP, with TLS if the URL says so."""
        context = ssl.create_default_context() if self.tls else None

        async def connected(factory: Callable[[], asyncio.Protocol]) -> tuple[Any, Any]:
            return await asyncio.get_running_loop().create_connection(factory, self.host, self.port, ssl=context)

        return connected


class Connection(asyncio.Protocol):
    """One request at a time; `usable`: another one may follow."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now = clock, 0.0
        self._transport: Any = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[int] | None = None
        self.usable = True

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def exchange(self, request: bytes, reader: Reader) -> int:
        """Sends a whole request and reads its answer to the end; returns the status. Raises Failure."""
        self._parser = httptools.HttpResponseParser(self)
        self._reader, self._done = reader, asyncio.get_running_loop().create_future()
        self.answered = self._framed = False
        if not self.usable:
            raise Failure("disconnected", "the server had closed the connection")
        self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now, self.answered = self._clock(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"this is no HTTP answer: {error.__context__ or error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            status = self._parser.get_status_code() if self.answered else 0
            if status and not self._framed and error is None:
                self._done.set_result(status)  # the end of the connection is the end of such an answer
            else:
                self._fail("disconnected", str(error or "the server closed the connection before the answer's end"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        assert self._reader is not None
        try:
            self._reader.piece(self._parser.get_status_code(), body, self._now)
        except Failure as failure:
            self._fail(failure.kind, failure.message)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._done is not None and not self._done.done():
            self.usable &= bool(self._parser.should_keep_alive())
            self._done.set_result(status)

    def _fail(self, kind: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Failure(kind, message))
        self.close()


class Client:
    """Connections to one server, kept and used again."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], clock: Clock = time.perf_counter, connect: Connect | None = None
    ) -> None:  # fmt: skip
        self.clock = clock
        self._connect = connect or address.connect()
        self._idle: list[Connection] = []
        self._address = address
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": address.authority, **headers}.items())

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request to a path of the API."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode() + body

    async def ask(self, request: bytes, reader: Reader, timeout: float) -> int:
        """Sends a request and reads its answer; returns the status. Raises Failure. An idle connection that the server closed in
        the meantime is replaced."""
        try:
            async with asyncio.timeout(timeout):
                while self._idle:
                    connection = self._idle.pop()
                    try:
                        return await self._exchange(connection, request, reader)
                    except Failure as failure:
                        if failure.kind != "disconnected" or connection.answered:
                            raise
                return await self._exchange(await self._connected(), request, reader)
        except TimeoutError:
            raise Failure("timeout", f"no whole answer in {timeout:g} s") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connected(self) -> Connection:
        try:
            _, connection = await self._connect(lambda: Connection(self.clock))
        except OSError as error:
            raise Failure("connect", str(error)) from error
        assert isinstance(connection, Connection)
        return connection

    async def _exchange(self, connection: Connection, request: bytes, reader: Reader) -> int:
        status = await connection.exchange(request, reader)
        if connection.usable:
            self._idle.append(connection)
        return status


class Whole:
    """Keeps an answer's body."""

    def __init__(self) -> None:
        self.body = b""

    def piece(self, status: int, body: bytes, now: float) -> None:
        self.body += body


async def fetch(client: Client, method: str, path: str, body: bytes = b"", timeout: float = 60.0) -> tuple[int, bytes]:
    """(status, body) of an answer that is not measured. Raises Failure."""
    whole = Whole()
    return await client.ask(client.request(method, path, body), whole, timeout), whole.body
