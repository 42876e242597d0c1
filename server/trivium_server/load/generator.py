"""Sends a workload to a server: with a number of requests under way (closed loop), or each at its time (open loop).

In an open loop a request counts from the time at which it should have been sent: one that had to wait for a place or a turn in this
process is as late as its user would find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from trivium_server.load.answers import Outcome, answered
from trivium_server.load.wire import Client, Failure, fetch
from trivium_server.load.workload import Ask, Ids, Text

_encode = msgspec.json.Encoder().encode
_PROBES = (16, 72)
"""Words of the prompts from which the tokens of a word are found."""


@dataclass(frozen=True)
class Target:
    """What is asked for. chat: chat completions, else completions. extra: more fields of the body, or others; null: not sent."""

    model: str
    chat: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, prompt: Any, output_tokens: int) -> bytes:
        """prompt: a text, token ids (of completions) or messages."""
        if self.chat:
            content = {"messages": prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]}
        else:
            content = {"prompt": prompt}
        limits = {"max_tokens": output_tokens, "temperature": self.temperature}
        flags = {"stream": True, "stream_options": {"include_usage": True}, **({"ignore_eos": True} if self.ignore_eos else {})}
        body = {"model": self.model, **content, **limits, **flags, **self.extra}
        return _encode({name: value for name, value in body.items() if value is not None})


class Run(NamedTuple):
    """Outcomes in the order of their ends. start, end: of the first request (its schedule) and the last answer, by the clock;
    cpu: seconds of this process in between."""

    outcomes: list[Outcome]
    start: float
    end: float
    cpu: float


@dataclass
class Generator:
    """timeout: seconds until an answer must be whole. told: called with every outcome as it comes."""

    client: Client
    target: Target
    prompts: Text | Ids
    timeout: float = 600.0
    told: Callable[[Outcome], None] = lambda outcome: None

    async def closed(self, asks: Iterable[Ask], concurrency: int, seconds: float | None = None) -> Run:
        """Keeps `concurrency` requests under way, until there are no more, or none begins any more after `seconds`."""
        return await self._run(lambda into: self._workers(into, iter(asks), concurrency, seconds))

    async def open(self, asks: Iterable[Ask], seconds: float | None = None, limit: int | None = None) -> Run:
        """Sends each at its time, whatever is under way. limit: no more than these at once; others wait, and their time counts."""
        return await self._run(lambda into: self._timed(into, iter(asks), seconds, limit))

    async def warm(self, count: int, ask: Ask, concurrency: int) -> list[Outcome]:
        """Sends `count` requests like this one, each with a prompt of its own, that nobody counts."""
        asks = (ask._replace(number=-1 - number, at=None) for number in range(count))
        return (await Generator(self.client, self.target, self.prompts, self.timeout).closed(asks, concurrency)).outcomes

    async def _run(self, work: Callable[[list[Outcome]], Awaitable[None]]) -> Run:
        outcomes: list[Outcome] = []
        before = time.process_time()
        await work(outcomes)
        cpu = time.process_time() - before
        start = min((o.scheduled for o in outcomes), default=0.0)
        return Run(outcomes, start, max((o.end for o in outcomes), default=0.0), cpu)

    async def _workers(self, into: list[Outcome], asks: Iterator[Ask], concurrency: int, seconds: float | None) -> None:
        until = None if seconds is None else self.client.clock() + seconds

        async def worker() -> None:
            for ask in asks:
                if until is not None and self.client.clock() >= until:
                    return
                await self._send(into, ask, self._request(ask), None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())

    async def _timed(self, into: list[Outcome], asks: Iterator[Ask], seconds: float | None, limit: int | None) -> None:
        seats = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        start = self.client.clock()

        async def seated(ask: Ask, request: bytes, at: float) -> None:
            async with seats:
                await self._send(into, ask, request, at)

        async with asyncio.TaskGroup() as group:
            for ask in asks:
                if seconds is not None and (ask.at or 0.0) >= seconds:
                    break
                request, at = self._request(ask), start + (ask.at or 0.0)
                await asyncio.sleep(max(0.0, at - self.client.clock()))
                group.create_task(seated(ask, request, at))

    def _request(self, ask: Ask) -> bytes:
        prompt = self.prompts.prompt(ask) if ask.prompt is None else ask.prompt
        return self.client.request("POST", self.target.path, self.target.body(prompt, ask.output_tokens))

    async def _send(self, into: list[Outcome], ask: Ask, request: bytes, at: float | None) -> None:
        into.append(await answered(self.client, request, ask.number, at, self.timeout))
        self.told(into[-1])


async def first_model(client: Client) -> str:
    """The first that the server lists. Raises Failure."""
    status, body = await fetch(client, "GET", "/models")
    try:
        found = msgspec.json.decode(body)["data"][0]["id"]
    except (msgspec.DecodeError, LookupError, TypeError):
        found = None
    if status != 200 or not isinstance(found, str):
        raise Failure(f"http_{status}", f"GET /models gives no list of models ({status}); name one with --model")
    return found


async def calibrated(client: Client, target: Target, text: Text, timeout: float) -> Text | None:
    """Text as this server counts its tokens, by two prompts of known words; None if it does not say. Raises Failure."""
    counts = []
    for words in _PROBES:
        request = client.request("POST", target.path, target.body(text.words(f"probe {words}", words), 1))
        outcome = await answered(client, request, 0, None, timeout)
        if outcome.failure:
            raise Failure(outcome.failure, outcome.message)
        counts.append(outcome.prompt_tokens)
    few, many = counts
    if few is None or many is None or many <= few:
        return None
    per_word = (many - few) / (_PROBES[1] - _PROBES[0])
    return Text(text.seed, fixed=few - per_word * _PROBES[0], per_word=per_word, block=text.block)
