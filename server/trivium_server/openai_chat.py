"""OpenAI: /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import trivium
from msgspec import Meta, Struct
from trivium import CompletionOutput

from trivium_server.faults import bad
from trivium_server.http import Call, Route, Stream
from trivium_server.openai_types import (
    Logprobs, Object, SamplingFields, Timing, Usage, chat_logprobs, new_id, prompt_logprobs, timing, usage,
)  # fmt: skip
from trivium_server.work import Tally, Work, sampling, template_arguments

_MESSAGE = {
    "type": "object", "required": ["role"],
    "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": {}, "tool_calls": {}},
}  # fmt: skip
Messages = Annotated[list[Object], Meta(extra_json_schema={"items": _MESSAGE})]


class ChatRequest(SamplingFields, kw_only=True):
    """Messages are checked by the model's own chat template."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    async def work(self, call: Call) -> Work:
        """Raises Refusal or a TriviumError."""
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if self.chat_template is not None:
            raise bad("chat_template is not taken from a request; the operator of the server chooses it", "chat_template")
        if self.continue_final_message:
            raise bad("continue_final_message is not possible here; send the text to /v1/completions", "continue_final_message")
        if set(self.modalities or ()) - {"text"}:
            raise bad(f"this model makes text only, not {', '.join(self.modalities or ())}", "modalities")
        served = await call.use(self.model, self)
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        params = sampling(served, self, limit, logprobs=self.alternatives, structured_outputs=self.structure())
        template = template_arguments(self.chat_template_kwargs, reasoning_effort=self.reasoning_effort)
        if self.add_generation_prompt is not None:
            template["add_generation_prompt"] = self.add_generation_prompt
        options = {**template, **call.options(self), "tools": self.tools, "tool_choice": self.tool_choice}
        return Work(served, [self.messages], params, options, chat=True)

    @property
    def alternatives(self) -> int | None:
        """How many a token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class Function(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: Function
    type: str = "function"


class Message(Struct, kw_only=True, omit_defaults=True):
    """reasoning: what the model thought first, also as reasoning_content."""

    role: Annotated[str, Meta(extra_json_schema={"const": "assistant"})]
    content: Annotated[str | None, Meta()]
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: Object | None = None
    stop_reason: int | str | None = None


class ChatCompletion(Struct, kw_only=True, omit_defaults=True):
    id: str
    object: Annotated[str, Meta(extra_json_schema={"const": "chat.completion"})]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Object | None] | None = None
    metrics: Timing | None = None


async def chat(call: Call, body: ChatRequest) -> ChatCompletion | Stream:
    work = await body.work(call)
    timed = call.app.settings.timings or bool(body.include_metrics)
    name = new_id("chatcmpl-")
    if body.stream:
        return Stream(_chunks(call, body, work, name, timed))
    [output] = await call.app.moderation.whole(call, work)
    tally = Tally(work.served.llm.tokenizer)
    tally.add(0, output)
    return ChatCompletion(
        id=name, object="chat.completion", created=int(call.arrival), model=work.served.name,
        choices=[_choice(one, body) for one in output.outputs], usage=usage(tally, timed=timed),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs), metrics=timing(tally) if timed else None,
    )  # fmt: skip


def _choice(output: CompletionOutput, body: ChatRequest) -> ChatChoice:
    found = _first(output.tool_calls) if body.parallel_tool_calls is False else output.tool_calls
    calls = [ToolCall(c.id, Function(c.name, c.arguments)) for c in found if c.complete]
    message = Message(
        role="assistant", content=None if calls and not output.content else output.content, tool_calls=calls or None,
        reasoning=output.reasoning, reasoning_content=output.reasoning,
    )  # fmt: skip
    return ChatChoice(
        index=output.index, message=message, finish_reason=output.finish_reason, stop_reason=output.stop_reason,
        logprobs=chat_logprobs(output.logprobs, body.alternatives or 0, body.return_tokens_as_token_ids),
    )  # fmt: skip


async def _chunks(call: Call, body: ChatRequest, work: Work, name: str, timed: bool) -> AsyncGenerator[Object, None]:
    """The role of each output once, then what is new, then what was asked for behind."""
    head = {"id": name, "object": "chat.completion.chunk", "created": int(call.arrival), "model": work.served.name}
    wanted = body.stream_options or None
    tally = Tally(work.served.llm.tokenizer)
    async with contextlib.aclosing(call.app.moderation.stream(call, work)) as news:
        async for number, output in news:
            tally.add(number, output)
            if not output.outputs and not output.finished:
                for index in range(work.params.n):
                    yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""}, None)]}
            for one in output.outputs:
                delta = delta_of(one, single=body.parallel_tool_calls is False)
                if not delta and one.finish_reason is None and not one.logprobs:
                    continue
                found = chat_logprobs(one.logprobs, body.alternatives or 0, body.return_tokens_as_token_ids)
                chunk = {**head, "choices": [_delta(one.index, delta, one.finish_reason, found)]}
                if wanted is not None and wanted.continuous_usage_stats:
                    chunk["usage"] = usage(tally)
                yield chunk
    if wanted is not None and wanted.include_usage:
        yield {**head, "choices": [], "usage": usage(tally, timed=timed), **_times(name, tally, timed)}
    elif timed:
        yield {**head, "choices": [], **_times(name, tally, timed)}


def _times(name: str, tally: Tally, timed: bool) -> Object:
    return {"metrics": timing(tally), "x_groq": {"id": name, "usage": usage(tally, timed=True)}} if timed else {}


def _delta(index: int, delta: Object, reason: str | None, logprobs: Object | None = None) -> Object:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _first(calls: Sequence[trivium.ToolCall]) -> Sequence[trivium.ToolCall]:
    return [call for call in calls if call.index == 0]


def delta_of(output: CompletionOutput, *, single: bool = False) -> Object:
    """What is new of an answer, by field; empty if nothing is. single: without calls after the first."""
    delta: Object = {}
    if content := output.content:
        delta["content"] = content
    if not output.events:
        return delta
    if reasoning := output.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = reasoning
    if calls := _first(output.tool_calls) if single else output.tool_calls:
        pieces = [_piece(c.index, c.id, c.name, c.arguments) for c in calls if c.id or c.arguments]
        delta |= {"tool_calls": pieces} if pieces else {}
    return delta


def _piece(index: int, id: str, name: str, arguments: str) -> Object:
    """The first piece of a call has its id, type and name."""
    if not id:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat, "Answer a chat", ChatRequest, ChatCompletion),
    Route("POST", "/openai/v1/chat/completions", chat, "Answer a chat (Groq's path)", ChatRequest, ChatCompletion),
)
