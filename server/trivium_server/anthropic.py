"""Anthropic: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct
from trivium import CompletionOutput, RequestOutput, StructuredOutputs, errors

from trivium_server.blocks import Block, Blocks, whole
from trivium_server.faults import anthropic_error, bad
from trivium_server.http import Call, Route, Stream, named
from trivium_server.images import data_url, pictured
from trivium_server.openai_types import Object, Timing, new_id, timing
from trivium_server.structure import json_schema
from trivium_server.work import Tally, Work, sampling, template_arguments


class MessageTool(Struct, kw_only=True):
    """input_schema: a JSON schema of an object. Tools that Anthropic itself runs (with a type of their own) are refused."""

    name: str
    description: str | None = None
    input_schema: Object | None = None
    type: str | None = None


class MessageToolChoice(Struct, kw_only=True):
    type: Annotated[str, Meta(pattern="^(auto|any|tool|none)$")]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageCountRequest(Struct, kw_only=True):
    """What a prompt is made of. cache_control, wherever it stands, is not needed: prefixes are cached by themselves."""

    model: str
    messages: list[Object]
    system: str | list[Object] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Object | None = None

    def chat(self) -> list[Object]:
        """The messages as the model's template takes them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [m for message in [*system, *self.messages] for m in _messages(message)]

    def tool_fields(self) -> Object:
        """tools and tool_choice as trivium takes them."""
        for tool in self.tools or ():
            if tool.type not in (None, "custom"):
                raise bad(f"tools: {tool.type!r} is a tool of Anthropic's own servers; give tools with an input_schema", "tools")
        tools = [_function(tool) for tool in self.tools or ()] or None
        kind = None if self.tool_choice is None else self.tool_choice.type
        named = {"type": "function", "function": {"name": self.tool_choice.name if self.tool_choice else None}}
        choice: Any = {None: None, "auto": "auto", "any": "required", "none": "none", "tool": named}[kind]
        return {"tools": tools, "tool_choice": choice}


class MessageRequest(MessageCountRequest, kw_only=True):
    """output_config: {"format": {"type": "json_schema", "schema"}}; output_format: the same."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None
    include_metrics: bool | None = None
    timeout: float | None = None

    @property
    def single(self) -> bool:
        """Whether there may be one tool call at most."""
        return self.tool_choice is not None and bool(self.tool_choice.disable_parallel_tool_use)

    async def work(self, call: Call) -> Work:
        """Raises Refusal or a TriviumError."""
        served = await call.use(self.model, self)
        own = {"stop": self.stop_sequences, "structured_outputs": _structure(self)}
        params = sampling(served, self, self.max_tokens, **own)
        options = {**thinking_arguments(self.thinking), **call.options(self), **self.tool_fields()}
        return Work(served, [self.chat()], params, options, chat=True)


def thinking_arguments(thinking: Mapping[str, Any] | None) -> Object:
    """What templates of models that can think ask for."""
    return {} if thinking is None else template_arguments({"enable_thinking": thinking.get("type") in ("enabled", "adaptive")})


def _structure(body: MessageRequest) -> StructuredOutputs | None:
    form = (body.output_config or {}).get("format") or body.output_format
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), Mapping):
        raise bad('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
    return json_schema(form["schema"])


def _function(tool: MessageTool) -> Object:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema or {"type": "object"}}}


def _messages(message: Mapping[str, Any]) -> list[Object]:
    """One of Anthropic's messages as one or more of a chat template's."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[Object] = []
    calls: list[Object] = []
    results: list[Object] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            texts.append({"type": "image_url", "image_url": _source(block.get("source"), f"content[{i}].source")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block.get("content"), i)})
        elif kind not in ("thinking", "redacted_thinking"):
            possible = "possible are text, image, tool_use, tool_result and thinking"
            raise bad(f"messages: content[{i}] has the type {kind!r}; {possible}", "messages")
    if calls:
        return [*results, {"role": role, "content": texts or None, "tool_calls": calls}]
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _source(source: Any, where: str) -> str:
    """The data URL of an image."""
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        form = '{"type": "base64", "media_type": "image/png", "data": ...}'
        raise bad(f"messages: {where} must be {form}; this server fetches nothing and keeps no files", "messages")
    return data_url(source.get("media_type"), source.get("data"))


def _result(content: Any, i: int) -> Any:
    """What a tool gave: a text, or blocks of text and images."""
    if not isinstance(content, list):
        return content
    return [_given(part, f"content[{i}].content[{k}]") for k, part in enumerate(content)]


def _given(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return {"type": "image_url", "image_url": _source(part.get("source"), f"{where}.source")}
    if kind != "text":
        raise bad(f"messages: {where} has the type {kind!r}; possible in tool results are text and image", "messages")
    return {"type": "text", "text": part.get("text")}


class ThinkingDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """input_tokens: those that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(Struct, kw_only=True):
    id: str
    model: str
    content: list[Object]
    stop_reason: str | None
    usage: MessageUsage
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"
    metrics: Timing | None = None


class TokenCount(Struct):
    input_tokens: int


def _usage(tally: Tally) -> MessageUsage:
    cached, thought = tally.cached, ThinkingDetails(tally.reasoning)
    return MessageUsage(
        input_tokens=tally.prompt_tokens - cached, output_tokens=tally.made, output_tokens_details=thought,
        cache_read_input_tokens=cached,
    )  # fmt: skip


def _to_the_end(work: Work) -> Work:
    """The same with as many tokens as there is room for: clients of Anthropic ask for more than a small model can ever make, and
    its service, too, ends such an answer where the context does."""
    return replace(work, params=replace(work.params, max_tokens=None))


def _stop(output: CompletionOutput, work: Work) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if output.finish_reason == "length" and work.params.max_tokens is None:
        return "model_context_window_exceeded", None
    if output.finish_reason == "stop" and isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}.get(
        output.finish_reason or "", "end_turn"
    ), None


def _begun(block: Block) -> Object:
    """A block as it opens."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if block.kind == "reasoning" else {"type": "text", "text": ""}


def _done(block: Block) -> Object:
    """A block as it stands in a whole answer."""
    if block.kind == "call":
        return {**_begun(block), "input": json.loads(block.text or "{}")}
    return {**_begun(block), "thinking" if block.kind == "reasoning" else "text": block.text}


async def messages(call: Call, body: MessageRequest) -> MessageReply | Stream:
    work = await body.work(call)
    timed = call.app.settings.timings or bool(body.include_metrics)
    name = new_id("msg_")
    if body.stream:
        return Stream(_events(call, body, work, name, timed), named, b"", ping=b'event: ping\ndata: {"type":"ping"}\n\n')
    try:
        [output] = await call.app.moderation.whole(call, work)
    except errors.ContextLengthError:
        work = _to_the_end(work)
        [output] = await call.app.moderation.whole(call, work)
    tally = Tally(work.served.llm.tokenizer)
    tally.add(0, output)
    reason, sequence = _stop(output.outputs[0], work)
    content = [_done(block) for block in whole(output.outputs[0], single=body.single)]
    return MessageReply(
        id=name, model=work.served.name, content=content, stop_reason=reason, stop_sequence=sequence, usage=_usage(tally),
        metrics=timing(tally) if timed else None,
    )  # fmt: skip


async def _events(call: Call, body: MessageRequest, work: Work, name: str, timed: bool) -> AsyncGenerator[Object, None]:
    tally, blocks = Tally(work.served.llm.tokenizer), Blocks(single=body.single)
    reason: tuple[str, str | None] = ("end_turn", None)
    async with contextlib.aclosing(_news(call, work)) as news:
        async for work, number, output in news:
            tally.add(number, output)
            if not output.outputs and not output.finished:
                empty = MessageReply(id=name, model=work.served.name, content=[], stop_reason=None, usage=_usage(tally))
                yield {"type": "message_start", "message": empty}
            for one in output.outputs:
                for event in _changes(blocks, one):
                    yield event
                if one.finish_reason is not None:
                    reason = _stop(one, work)
    for _, block, _ in blocks.close():
        yield {"type": "content_block_stop", "index": block.index}
    delta = {"stop_reason": reason[0], "stop_sequence": reason[1]}
    yield {"type": "message_delta", "delta": delta, "usage": _usage(tally), **({"metrics": timing(tally)} if timed else {})}
    yield {"type": "message_stop"}


async def _news(call: Call, work: Work) -> AsyncGenerator[tuple[Work, int, RequestOutput], None]:
    """What comes, and what it comes from."""
    try:
        async with contextlib.aclosing(call.app.moderation.stream(call, work)) as news:
            async for number, output in news:
                yield work, number, output
        return
    except errors.ContextLengthError:
        if work.params.max_tokens is None:
            raise
    async with contextlib.aclosing(_news(call, _to_the_end(work))) as again:
        async for found in again:
            yield found


_DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json"),
}  # fmt: skip
"""By kind of block: type of its deltas, and the field that holds the text."""


def _changes(blocks: Blocks, output: CompletionOutput) -> list[Object]:
    events: list[Object] = []
    for change, block, text in blocks.take(output):
        if change == "open":
            events.append({"type": "content_block_start", "index": block.index, "content_block": _begun(block)})
        elif change == "close":
            events.append({"type": "content_block_stop", "index": block.index})
        else:
            kind, field = _DELTAS[block.kind]
            events.append({"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: text}})
    return events


async def count_tokens(call: Call, body: MessageCountRequest) -> TokenCount:
    served = await call.use(body.model, body)
    tools = body.tool_fields()["tools"]
    more = {} if tools is None else {"tools": tools}
    messages = pictured(served, body.chat())
    served.check_length(messages)
    ids = await asyncio.to_thread(served.llm.encode_chat, messages, **more, **thinking_arguments(body.thinking))
    return TokenCount(len(ids))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/messages", messages, "Answer a chat (Anthropic)", MessageRequest, MessageReply, anthropic_error),
    Route(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count a chat's tokens", MessageCountRequest, TokenCount, anthropic_error
    ),
)
