"""Model output to reasoning, content and tool calls, one character at a time.

One parser for all families and both modes: whole text is text pushed at once, so streamed and whole answers are equal by
construction. What is a family's own stands in the tables of `syntaxes`. The rules:

- Reasoning begins at the start of an answer (harmony: anywhere), or is under way where the prompt opened it; it ends at its
  closing marker or with the text. Tool calls inside it are reasoning.
- Blanks around a marker belong to the marker; no other text is lost, but the markers and the syntax around a complete call.
- A call is announced when its name is known and its arguments begin, and its arguments follow as they come. If the text breaks
  off or turns out to be no JSON, the call never ends (it is not complete) and the rest is content. What is malformed before
  that comes out as content, markers included. Arguments that are not written as JSON come in one piece when the call is whole.
- Text that may become a marker is held until it can't any more; the name before bare arguments has `MAX_HEAD` characters at most.
- A call written without any marker must name a tool that was offered, so that JSON that was asked for stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

from trivium.text.events import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta, merge
from trivium.text.syntaxes import ARGUMENTS, CallForm, Convert, ReasoningSyntax, Schemas, ToolSyntax, is_name

MAX_HEAD = 256
_KEYS = frozenset({"", "name", "id", "type", "function", *ARGUMENTS})
_JSON_OUTSIDE_STRINGS = frozenset('{}[]:," \t\r\n0123456789+-.eEtrufalsn')
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_Reads = Generator[None, str, Any]
"""A piece of the parser: asks for one character after the other, "" at the end of the text."""


class OutputParser:
    """Parses one output. `inside`: the prompt ends with the marker that opens reasoning. `schemas`: the offered tools' parameters
    by name. `calls` is the number of complete calls so far."""

    def __init__(
        self, tools: ToolSyntax | None = None, reasoning: ReasoningSyntax | None = None, *, inside: bool = False,
        schemas: Schemas | None = None,
    ) -> None:  # fmt: skip
        self.calls = 0
        self._forms = {form.open: form for form in tools.forms} if tools else {}
        self._reasoning, self._schemas = reasoning, schemas or {}
        self._out: list[Event] = []
        self._held: list[str] = []
        self._back: list[str] = []
        self._started = 0
        self._plain: re.Pattern[str] | None = None
        """Text that needs no look at its characters where the parser stands, and what it is."""
        self._kind: type[ContentDelta] | type[ReasoningDelta] = ContentDelta
        self._trim, self._fresh, self._ended = inside, True, False
        self._drops = frozenset((tools.drops if tools else ()) + (reasoning.drops if reasoning else ()))
        self._parse = self._message(inside)
        next(self._parse)

    def push(self, text: str) -> list[Event]:
        """What is certain with `text`, which continues all text before it."""
        at = 0
        while at < len(text):
            run = self._plain and self._plain.match(text, at)
            if run:
                self._out.append(self._kind(run[0]))
                self._trim, at = False, run.end()
            else:
                self._parse.send(text[at])
                at += 1
        return self._news()

    def finish(self) -> list[Event]:
        """The text ends here: what was held comes out."""
        self._ended = True
        next(self._parse, None)
        return self._news()

    def _news(self) -> list[Event]:
        events, self._out = merge(self._out), []
        return events

    def _next(self) -> _Reads:
        if self._back:
            return self._back.pop()
        return "" if self._ended else ((yield) or "")

    def _message(self, inside: bool) -> _Reads:
        opens = self._reasoning.opens if self._reasoning else ()
        anywhere = bool(self._reasoning and self._reasoning.anywhere)
        bare = tuple(form.open for form in self._forms.values() if form.bare)
        marked = (*(open_ for open_ in self._forms if open_ not in bare), *self._drops, *(opens if anywhere else ()))
        if inside:
            yield from self._think()
        while marker := (yield from self._text(ContentDelta, marked, (*bare, *opens))):
            if marker in opens:
                yield from self._think()
            elif marker in self._drops:
                self._accept()
            elif not (yield from self._calls(self._forms[marker])):
                self._release(ContentDelta)

    def _think(self) -> _Reads:
        assert self._reasoning is not None
        self._accept()
        yield from self._text(ReasoningDelta, self._reasoning.closes, ())
        self._accept()

    def _text(self, kind: type[ContentDelta] | type[ReasoningDelta], markers: tuple[str, ...], first: tuple[str, ...]) -> _Reads:
        """Lets text through up to one of `markers`, or of `first` while there was no content; returns it, held, or ""."""
        tail, self._kind = "", kind
        other = rf"[^\s{re.escape(''.join(sorted({marker[0] for marker in markers})))}]+"
        plain = re.compile(rf"{other}(?:\s++{other})*")
        while True:
            self._plain = None if tail or self._held or self._back or (first and self._fresh) else plain
            char = yield from self._next()
            self._plain = None
            if not char:
                break
            tail += char
            while tail and not any(m.startswith(tail) for m in (markers + first if self._fresh else markers)):
                self._held.append(tail[0])
                if not tail[0].isspace():
                    self._release(kind)
                tail = tail[1:]
            if tail in markers or (self._fresh and tail in first):
                self._held.append(tail)
                return tail
        self._held.append(tail)
        self._release(kind)
        return ""

    def _release(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        """What was held is plain text."""
        text = "".join(self._held)
        self._held.clear()
        if text := text.lstrip() if self._trim else text:
            self._out.append(kind(text))
            self._trim, self._fresh = False, self._fresh and kind is ReasoningDelta

    def _accept(self) -> None:
        """What was held is syntax."""
        self._held.clear()
        self._trim = True

    def _calls(self, form: CallForm) -> _Reads:
        """The calls behind a marker, which is held. False: what is held now is none."""
        if form.bare:
            self._back.append(self._held.pop())
        if form.convert is not None:
            return (yield from self._converted(form, form.convert))
        listed, whole = (yield from self._match("[")), False
        while (yield from self._match("{", skip=",;" if whole else "")):
            whole = yield from self._object(form)
            if not whole:
                return False
        if not whole and not (form.head and (yield from self._named(form))):
            return False
        for close in ("]", *form.closes) if listed else form.closes:
            yield from self._match(close)
        self._accept()
        return True

    def _match(self, literal: str, skip: str = "") -> _Reads:
        """Whether `literal` comes next, behind blanks and characters of `skip`. If so it is read and held, else nothing is read."""
        read: list[str] = []
        rest = literal
        while rest and (char := (yield from self._next())):
            read.append(char)
            if char == rest[0]:
                rest = rest[1:]
            elif len(rest) < len(literal) or not (char.isspace() or char in skip):
                break
        if rest:
            self._back.extend(reversed(read))
        else:
            self._held.extend(read)
        return not rest

    def _named(self, form: CallForm) -> _Reads:
        """A name, as `form.head` says, and bare arguments."""
        head = ""
        while len(head) < MAX_HEAD and (char := (yield from self._next())):
            self._held.append(char)
            if char == "{":
                named = re.fullmatch(form.head, head)
                return named is not None and is_name(named[1]) and (yield from self._object(form, named[1]))
            head += char
        return False

    def _object(self, form: CallForm, name: str = "") -> _Reads:
        """The rest of a JSON object whose "{" is held: the arguments of `name`, or a wrapper that holds name and arguments."""
        walk, raw, wrapped = Walk(), ["{"], not name
        walk.step("{")
        index = None if wrapped else self._start(name, "{")
        streams = not wrapped
        while walk.depth:
            char = yield from self._next()
            if not char or not walk.step(char) or (wrapped and not self._may_call(walk, form)):
                self._back.extend(char)
                return False
            raw.append(char)
            if index is None and char == "{" and walk.depth == 2 and walk.key in ARGUMENTS and is_name(walk.name):
                index, streams = self._start(walk.name, ""), True
            if streams and index is not None:
                self._out.append(CallArguments(index, char))
                streams = walk.depth > wrapped
            else:
                self._held.append(char)
        return self._settle("".join(raw), index, form)

    def _may_call(self, walk: Walk, form: CallForm) -> bool:
        return walk.key in _KEYS and not (form.bare and walk.name and walk.name not in self._schemas)

    def _settle(self, raw: str, index: int | None, form: CallForm) -> bool:
        """The object is closed: the end of a call, if it is JSON. A wrapper that did not show its name in time is read now."""
        if index is None:
            return self._emit(form, _unwrap, raw)
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            return False
        self._end(index)
        return True

    def _converted(self, form: CallForm, convert: Convert) -> _Reads:
        """Calls whose arguments are not written as JSON: read whole, up to the closing marker or bracket, and converted."""
        if form.begin and not (yield from self._match(form.begin)):
            return False
        pieces, tail, walk = [form.begin], "", Walk("\"'", None)
        close = "" if form.bare else form.closes[0]
        while char := (yield from self._next()):
            self._held.append(char)
            pieces.append(char)
            tail = (tail + char)[-max(len(close), 1) :]
            if form.bare and not (walk.step(char) and (walk.calls or char.isalnum() or char.isspace() or char in "_.[")):
                return False
            if (form.bare and walk.depth == 0) or tail == close:
                return self._emit(form, convert, "".join(pieces)[: -len(close) or None])
        return False

    def _emit(self, form: CallForm, convert: Convert, body: str) -> bool:
        """The calls that `convert` reads in `body`, all at once; False: they are none."""
        try:
            calls = [(name, _dumps(arguments)) for name, arguments in convert(body, self._schemas)]
        except (ValueError, TypeError, KeyError, IndexError, SyntaxError, RecursionError, MemoryError):
            return False
        if not calls or not all(is_name(name) and (not form.bare or name in self._schemas) for name, _ in calls):
            return False
        for name, arguments in calls:
            self._end(self._start(name, arguments))
        return True

    def _start(self, name: str, arguments: str) -> int:
        import secrets

        self._accept()
        index, self._started = self._started, self._started + 1
        self._out.append(CallStart(index, "".join(secrets.choice(_ID_LETTERS) for _ in range(9)), name))
        if arguments:
            self._out.append(CallArguments(index, arguments))
        return index

    def _end(self, index: int) -> None:
        self._accept()
        self.calls += 1
        self._out.append(CallEnd(index))


class Walk:
    """Follows brackets and strings. `key`: the key of the outermost object whose value is being read, "" between values; `name`:
    its value of "name" once it is known; `calls`: a round bracket was opened."""

    def __init__(self, quotes: str = '"', legal: frozenset[str] | None = _JSON_OUTSIDE_STRINGS) -> None:
        self.depth, self.key, self.name, self.calls = 0, "", "", False
        self._quotes, self._legal = quotes, legal
        self._quote, self._escaped = "", False
        self._string: list[str] = []

    def step(self, char: str) -> bool:
        """Reads a character; False: it can't stand here."""
        if self._quote:
            return self._in_string(char)
        if char in self._quotes:
            self._quote = char
            self._string.clear()
        elif char in "([{":
            self.depth += 1
            self.calls |= char == "("
        elif char in ")]}":
            self.depth -= 1
        elif self.depth == 1 and char in ":,":
            self.key = "".join(self._string) if char == ":" else ""
        return self._legal is None or char in self._legal

    def _in_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""
            if self.depth == 1 and self.key == "name" and "\\" not in self._string:
                self.name = "".join(self._string)
            return True
        self._string.append(char)
        return char >= " "


def _unwrap(body: str, schemas: Schemas) -> list[tuple[str, Any]]:
    """The call {"name": …, "arguments": …}, also inside {"function": …}; arguments may be text, null or left out."""
    value = json.loads(body)
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    arguments = next((inner[key] for key in ARGUMENTS if key in inner), None)
    return [(inner["name"], json.loads(arguments) if isinstance(arguments, str) else arguments or {})]


def _dumps(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return json.dumps(arguments, allow_nan=False)
