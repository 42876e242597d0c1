"""What an answer consists of: reasoning, content and tool calls, as a sequence of typed events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the model says to the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of an answer from 0; `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; joined they are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete: its arguments are a JSON object. A call that never ends broke off or is no JSON."""

    index: int


Event = ContentDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, with its arguments as JSON text. complete=False: it broke off, so the arguments are no whole JSON object. In the news
    of a stream: what is new of a call, `id` and `name` empty after its first piece."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool


def merge(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours of one kind (and of one call) joined."""
    merged: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *rest = group
        if rest and isinstance(first, ContentDelta | ReasoningDelta | CallArguments):
            first = replace(first, text="".join([first.text, *(event.text for event in rest if isinstance(event, type(first)))]))
        merged.append(first)
    return merged


def joined(events: Iterable[Event], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    """All text of one kind."""
    return "".join(event.text for event in events if isinstance(event, kind))


def tool_calls(events: Iterable[Event]) -> tuple[ToolCall, ...]:
    """The calls in `events`, in order of index."""
    starts, texts, ended = dict[int, CallStart](), defaultdict[int, list[str]](list), set[int]()
    for event in events:
        if isinstance(event, CallStart):
            starts[event.index] = event
        elif isinstance(event, CallArguments):
            texts[event.index].append(event.text)
        elif isinstance(event, CallEnd):
            ended.add(event.index)
    calls = [starts.get(index, CallStart(index, "", "")) for index in sorted({*starts, *texts, *ended})]
    return tuple(ToolCall(c.index, c.id, c.name, "".join(texts[c.index]), c.index in ended) for c in calls)
