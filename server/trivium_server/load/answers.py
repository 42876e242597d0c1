"""Streamed answers of OpenAI's dialect, timed as they come."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from trivium_server.load.wire import Client, Failure

_LONGEST = 300
"""Characters of a failure's text that are kept."""


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Outcome(NamedTuple):
    """What became of a request; times are seconds of one clock. number: its place in the workload. scheduled: when it should have
    been sent (in a closed loop: when it was). times: of every piece of news that held output. end: of the whole answer, or failure.
    prompt_tokens, output_tokens: as the server counted them; None if it did not. failure: its kind ("" if there was none)."""

    number: int
    scheduled: float
    sent: float
    times: array[float]
    end: float
    prompt_tokens: int | None
    output_tokens: int | None
    failure: str = ""
    message: str = ""

    @property
    def made(self) -> int:
        """Tokens of the answer; where the server did not count them: pieces of news."""
        return len(self.times) if self.output_tokens is None else self.output_tokens


class Stream:
    """Reads server-sent events."""

    def __init__(self) -> None:
        self.times: array[float] = array("d")
        self.usage = _Usage()
        self.ended = False
        self.refused = b""
        self._rest = b""
        self._data: list[bytes] = []

    def piece(self, status: int, body: bytes, now: float) -> None:
        if status != 200:
            self.refused += body[: 4 * _LONGEST - len(self.refused)]
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif self._data and not line.strip():
                self._event(b"\n".join(self._data).strip(), now)
                self._data.clear()

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Failure("protocol", f"an event that is no chunk ({error}): {_text(data)}") from error
        if chunk.error is not None:
            raise Failure("event", _text(msgspec.json.encode(chunk.error)))
        if any(_says(choice) for choice in chunk.choices or ()):
            self.times.append(now)
        if chunk.usage is not None:
            self.usage = chunk.usage


def _says(choice: _Choice) -> bool:
    if (delta := choice.delta) is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


def _text(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())[:_LONGEST]


async def answered(client: Client, request: bytes, number: int, scheduled: float | None, timeout: float) -> Outcome:
    """Sends a request now and reads its stream. scheduled: when it should have been sent; None: now."""
    stream, sent, failure = Stream(), client.clock(), ("", "")
    try:
        status = await client.ask(request, stream, timeout)
        if status != 200:
            failure = (f"http_{status}", _text(stream.refused))
        elif not stream.ended:
            failure = ("disconnected", "the stream ended without [DONE]")
    except Failure as found:
        failure = (found.kind, found.message)
    usage = stream.usage
    return Outcome(
        number, sent if scheduled is None else scheduled, sent, stream.times, client.clock(), usage.prompt_tokens,
        usage.completion_tokens, *failure,
    )  # fmt: skip
