"""A server of OpenAI's dialect that answers by a schedule, in virtual time: an event loop whose clock jumps to the next timer, and
connections that are no sockets. So what a load generator reports can be compared with what the schedule says, exactly."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing is ready to run, and then at once."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual

    def jump(self, seconds: float) -> None:
        self._virtual += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self._loop.jump(max(0.0, timeout))
        return super().select(0)


def run(main: Any) -> Any:
    """Runs a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


Pieces = list[tuple[float, bytes]]
"""(seconds after the request, bytes); b"" closes the connection."""


def chunk(text: str = "", **more: Any) -> bytes:
    """A server-sent event of a chat stream."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}] if text else []
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n".encode()


def streamed(first: float, gap: float, tokens: int, *, usage: bool = True, prompt: int = 7) -> Pieces:
    """An answer of so many tokens: the first after `first` seconds, then one every `gap`; [DONE] with the last."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [(0.0, head), (0.0, framed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'))]
    pieces += [(first + gap * n, framed(chunk("word "))) for n in range(tokens)]
    counted = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    end = (framed(chunk(usage=counted)) if usage else b"") + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return [*pieces, (pieces[-1][0], end)]


def framed(data: bytes) -> bytes:
    """A chunk of HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: str, body: bytes) -> Pieces:
    """A whole answer at once."""
    return [(0.0, f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)]


class Peer:
    """answer: what a request (its number from 0, its path and its body) gets. `bodies`: of all requests, in order; `most`: requests
    under way at once, at most. seats: requests that are answered at once, if that is limited; others wait."""

    def __init__(self, answer: Callable[[int, str, Any], Pieces], seats: int | None = None) -> None:
        self.answer, self.bodies, self.arrivals = answer, [], []
        self.connections = self.most = self._now = 0
        self._seats = asyncio.Semaphore(seats) if seats else None

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> tuple[Any, Any]:
        protocol = factory()
        self.connections += 1
        protocol.connection_made(_Transport(self, protocol))
        return None, protocol

    async def play(self, transport: _Transport, number: int, path: str, body: Any) -> None:
        loop = asyncio.get_running_loop()
        self._now += 1
        self.most = max(self.most, self._now)
        if self._seats:
            await self._seats.acquire()
        start = loop.time()
        for after, data in self.answer(number, path, body):
            if after > loop.time() - start:
                await asyncio.sleep(start + after - loop.time())
            if transport.closed:
                break
            if not data:
                transport.abort()
                break
            transport.protocol.data_received(data)
        self._now -= 1
        if self._seats:
            self._seats.release()


class _Transport:
    def __init__(self, peer: Peer, protocol: Any) -> None:
        self.peer, self.protocol, self.closed = peer, protocol, False
        self._task: Any = None

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        head, _, body = data.partition(b"\r\n\r\n")
        peer, loop = self.peer, asyncio.get_running_loop()
        peer.bodies.append(json.loads(body) if body else None)
        peer.arrivals.append(loop.time())
        path = head.split(b" ", 2)[1].decode()
        self._task = loop.create_task(peer.play(self, len(peer.bodies) - 1, path, peer.bodies[-1]))

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
