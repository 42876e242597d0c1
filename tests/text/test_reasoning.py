"""Reasoning in text: every family's markers, reasoning that the prompt opened, tool calls before and behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import call_writers as w
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.errors import InvalidRequestError
from trivium.text.events import ContentDelta, Event, ReasoningDelta, joined, merge, tool_calls
from trivium.text.parser import OutputParser
from trivium.text.syntaxes import REASONING, TOOLS, choose

CALL = w.hermes([("now", {"a": 1})])
HARMONY = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
PAIRS = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "deepseek_r1": ("<think>\n", "\n</think>\n\n"),
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:\n", "\nHere is my response:\n"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
    "harmony": HARMONY,
}


def parse(name: str | None, pieces: Sequence[str], *, tools: str | None = None, inside: bool = False) -> list[Event]:
    parser = OutputParser(TOOLS[tools] if tools else None, REASONING[name] if name else None, inside=inside)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merge(events + parser.finish())


@pytest.mark.parametrize("name", PAIRS)
def test_every_family_at_every_cut(name: str) -> None:
    open_, close = PAIRS[name]
    text = f"{open_}so a < b,\nand c{close}It is d."
    for cut in range(len(text) + 1):
        assert parse(name, [text[:cut], text[cut:]]) == [ReasoningDelta("so a < b,\nand c"), ContentDelta("It is d.")]


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "harmony"])
def test_reasoning_that_the_prompt_opened_is_under_way(name: str) -> None:
    open_, close = PAIRS[name]
    assert REASONING[name].opened_by(f"user: hi\nassistant: {open_}")
    assert not REASONING[name].opened_by(f"user: hi\nassistant: {open_}{close}")
    for pieces in ([f"so{close}yes"], list(f"so{close}yes")):
        assert parse(name, pieces, inside=True) == [ReasoningDelta("so"), ContentDelta("yes")]
    assert parse(name, ["so and so"], inside=True) == [ReasoningDelta("so and so")]


def test_granite_marks_the_response_too() -> None:
    assert parse("granite", ["<think>a</think>\n<response>b</response>"]) == [ReasoningDelta("a"), ContentDelta("b")]


def test_reasoning_begins_only_at_the_start_and_blanks_may_stand_before_it() -> None:
    assert parse("think", list("\n <think>a</think>b<think>c</think>")) == [ReasoningDelta("a"), ContentDelta("b<think>c</think>")]
    assert parse("think", ["no <think>a</think>"]) == [ContentDelta("no <think>a</think>")]


def test_an_answer_without_reasoning_and_an_empty_one() -> None:
    assert parse("think", ["Hello"]) == [ContentDelta("Hello")]
    assert parse("think", ["<think>\n\n</think>\n\nHello"]) == [ContentDelta("Hello")]
    assert parse("think", [""]) == parse("think", []) == []


def test_a_marker_that_breaks_off_is_text() -> None:
    assert parse("think", list("<thin")) == [ContentDelta("<thin")]
    assert parse("think", list("<think>a</thin")) == [ReasoningDelta("a</thin")]


def test_tool_calls_inside_reasoning_are_reasoning_and_behind_it_calls() -> None:
    events = parse("think", list(f"<think>{CALL}</think>\n{CALL}"), tools="hermes")
    assert joined(events, ReasoningDelta) == CALL
    assert [(call.name, call.arguments) for call in tool_calls(events)] == [("now", '{"a": 1}')]
    assert joined(events, ContentDelta) == ""


def test_a_bare_call_may_follow_reasoning() -> None:
    parser = OutputParser(TOOLS["json"], REASONING["think"], schemas={"now": {}})
    events = parser.push('<think>a</think>\n{"name": "now", "arguments": {}}') + parser.finish()
    assert len(tool_calls(events)) == parser.calls == 1


def test_harmony_has_reasoning_a_preamble_calls_and_an_answer() -> None:
    call = '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text = f"{HARMONY[0]}one<|end|>{preamble}{call}<|start|>assistant{HARMONY[0]}two{HARMONY[1]}done"
    for pieces in ([text], list(text)):
        events = parse("harmony", pieces, tools="harmony")
        assert [event.text for event in events if isinstance(event, ReasoningDelta)] == ["one", "two"]
        assert [event.text for event in events if isinstance(event, ContentDelta)] == ["I look.", "done"]
        assert [(c.name, c.arguments, c.complete) for c in tool_calls(events)] == [("now", '{"a": 1}', True)]
    assert parse("harmony", [f"{HARMONY[0]}one{HARMONY[1]}done"]) == [ReasoningDelta("one"), ContentDelta("done")]


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from([n for n in PAIRS if n != "granite"]), st.data())
@settings(max_examples=300, deadline=None)
def test_any_thought_and_answer_come_apart_but_for_the_blanks_between(thought: str, said: str, name: str, data: Any) -> None:
    open_, close = PAIRS[name]
    text = open_ + thought + close + said
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    events = parse(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    assert joined(events, ReasoningDelta) == thought.strip()
    assert joined(events, ContentDelta) == (said.lstrip() if said.strip() else "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking %}<think>\n\n</think>", "think"),
        ("content.split('</think>')[-1] ... <｜Assistant｜><think>", "deepseek_r1"),
        ("Here is my thought process: ", "granite"),
        ("<think></think><response></response>", "granite"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|channel>thought", "gemma4"),
    ],
)
def test_the_template_chooses(template: str, name: str) -> None:
    assert choose(REASONING, "auto", template, "reasoning_parser") is REASONING[name]


def test_an_unknown_name_is_refused_with_the_known() -> None:
    with pytest.raises(InvalidRequestError, match=r"possible are auto, None, .*granite.*qwen3") as caught:
        choose(REASONING, "thinking", "", "reasoning_parser")
    assert caught.value.param == "reasoning_parser"
    assert choose(REASONING, "auto", "nothing", "reasoning_parser") is None
