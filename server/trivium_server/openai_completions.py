"""OpenAI: /v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from trivium import CompletionOutput, RequestOutput

from trivium_server.faults import bad
from trivium_server.http import Call, Route, Stream
from trivium_server.models import Served
from trivium_server.openai_types import (
    Found, Logprobs, Object, Offsets, SamplingFields, TextLogprobs, Timing, Usage, new_id, prompt_logprobs, timing, token_name,
    usage,
)  # fmt: skip
from trivium_server.work import Prompt, Tally, Work, sampling

_MAX_TOKENS = 16


class CompletionRequest(SamplingFields, kw_only=True):
    """prompt: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Logprobs | None = None
    add_special_tokens: bool | None = None

    async def work(self, call: Call) -> Work:
        """Raises Refusal or a TriviumError."""
        self.check()
        if self.suffix:
            raise bad("suffix is not possible: this model can't fill text in between", "suffix")
        served = await call.use(self.model, self)
        limit = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        own = {"prompt_logprobs": self.prompt_logprobs if scored is None else max(scored, self.prompt_logprobs or 0)}
        params = sampling(served, self, limit, structured_outputs=self.structure(), **own)
        prompts: list[Prompt] = prompts_of(self.prompt, "prompt")
        if len(prompts) * params.n > call.app.settings.max_prompts:
            raise bad(f"{len(prompts)} prompts with n {params.n} are more than {call.app.settings.max_prompts} outputs", "prompt")
        if self.add_special_tokens is False:
            encode = served.llm.tokenizer.encode
            for prompt in prompts:
                served.check_length(prompt)
            prompts = await asyncio.to_thread(
                lambda: [encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]
            )
        return Work(served, prompts, params, call.options(self))


def prompts_of(given: str | Sequence[Any], param: str) -> list[Prompt]:
    """The four forms as a list of texts and of lists of ids; the engine checks the ids."""
    if isinstance(given, str):
        return [given]
    items: Any = given
    kinds = set(map(type, items))
    if kinds == {int}:
        return [items]
    if kinds in ({str}, {list}):
        return items  # type: ignore[no-any-return]
    raise bad(f"{param} must be a text, a list of texts, token ids, or a list of lists of token ids, and not empty", param)


class TextChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Object | None] | None = None


class Completion(Struct, kw_only=True, omit_defaults=True):
    id: str
    object: Annotated[str, Meta(extra_json_schema={"const": "text_completion"})]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    metrics: Timing | None = None


class _Writer:
    """Writes the choices of one output, piece by piece: what is echoed first, then what is made."""

    def __init__(self, body: CompletionRequest, served: Served, prompt: Prompt, first: int) -> None:
        """first: index of the prompt's first output."""
        self._body, self._served, self._prompt, self._first = body, served, prompt, first
        self._offsets: dict[int, Offsets] = {}

    def choice(self, request: RequestOutput, output: CompletionOutput) -> TextChoice:
        """The next piece of an output, or all of it."""
        begins = output.index not in self._offsets
        if begins:
            self._offsets[output.index] = Offsets()
        echoed = self._echoed(request) if begins and self._body.echo else ""
        found = None
        if self._body.logprobs is not None:
            found = TextLogprobs([], [], [], [])
            if begins and self._body.echo:
                self._add(found, output.index, request.prompt_token_ids, request.prompt_logprobs or ())
            self._add(found, output.index, output.token_ids, output.logprobs or ())
        asked = self._body.prompt_logprobs is not None and begins
        return TextChoice(
            index=self._first + output.index, text=echoed + output.text, finish_reason=output.finish_reason, logprobs=found,
            stop_reason=output.stop_reason, prompt_logprobs=prompt_logprobs(request.prompt_logprobs) if asked else None,
        )  # fmt: skip

    def _echoed(self, request: RequestOutput) -> str:
        """The client's own text, or that of its ids, as far as the model has read it."""
        if isinstance(self._prompt, str) and self._body.truncate_prompt_tokens is None:
            return self._prompt
        return self._served.llm.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)

    def _add(self, to: TextLogprobs, index: int, ids: Sequence[int], entries: Sequence[Found | None]) -> None:
        by_id, tokenizer = self._body.return_tokens_as_token_ids, self._served.llm.tokenizer
        for token, found in zip(ids, entries, strict=False):
            data = tokenizer.token_bytes(token)
            named: Any = found[token] if found is not None else _Unscored(data)
            to.add(token, found, token_name(token, named, by_id), self._body.logprobs or 0, by_id, self._offsets[index].next(data))


class _Unscored:
    """A token without a log probability, as token_name() takes it."""

    def __init__(self, data: bytes) -> None:
        self.token_bytes = data
        self.decoded_token = data.decode("utf-8", "replace")


async def complete(call: Call, body: CompletionRequest) -> Completion | Stream:
    work = await body.work(call)
    timed = call.app.settings.timings or bool(body.include_metrics)
    head: Object = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(call.arrival), "model": work.served.name}
    writers = [_Writer(body, work.served, p, i * work.params.n) for i, p in enumerate(work.prompts)]
    if body.stream:
        return Stream(_chunks(call, body, work, head, writers, timed))
    outputs = await call.app.moderation.whole(call, work)
    tally = Tally()
    choices = []
    for number, (writer, request) in enumerate(zip(writers, outputs, strict=True)):
        tally.add(number, request)
        choices += [writer.choice(request, output) for output in request.outputs]
    return Completion(**head, choices=choices, usage=usage(tally, timed=timed), metrics=timing(tally) if timed else None)


async def _chunks(
    call: Call, body: CompletionRequest, work: Work, head: Mapping[str, Any], writers: Sequence[_Writer], timed: bool
) -> AsyncGenerator[Object, None]:
    wanted = body.stream_options
    tally = Tally()
    async with contextlib.aclosing(call.app.moderation.stream(call, work)) as news:
        async for number, output in news:
            tally.add(number, output)
            if not output.outputs and not output.finished:
                yield {**head, "choices": []}
            for one in output.outputs:
                choice = writers[number].choice(output, one)
                if not choice.text and choice.finish_reason is None and not one.logprobs:
                    continue
                chunk = {**head, "choices": [choice]}
                if wanted is not None and wanted.continuous_usage_stats:
                    chunk["usage"] = usage(tally)
                yield chunk
    if wanted is not None and wanted.include_usage:
        yield {**head, "choices": [], "usage": usage(tally, timed=timed), **({"metrics": timing(tally)} if timed else {})}
    elif timed:
        yield {**head, "choices": [], "metrics": timing(tally)}


ROUTES: tuple[Route, ...] = (Route("POST", "/v1/completions", complete, "Continue a text", CompletionRequest, Completion),)
