"""The one internal request that every dialect is translated into, and how it runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from trivium import CompletionOutput, Metrics, PoolingParams, RequestOutput, SamplingParams, errors

from trivium_server.faults import bad
from trivium_server.images import pictured
from trivium_server.meters import Ended, Meters
from trivium_server.models import Served

Prompt = str | list[int]


@dataclass(frozen=True)
class Work:
    """Prompts of one call (texts or ids; several only of a completion) or one chat, and how to answer. Images in a chat become
    bytes here. options: of the engine, such
    as timeout and cache_salt; of a chat also tools, tool_choice and the arguments of its template."""

    served: Served
    prompts: Sequence[Any]
    params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False

    def __post_init__(self) -> None:
        if self.chat:
            object.__setattr__(self, "prompts", [pictured(self.served, messages) for messages in self.prompts])
        for prompt in self.prompts:
            self.served.check_length(prompt)

    @property
    def operation(self) -> str:
        """As OpenTelemetry calls it."""
        return "chat" if self.chat else "text_completion"

    async def whole(self, meters: Meters) -> list[RequestOutput]:
        """The answers, in the order of the prompts; the first error of one is raised. Cancelling aborts all."""
        llm, began = self.served.llm, time.time()
        try:
            if self.chat:
                outputs = await llm.chat(self.prompts, self.params, **self.options)
            else:
                outputs = await llm.generate(self.prompts, self.params, **self.options)
        except (asyncio.CancelledError, errors.DeadlineError, errors.BackendError) as fault:
            reason = "error" if isinstance(fault, errors.BackendError) else "abort"
            meters.ended(self._left(began, [reason] * len(self.prompts) * self.params.n))
            raise
        for output in outputs:
            made = count(output.outputs)
            meters.ended(self._ended(output, made, reasons(output)))
            self.served.charge(len(output.prompt_token_ids) + made)
        if failed := [output.error for output in outputs if output.error is not None]:
            raise failed[0]
        return outputs

    def _ended(self, output: RequestOutput, made: int, reasons: Sequence[str]) -> Ended:
        return Ended.of(self.served, output, made, reasons, self.operation, self.params)

    def _left(self, began: float, reasons: Sequence[str]) -> Ended:
        return Ended(self.served, self.operation, self.params, began, reasons)

    async def stream(self, meters: Meters) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, its news). Each first says, without outputs, that it was taken. Closing aborts all."""
        streams = [self._news(prompt, meters) for prompt in self.prompts]
        if len(streams) == 1:
            async with contextlib.aclosing(streams[0]) as news:
                async for output in news:
                    yield 0, output
            return
        async with contextlib.aclosing(_merged(streams)) as both:
            async for pair in both:
                yield pair

    async def _news(self, prompt: Any, meters: Meters) -> AsyncGenerator[RequestOutput, None]:
        ended: list[str] = []
        made, read, began, taken, over = 0, 0, time.time(), False, False
        news: Any = self.served.llm.stream(prompt, self.params, announce=True, **self.options)
        try:
            async with contextlib.aclosing(news):
                async for output in news:
                    taken, read, over = True, len(output.prompt_token_ids), output.finished
                    made += count(output.outputs)
                    ended += reasons(output)
                    if over:
                        meters.ended(self._ended(output, made, ended))
                    yield output
        finally:
            self.served.charge(read + made)
            if taken and not over:
                meters.ended(self._left(began, [*ended, *["abort"] * (self.params.n - len(ended))]))


async def embedded(
    served: Served, prompts: Sequence[Any], pooling: PoolingParams, options: Mapping[str, Any], meters: Meters
) -> list[RequestOutput]:
    """The outputs with embeddings of prompts, in their order; the first error of one is raised."""
    outputs = await served.llm.embed(prompts, pooling, **options)
    for output in outputs:
        meters.ended(Ended.of(served, output, 0, reasons(output), "embeddings", None))
        served.charge(len(output.prompt_token_ids))
    if failed := [output.error for output in outputs if output.error is not None]:
        raise failed[0]
    return outputs


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What comes from any of them, as it comes; an error of one ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            left -= news is None
            if news is not None:
                yield number, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_PARAMS = frozenset(f.name for f in fields(SamplingParams))


def sampling(served: Served, body: object, max_tokens: int | None, **own: Any) -> SamplingParams:
    """SamplingParams of the fields of `body` that have their names and are not null, and of `own`; else the model's defaults.
    max_tokens: None is up to the end of the context."""
    given = {name: value for name in _PARAMS if (value := getattr(body, name, None)) is not None}
    given |= {name: value for name, value in own.items() if value is not None}
    return served.llm.default_params(**{**given, "max_tokens": max_tokens})


def count(outputs: Sequence[CompletionOutput]) -> int:
    """Tokens made."""
    return sum(len(output.token_ids) for output in outputs)


def reasons(output: RequestOutput) -> list[str]:
    """Why those of its outputs have ended that have."""
    return [one.finish_reason for one in output.outputs if one.finish_reason is not None]


@dataclass
class _Unclear:
    """What an output has made so far of which it is not known yet what it says: a marker that is not whole, for instance."""

    ids: list[int] = field(default_factory=list)
    text: str = ""

    def reasoning(self, output: CompletionOutput, tokenizer: Any) -> int:
        """The number of tokens that the news show to be reasoning, and all before them. What follows them may still be unclear."""
        self.ids += output.token_ids
        self.text += output.text
        if not output.events:
            return 0
        said = output.reasoning or ""
        end = max(self.text.find(said), 0) + len(said)
        left, count = len(self.text[:end].encode()), 0
        while left > 0 and count < len(self.ids):
            left -= len(tokenizer.token_bytes(self.ids[count]))
            count += 1
        clear = bool(output.content or output.tool_calls)
        self.ids, self.text = ([], "") if clear else (self.ids[count:], self.text[end:])
        return count if said else 0


@dataclass
class Tally:
    """What a stream has come to: tokens by (prompt, output), and the last news of each prompt. With a tokenizer also how many of
    the tokens were reasoning, its markers included."""

    tokenizer: Any = None
    made: int = 0
    reasoning: int = 0
    prompt: dict[int, int] = field(default_factory=dict)
    cached: int = 0
    metrics: Metrics | None = None
    _unclear: dict[tuple[int, int], _Unclear] = field(default_factory=dict)

    def add(self, number: int, output: RequestOutput) -> None:
        """Counts a piece of news, or a whole answer."""
        self.prompt[number] = len(output.prompt_token_ids)
        self.made += count(output.outputs)
        if self.tokenizer is not None:
            for one in output.outputs:
                unclear = self._unclear.setdefault((number, one.index), _Unclear())
                self.reasoning += unclear.reasoning(one, self.tokenizer)
        if output.metrics is not None:
            self.cached += output.metrics.num_cached_tokens
            self.metrics = output.metrics if len(self.prompt) == 1 else None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(self.prompt.values())


def template_arguments(given: Mapping[str, Any] | None, **own: Any) -> dict[str, Any]:
    """Arguments of the chat template that a client may set; those that mean something to trivium itself are refused."""
    reserved = {"template", "tools", "tool_choice", "add_generation_prompt", "messages", "announce", "sampling_params", "prompt"}
    reserved |= {"self", "adapter", "priority", "timeout", "request_id", "cache_salt"}
    if taken := sorted(reserved & set(given or ())):
        raise bad(f"chat_template_kwargs can't set {taken[0]}", "chat_template_kwargs")
    return {**(given or {}), **{name: value for name, value in own.items() if value is not None}}
