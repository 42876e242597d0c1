"""OpenAI: /v1/responses, without state: nothing is stored, so nothing can be continued by its id."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from trivium import StructuredOutputs

from trivium_server.blocks import Block, Blocks, whole
from trivium_server.faults import bad
from trivium_server.http import Call, Route, Stream, named, told
from trivium_server.openai_types import Object, Timing, new_id, timing
from trivium_server.structure import json_object, json_schema
from trivium_server.work import Tally, Work, sampling, template_arguments

_TEXTS = ("input_text", "output_text", "text")
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons of an answer that is not whole, as incomplete_details calls them."""


class ResponseRequest(Struct, kw_only=True):
    """input: a text, or items of type message, function_call, function_call_output or reasoning (which is left out)."""

    input: str | list[Object]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    text: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Object | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    metadata: Object | None = None
    stream: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    include_metrics: bool | None = None

    @property
    def single(self) -> bool:
        """Whether there may be one tool call at most."""
        return self.parallel_tool_calls is False

    async def work(self, call: Call) -> Work:
        """Raises Refusal or a TriviumError."""
        for field in ("previous_response_id", "conversation", "store", "background"):
            if getattr(self, field):
                raise bad(f"{field}: this server stores no responses; send the whole conversation as input", field)
        served = await call.use(self.model, self)
        params = sampling(served, self, self.max_output_tokens, structured_outputs=self._structure())
        template = template_arguments(None, reasoning_effort=(self.reasoning or {}).get("effort"))
        choice: Any = self.tool_choice
        if isinstance(choice, Mapping):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        tools = [_function(tool) for tool in self.tools or ()] or None
        options = {**template, **call.options(self), "tools": tools, "tool_choice": choice if tools else None}
        return Work(served, [self._messages()], params, options, chat=True)

    def _structure(self) -> StructuredOutputs | None:
        form = (self.text or {}).get("format") or {}
        kind = form.get("type", "text") if isinstance(form, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return json_object()
        if kind != "json_schema" or not isinstance(form.get("schema"), Mapping):
            raise bad("text.format must be of type text, json_object, or json_schema with a schema", "text")
        return json_schema(form["schema"])

    def _messages(self) -> list[Object]:
        items: list[Object] = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        system: list[Object] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        found = system
        for i, item in enumerate(items):
            for message in _message(item, i):
                before = found[-1] if found else {}
                if message.get("tool_calls") and before.get("role") == "assistant":
                    before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
                else:
                    found.append(message)
        return found


def _message(item: Mapping[str, Any], i: int) -> list[Object]:
    """An item as a message of a chat, if it is one."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        parts = [_part(part, i) for part in content] if isinstance(content, list) else content
        return [{"role": item.get("role"), "content": parts}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return [{"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"), i)}]
    if kind == "reasoning":
        return []
    raise bad(f"input[{i}] has the type {kind!r}; possible are message, function_call, function_call_output and reasoning", "input")


def _output(output: Any, i: int) -> Any:
    """What a function gave: a text, or parts with texts and images."""
    if not isinstance(output, list):
        return output
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in output]
    if wrong := [kind for kind in kinds if kind not in (*_TEXTS, "input_image")]:
        raise bad(f"input[{i}].output has a part of the type {wrong[0]!r}; possible are input_text and input_image", "input")
    return [_part(part, i) for part in output]


def _part(part: Any, i: int) -> Any:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    return part


def _function(tool: Mapping[str, Any]) -> Object:
    if tool.get("type") != "function":
        raise bad(f"tools: {tool.get('type')!r} is not possible here, only function", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k in ("name", "description", "parameters")}}


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    """Tokens of reasoning are counted as output, too."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Struct, kw_only=True):
    """status: in_progress, completed, incomplete or failed."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[Object]
    tools: list[Object]
    tool_choice: str | Object
    parallel_tool_calls: bool
    incomplete_details: Object | None = None
    error: Object | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: Object | None = None
    truncation: str = "disabled"
    metadata: Object = {}
    previous_response_id: str | None = None
    store: bool = False
    object: str = "response"
    metrics: Timing | None = None


class _Writer:
    """Of one response."""

    def __init__(self, call: Call, body: ResponseRequest, work: Work) -> None:
        self._call, self._body, self._work = call, body, work
        self._ids: dict[int, str] = {}
        self.id = new_id("resp_")
        self.tally = Tally(work.served.llm.tokenizer)
        self.reason: str | None = None
        self.sequence = -1

    def response(self, status: str, blocks: list[Block], error: Object | None = None) -> Response:
        """As it stands."""
        body, tally = self._body, self.tally
        timed = self._call.app.settings.timings or bool(body.include_metrics)
        cut = {"reason": _CUT[self.reason or ""]} if status == "incomplete" else None
        return Response(
            id=self.id, created_at=int(self._call.arrival), model=self._work.served.name, status=status, error=error,
            output=[self.item(block, "incomplete" if status == "incomplete" else "completed") for block in blocks],
            tools=body.tools or [], tool_choice=body.tool_choice or "auto", parallel_tool_calls=not body.single,
            incomplete_details=cut, usage=self._usage() if tally.metrics is not None else None, instructions=body.instructions,
            max_output_tokens=body.max_output_tokens, temperature=self._work.params.temperature, top_p=self._work.params.top_p,
            text=body.text or {"format": {"type": "text"}}, metadata=body.metadata or {},
            metrics=timing(tally) if timed and tally.metrics is not None else None,
        )  # fmt: skip

    def _usage(self) -> ResponseUsage:
        t = self.tally
        return ResponseUsage(
            input_tokens=t.prompt_tokens, input_tokens_details=InputDetails(t.cached), output_tokens=t.made,
            output_tokens_details=OutputDetails(t.reasoning), total_tokens=t.prompt_tokens + t.made,
        )  # fmt: skip

    def end(self) -> str:
        """The status that the finish reason means."""
        return "incomplete" if self.reason in _CUT else "completed"

    def item(self, block: Block, status: str, *, begun: bool = False) -> Object:
        """A block as an output item; begun: with nothing in it yet."""
        name = self._ids.setdefault(block.index, new_id({"call": "fc_", "reasoning": "rs_"}.get(block.kind, "msg_")))
        if block.kind == "call":
            arguments = "" if begun else block.text
            called = {"call_id": block.id, "name": block.name, "arguments": arguments}
            return {"id": name, "type": "function_call", **called, "status": status}
        content = [] if begun else [self.part(block.kind, block.text)]
        if block.kind == "reasoning":
            return {"id": name, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": name, "type": "message", "role": "assistant", "content": content, "status": status}

    def part(self, kind: str, text: str) -> Object:
        """A content part."""
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def event(self, kind: str, **fields: Any) -> Object:
        """The next event."""
        self.sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self.sequence, **fields}

    def change(self, change: str, block: Block, text: str) -> list[Object]:
        """The events of a block that opens, grows or closes."""
        place: Object = {"output_index": block.index}
        if change == "open":
            added = [self.event("output_item.added", **place, item=self.item(block, "in_progress", begun=True))]
            if block.kind != "call":
                where = {**place, "item_id": self._ids[block.index], "content_index": 0}
                added.append(self.event("content_part.added", **where, part=self.part(block.kind, "")))
            return added
        place["item_id"] = self._ids[block.index]
        kind = {"call": "function_call_arguments", "reasoning": "reasoning_text"}.get(block.kind, "output_text")
        inside: Object = {} if block.kind == "call" else {"content_index": 0}
        more: Object = {"logprobs": []} if block.kind == "text" else {}
        if change == "more":
            return [self.event(f"{kind}.delta", **place, **inside, **more, delta=text)]
        closed = [self.event(f"{kind}.done", **place, **inside, **more, **_final(block))]
        if block.kind != "call":
            closed.append(self.event("content_part.done", **place, **inside, part=self.part(block.kind, block.text)))
        status = "completed" if block.complete and self.reason not in _CUT else "incomplete"
        item = self.item(block, status)
        return [*closed, self.event("output_item.done", output_index=block.index, item=item)]


def _final(block: Block) -> Object:
    return {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}


async def respond(call: Call, body: ResponseRequest) -> Response | Stream:
    work = await body.work(call)
    writer = _Writer(call, body, work)
    if body.stream:
        return Stream(_events(call, body, work, writer), named, b"")
    [output] = await call.app.moderation.whole(call, work)
    writer.tally.add(0, output)
    writer.reason = output.outputs[0].finish_reason
    return writer.response(writer.end(), whole(output.outputs[0], single=body.single))


async def _events(call: Call, body: ResponseRequest, work: Work, writer: _Writer) -> AsyncGenerator[Object, None]:
    blocks, begun = Blocks(single=body.single), False
    try:
        async with contextlib.aclosing(call.app.moderation.stream(call, work)) as news:
            async for number, output in news:
                writer.tally.add(number, output)
                if not begun:
                    yield writer.event("created", response=writer.response("in_progress", []))
                    begun = True
                    yield writer.event("in_progress", response=writer.response("in_progress", []))
                for one in output.outputs:
                    writer.reason = one.finish_reason
                    for change in blocks.take(one):
                        for event in writer.change(*change):
                            yield event
    except Exception as fault:
        if not begun:
            raise
        error = {"code": "server_error", "message": told(call, fault).message}
        yield writer.event("failed", response=writer.response("failed", blocks.all, error))
        return
    for change in blocks.close():
        for event in writer.change(*change):
            yield event
    yield writer.event(writer.end(), response=writer.response(writer.end(), blocks.all))


ROUTES: tuple[Route, ...] = (Route("POST", "/v1/responses", respond, "Answer (Responses)", ResponseRequest, Response),)
