"""What is asked and when: lengths, prompts, arrivals, traces. Everything follows from the seed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from trivium.errors import InvalidRequestError

WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were
her all she there would their we him been has when who will more no if out so said what up its about into than them can only
other new some could time these two may then do first any my now such like our over man me even most made after also did
many before must through back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day same another know while
last might us great old year off come since against go came right used take three
""".split()  # noqa: SIM905
"""Common words, of which most tokenizers make one token each."""


class Range(NamedTuple):
    """Tokens, uniform from low to high."""

    low: int
    high: int

    @classmethod
    def of(cls, text: str) -> Range:
        """Of N or LOW-HIGH; ValueError if it is neither, or below 1."""
        low, found, high = text.partition("-")
        made = cls(int(low), int(high) if found else int(low))
        if not 1 <= made.low <= made.high:
            raise ValueError(f"lengths must be N or LOW-HIGH, from 1 up, not {text!r}")
        return made

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


class Part(NamedTuple):
    """One kind of request in a mix."""

    weight: float
    prompt: Range
    output: Range


MIXES: Mapping[str, tuple[Part, ...]] = {
    "chat": (
        Part(0.5, Range(16, 128), Range(32, 256)),
        Part(0.4, Range(128, 1024), Range(64, 512)),
        Part(0.1, Range(1024, 3072), Range(128, 768)),
    ),
    "summarize": (Part(0.7, Range(1024, 2048), Range(64, 192)), Part(0.3, Range(2048, 3584), Range(128, 384))),
    "code": (Part(0.7, Range(512, 2048), Range(8, 64)), Part(0.3, Range(128, 1024), Range(256, 768))),
    "short": (Part(1.0, Range(8, 64), Range(8, 64)),),
}
"""Made up to be like such uses, not recorded."""


class Ask(NamedTuple):
    """A request to come. at: seconds after the start; None: as soon as it may. prompt: what a trace gave: a text, token ids or
    messages; else it is made of prompt_tokens tokens behind prefix_tokens that all of group `group` share, or of blocks (a trace's
    hash ids) that are alike where their ids are."""

    number: int
    at: float | None
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    group: int = 0
    blocks: tuple[int, ...] = ()
    prompt: Any = None


@dataclass(frozen=True)
class Lengths:
    """mix: kinds of requests by weight. prefix_tokens: in front of a prompt, the same in each of `groups` groups."""

    mix: Sequence[Part]
    prefix_tokens: int = 0
    groups: int = 1

    def asks(self, times: Iterator[float | None], seed: int) -> Iterator[Ask]:
        """Requests at these times, without end but theirs."""
        random = Random(f"lengths {seed}")
        weights = [part.weight for part in self.mix]
        for number, at in enumerate(times):
            [part] = random.choices(self.mix, weights)
            group = random.randrange(self.groups)
            yield Ask(number, at, part.prompt.draw(random), part.output.draw(random), self.prefix_tokens, group)


def arrivals(rate: float, kind: str, seed: int) -> Iterator[float]:
    """Seconds after the start, `rate` a second: "constant" at equal gaps, "poisson" at exponential ones."""
    random, at = Random(f"arrivals {seed}"), 0.0
    for number in itertools.count():
        yield at if kind == "poisson" else number / rate
        at += -math.log(1.0 - random.random()) / rate


_FIELDS = {
    "prompt_tokens": ("input_length", "prompt_tokens", "input_tokens"),
    "output_tokens": ("output_length", "output_tokens", "max_tokens", "completion_tokens"),
}


def trace(path: Path, *, unit: float = 1.0, speed: float = 1.0) -> list[Ask]:
    """The requests of a recorded trace, by time: a JSON object a line with timestamp (`unit` seconds each) or none on all lines,
    input_length and output_length (also by the names of OpenAI's usage), and perhaps prompt (a text or ids), messages, or hash_ids
    (as Mooncake's published traces have them). The first begins at once; the others as much later, divided by speed. Raises
    InvalidRequestError with the line."""
    found = [_traced(line, path, number) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.strip()]
    timed = [ask for ask in found if ask.at is not None]
    if not found:
        raise InvalidRequestError(f"{path} has no requests")
    if len(timed) not in (0, len(found)):
        raise InvalidRequestError(f"{path}: either all lines have a timestamp, or none")
    found.sort(key=lambda ask: ask.at or 0.0)
    first = found[0].at or 0.0
    ordered = enumerate(found)
    return [ask._replace(number=n, at=None if ask.at is None else (ask.at - first) * unit / speed) for n, ask in ordered]


def _traced(line: str, path: Path, number: int) -> Ask:
    def wrong(why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{path}:{number}: {why}")

    try:
        data = json.loads(line)
    except ValueError as error:
        raise wrong(f"this is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise wrong("a line must be a JSON object")

    def length(kind: str, needed: bool) -> int:
        name = next((name for name in _FIELDS[kind] if data.get(name) is not None), None)
        if name is None and not needed:
            return 0
        if name is None or type(data[name]) is not int or data[name] < 1:
            raise wrong(f"{name or _FIELDS[kind][0]} must be an integer from 1 up")
        return int(data[name])

    at, prompt = data.get("timestamp"), data.get("prompt", data.get("messages"))
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at)):
        raise wrong("timestamp must be a number")
    if prompt is not None and not (isinstance(prompt, str | list) and prompt):
        raise wrong("prompt must be a text or token ids, and messages a list")
    hashes = data.get("hash_ids") or ()
    if not isinstance(hashes, list | tuple) or not all(type(one) is int for one in hashes):
        raise wrong("hash_ids must be integers")
    return Ask(0, at, length("prompt_tokens", prompt is None), length("output_tokens", True), blocks=tuple(hashes), prompt=prompt)


def pieces(ask: Ask, block: int) -> list[tuple[str, int]]:
    """(name, tokens) of what a made-up prompt consists of; pieces of one name and size are alike. block: tokens of a hash id."""
    if not ask.blocks:
        shared = [(f"prefix {ask.group}", ask.prefix_tokens)] if ask.prefix_tokens else []
        return [*shared, (f"request {ask.number}", ask.prompt_tokens)]
    found, left = [], ask.prompt_tokens
    for number in ask.blocks:
        found.append((f"block {number}", min(block, left)))
        left -= found[-1][1]
    return [piece for piece in (*found, (f"request {ask.number}", left)) if piece[1] > 0]


@dataclass(frozen=True)
class Text:
    """Prompts as words: one of w words has `fixed` + w * `per_word` tokens, as the server was seen to count them."""

    seed: int
    fixed: float = 0.0
    per_word: float = 1.0
    block: int = 512

    def prompt(self, ask: Ask) -> str:
        """Of about the tokens asked for."""
        found = pieces(ask, self.block)
        last = len(found) - 1
        counts = [(tokens - self.fixed * (index == last)) / self.per_word for index, (_, tokens) in enumerate(found)]
        return " ".join(self.words(name, max(1, round(count))) for (name, _), count in zip(found, counts))

    def words(self, name: str, count: int) -> str:
        """`count` words that depend on the name and the seed."""
        return " ".join(Random(f"{name} {self.seed}").choices(WORDS, k=count))


@dataclass(frozen=True)
class Ids:
    """Prompts as token ids below `vocab_size`, of exactly the tokens asked for."""

    seed: int
    vocab_size: int
    block: int = 512

    def prompt(self, ask: Ask) -> list[int]:
        """Token ids."""
        found = pieces(ask, self.block)
        return [one for name, count in found for one in Random(f"{name} {self.seed}").choices(range(self.vocab_size), k=count)]
