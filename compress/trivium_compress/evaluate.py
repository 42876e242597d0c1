"""evaluate(): a model on a text or chats, alone or against another, whatever backend and format either has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import InvalidRequestError, UnsupportedError

from trivium_compress.logits import KeptScorer, Scorer
from trivium_compress.measures import Tally, compare, surprise
from trivium_compress.texts import Window, of_chats, of_text

Array = npt.NDArray[Any]
Progress = Callable[[int, int, str], None]
"""Is told the windows that are done, all of them, and what is being done."""


@dataclass(frozen=True)
class Side:
    """A model and the arguments of LLM() with which it is loaded."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A side that several models are judged against, loaded once. Its logits are kept in `folder`: as many float32 as the
    vocabulary has tokens for every position."""

    side: Side
    scorer: KeptScorer

    @classmethod
    @contextlib.contextmanager
    def open(cls, side: Side, window: int, folder: Path) -> Iterator[Measure]:
        scorer = KeptScorer(side.model, window, side.options, folder)
        try:
            yield cls(side, scorer)
        finally:
            scorer.close()


@dataclass(frozen=True)
class Material:
    """Either a text, of which each window's tokens after `context` count (None: half of the window), or chats, whose last answers
    count. max_windows: how many are taken at most, evenly from the whole."""

    text: Path | None = None
    chats: Path | None = None
    window: int = 512
    context: int | None = None
    max_windows: int | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.chats is None):
            raise InvalidRequestError("give a text or chats, and not both", param="text")
        if self.window < 2 or not 1 <= self.first < self.window:
            message = f"a window of {self.window} tokens with {self.first} that only give context leaves nothing to foretell"
            raise InvalidRequestError(message, param="context")

    @property
    def first(self) -> int:
        return self.window // 2 if self.context is None else self.context

    def windows(self, tokenizer: Any) -> list[Window]:
        """All, or `max_windows` of them."""
        found = (
            of_chats(tokenizer, self.chats, self.window) if self.chats is not None
            else of_text(tokenizer, self.text or Path(), self.window, self.first)
        )  # fmt: skip
        most = self.max_windows or len(found)
        return found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]


class Answer(NamedTuple):
    """What both models make of a prompt, greedily."""

    prompt: str
    measure: str
    judged: str

    @property
    def changed(self) -> bool:
        return self.measure != self.judged


def evaluate(
    judged: Side, material: Material, against: Side | Measure | None = None, *, answers: int = 0, answer_tokens: int = 128,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The figures of measures.Tally, who was compared, and `answers` (of so many prompts, what either makes of them, greedily).
    Both models are loaded, unless an open measure is given, which has no answers; of the logits, one window's of the measure and a
    step's of what is judged are held at a time.

    Raises InvalidRequestError for what can't be asked, and UnsupportedError if the two have different vocabularies.
    """
    report = progress or (lambda done, total, what: None)
    with contextlib.ExitStack() as opened:
        room = answer_tokens if answers else 0
        scorer = _opened(judged, material.window, room, opened)
        measure, against = _measure_of(against, material.window, room, opened)
        if measure is not None:
            _check_alike(scorer, measure)
            if answers:
                min(side.longest_prompt(answer_tokens) for side in (scorer, measure))
        windows = material.windows(scorer.llm.tokenizer)
        tally = Tally()
        for i, window in enumerate(windows):
            report(i, len(windows), "windows")
            _measure(tally, window, scorer, measure)
        found = _answers(windows, scorer, measure, answers, answer_tokens, report)
        other = None if measure is None or against is None else _described(against, measure)
        sides = {"judged": _described(judged, scorer), "against": other}
    report(len(windows), len(windows), "done")
    return {**sides, "material": _material(material), **tally.figures(), "answers": [a._asdict() for a in found]}


def _opened(side: Side, window: int, room: int, opened: contextlib.ExitStack) -> Scorer:
    scorer = Scorer(side.model, window, side.options, room=room)
    opened.callback(scorer.close)
    return scorer


def _measure_of(
    against: Side | Measure | None, window: int, room: int, opened: contextlib.ExitStack
) -> tuple[Scorer | None, Side | None]:  # fmt: skip
    if not isinstance(against, Measure):
        return (_opened(against, window, room, opened) if against is not None else None), against
    if room:
        raise InvalidRequestError("an open measure has logits alone: give a side to compare answers", param="answers")
    return against.scorer, against.side


def _described(side: Side, scorer: Scorer) -> dict[str, Any]:
    loaded = scorer.llm.loaded
    bits = sum(r.nbytes for r in loaded.routes)
    return {"model": side.model, "backend": loaded.backend.name, "loaded": loaded.summary(), "stored_bytes": bits}


def _material(material: Material) -> dict[str, Any]:
    path = material.chats if material.text is None else material.text
    return {"file": str(path), "kind": "chats" if material.text is None else "text", "window": material.window,
            "context": material.first if material.text is not None else None}  # fmt: skip


def _check_alike(a: Scorer, b: Scorer) -> None:
    if a.vocab_size != b.vocab_size or a.llm.tokenizer.tokens() != b.llm.tokenizer.tokens():
        sizes = f"{a.vocab_size} and {b.vocab_size} tokens"
        message = f"{a.llm.loaded.name} and {b.llm.loaded.name} have different vocabularies ({sizes}); only equal ones compare"
        raise UnsupportedError(message, param="against")


def _measure(tally: Tally, window: Window, scorer: Scorer, measure: Scorer | None) -> None:
    ids, first = window.ids, window.first
    truth = measure.rows(ids.tolist(), first) if measure is not None else None
    seen: list[tuple[Array, ...]] = []

    def use(row: int, logits: Array) -> None:
        tokens = ids[row + 1 : row + 1 + len(logits)]
        if truth is None:
            seen.append((surprise(logits, tokens),))
            return
        other = truth[row - first + 1 : row - first + 1 + len(logits)]
        seen.append((surprise(logits, tokens), surprise(other, tokens), *compare(other, logits)))

    scorer.score(ids.tolist(), first, use)
    columns: list[Array | None] = [np.concatenate(column) for column in zip(*seen, strict=True)]
    own, *others = [*columns, None, None, None][:4]
    assert own is not None
    tally.add(own, *others)


def _answers(
    windows: Sequence[Window], scorer: Scorer, measure: Scorer | None, count: int, tokens: int, report: Progress
) -> list[Answer]:  # fmt: skip
    """Of `count` prompts, evenly from the windows."""
    asked = [w.prompt for w in windows if w.prompt]
    asked = [asked[i * len(asked) // count] for i in range(count)] if 0 < count < len(asked) else asked[:count]
    if measure is None or not asked:
        return []
    report(len(windows), len(windows), "answers")
    tokenizer = scorer.llm.tokenizer
    chats = isinstance(asked[0][0], Mapping)
    ids = [tokenizer.encode_chat(prompt, add_generation_prompt=True) if chats else prompt for prompt in asked]
    texts = [tokenizer.decode(prompt, skip_special_tokens=not chats) for prompt in ids]
    return list(map(Answer, texts, measure.answer(ids, tokens), scorer.answer(ids, tokens)))


class Limit(NamedTuple):
    """One condition of the gate: a figure's name, the bound, and whether the figure must be at most (else at least) that."""

    figure: str
    bound: float
    at_most: bool

    def check(self, report: Mapping[str, Any]) -> dict[str, Any]:
        value = report[self.figure]["value"]
        passed = value <= self.bound if self.at_most else value >= self.bound
        bound = {"at_most" if self.at_most else "at_least": self.bound}
        return {"figure": self.figure, "value": value, **bound, "passed": bool(passed)}
