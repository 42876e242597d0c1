"""Tool calls in text: every family's format, cut in any way, broken in any way, and what only looks like a call."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import call_writers as w
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.errors import InvalidRequestError
from trivium.text.events import CallArguments, CallEnd, CallStart, ContentDelta, Event, joined, merge, tool_calls
from trivium.text.parser import MAX_HEAD, OutputParser
from trivium.text.reader import ToolUse
from trivium.text.syntaxes import REASONING, TOOLS, choose

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "array"},
            "more": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
CALLS = [
    (
        "get_weather",
        {"city": 'Zürich "}{]</tool_call', "days": -3, "where": [1.5, None, {"x": ["]", "}"]}], "more": {"a": {"b": True}}},
    ),
    ("now", {}),
    ("get_weather", {"city": "北京\\\n😀", "days": 2}),
]
EVERY = w.MARKED + w.BARE + w.CONVERTED
IDS = [f"{name}-{writer.__name__}" for name, writer in EVERY]


def parse(family: str | None, pieces: Sequence[str], **options: Any) -> list[Event]:
    parser = OutputParser(TOOLS[family] if family else None, schemas=SCHEMAS, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merge(events + parser.finish())


def plain(events: Sequence[Event]) -> list[Event]:
    """Without the ids of calls, which are drawn by chance."""
    return [dataclasses.replace(event, id="") if isinstance(event, CallStart) else event for event in events]


def values(events: Sequence[Event]) -> list[tuple[str, dict[str, Any]]]:
    assert all(call.complete for call in tool_calls(events))
    return [(call.name, json.loads(call.arguments)) for call in tool_calls(events)]


@pytest.mark.parametrize(("family", "writer"), EVERY, ids=IDS)
def test_every_family_gives_names_and_arguments(family: str, writer: w.Writer) -> None:
    for count in (1, 2, 3):
        events = parse(family, [writer(CALLS[:count])])
        assert values(events) == CALLS[:count]
        assert joined(events, ContentDelta) == ""
        assert [call.index for call in tool_calls(events)] == list(range(count))


@pytest.mark.parametrize(("family", "writer"), EVERY, ids=IDS)
def test_every_cut_into_two_and_into_characters_gives_the_same(family: str, writer: w.Writer) -> None:
    before = "" if (family, writer) in w.BARE or writer is w.pythonic else "First this. "
    text = f"{before}{writer(CALLS)} And that."
    want = plain(parse(family, [text]))
    assert values(want) == CALLS
    assert joined(want, ContentDelta) == ("First this." if before else "") + "And that."
    assert plain(parse(family, list(text))) == want
    for cut in range(len(text)):
        assert plain(parse(family, [text[:cut], text[cut:]])) == want


names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=8), json_values, max_size=4)), min_size=1, max_size=3)
pieces_of_markers = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", '{"name": "now"', "[ARGS]", "call:",
     '"arguments": {', "{}", "}", "]", "[", '"', "\\", "now(", "now", "<function=", "<escape>", "```tool_code\n", "\n", " ", "x"]
)  # fmt: skip
rubbish = st.lists(pieces_of_markers | st.text(max_size=3), max_size=25).map("".join)


def cut_up(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@given(st.sampled_from(w.MARKED), calls, st.data())
@settings(max_examples=300, deadline=None)
def test_any_json_arguments_come_back_from_any_pieces(how: tuple[str, w.Writer], calls: w.Calls, data: st.DataObject) -> None:
    family, writer = how
    text = writer(calls)
    events = parse(family, cut_up(text, data))
    assert values(events) == calls
    assert plain(events) == plain(parse(family, [text]))
    assert [call.arguments for call in tool_calls(events)] == [w.text_of(arguments) for _, arguments in calls]


@given(st.sampled_from(sorted(TOOLS)), st.sampled_from([None, *sorted(REASONING)]), st.booleans(), rubbish, st.data())
@settings(max_examples=800, deadline=None)
def test_any_text_in_any_pieces_gives_the_same_events(
    family: str, how: str | None, inside: bool, text: str, data: st.DataObject
) -> None:
    reasoning = REASONING[how] if how else None
    options = {"reasoning": reasoning, "inside": inside and reasoning is not None}
    whole = parse(family, [text], **options)
    assert plain(parse(family, cut_up(text, data), **options)) == plain(whole)
    for call in tool_calls(whole):
        assert call.name
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@given(st.sampled_from(sorted(TOOLS)), st.text("abc {}[]\"'<>|:,\n", max_size=40) | rubbish)
@settings(max_examples=300, deadline=None)
def test_text_without_calls_comes_out_whole(family: str, text: str) -> None:
    events = parse(family, list(text))
    if not tool_calls(events):
        assert joined(events, ContentDelta) == text


@pytest.mark.parametrize(("family", "writer"), w.MARKED, ids=[f"{n}-{f.__name__}" for n, f in w.MARKED])
def test_arguments_are_handed_on_as_they_come(family: str, writer: w.Writer) -> None:
    text = writer([("write", {"text": "x" * 50})])
    parser = OutputParser(TOOLS[family], schemas=SCHEMAS)
    until = text.index("xxx") + 10
    events = parser.push(text[:until])
    assert [type(event) for event in events][-2:] == [CallStart, CallArguments]
    assert tool_calls(events)[0].arguments.endswith("x" * 10)
    assert not tool_calls(events)[0].complete and parser.calls == 0


@pytest.mark.parametrize(("family", "writer"), EVERY, ids=IDS)
def test_a_text_that_breaks_off_anywhere_claims_no_call_that_is_not_whole_and_loses_no_text(family: str, writer: w.Writer) -> None:
    text = writer(CALLS[:1])
    name, arguments = CALLS[0]
    for end in range(len(text)):
        events = parse(family, [text[:end]])
        got = tool_calls(events)
        content = joined(events, ContentDelta)
        if not got:
            assert content == text[:end].removeprefix("<｜tool▁calls▁begin｜>")
        elif got[0].complete:
            assert [(got[0].name, json.loads(got[0].arguments))] == [(name, arguments)]
        else:
            assert got[0].name == name and w.text_of(arguments).startswith(got[0].arguments)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "a\\u0000"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"city": "x"}</tool_call>',
        "<tool_call>{'name': 'now'}</tool_call>",
        "<tool_call>",
        "<tool_call",
        "<tool_call>{",
        '<tool_call>{"name": "now"',
        "a < b and b > c",
        "</tool_call>",
    ],
)
def test_what_is_no_call_comes_out_as_content(text: str) -> None:
    assert parse("hermes", list(text)) == [ContentDelta(text)]


def test_arguments_that_turn_out_broken_are_an_incomplete_call_and_the_rest_is_content() -> None:
    events = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"a": 1}, oh', "</tool_call>"])
    assert plain(events) == [CallStart(0, "", "now"), CallArguments(0, '{"a": 1}'), ContentDelta(", oh</tool_call>")]
    events = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call> bye'])
    assert plain(events)[:2] == [CallStart(0, "", "now"), CallArguments(0, '{"a" 1}')]
    assert not tool_calls(events)[0].complete
    events = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"a": x}} <tool_call>{"name": "now", "arguments": {}}'])
    assert [call.complete for call in tool_calls(events)] == [False, True]


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"days": 1}, "name": "now"}',
        '{"id": "x", "type": "function", "function": {"name": "now", "arguments": {"days": 1}}}',
        '{"name": "now", "arguments": "{\\"days\\": 1}"}',
        '{ "name" : "n\\u006fw" , "arguments" : { "days" : 1 } }',
        '{"name": "now", "parameters": {"days": 1}, "id": "abc"}',
    ],
)
def test_spellings_of_a_json_call(call: str) -> None:
    for pieces in ([f"<tool_call>{call}</tool_call>"], list(f"<tool_call>{call}</tool_call>")):
        assert values(parse("hermes", pieces)) == [("now", {"days": 1})]


@pytest.mark.parametrize("call", ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": ""}'])
def test_left_out_arguments_are_an_empty_object(call: str) -> None:
    assert values(parse("hermes", [f"<tool_call>{call}</tool_call>"])) == ([] if '""' in call else [("now", {})])


def test_bare_json_is_a_call_only_of_an_offered_tool_and_at_the_start() -> None:
    for text in (
        '{"name": "Alice", "arguments": {}}',
        '{"answer": 42}',
        "{}",
        'So: {"name": "now", "arguments": {}}',
        "[1, 2]",
        "{ x }",
    ):
        for family in ("llama3", "json", "gemma"):
            assert parse(family, list(text)) == [ContentDelta(text)]
    assert values(parse("json", ['\n {"name": "now", "arguments": {}}'])) == [("now", {})]


def test_json_that_can_be_no_call_is_let_go_at_once() -> None:
    parser = OutputParser(TOOLS["json"], schemas=SCHEMAS)
    assert parser.push('{"ans') == []
    assert parser.push('wer":') == [ContentDelta('{"answer":')]
    assert parser.push(" 42") == [ContentDelta(" 42")]


def test_text_that_looks_like_a_marker_is_held_only_as_long_as_it_can_become_one() -> None:
    parser = OutputParser(TOOLS["hermes"])
    assert parser.push("a <tool_") == [ContentDelta("a")]
    assert parser.push("box>") == [ContentDelta(" <tool_box>")]
    assert parser.push("<<tool") == [ContentDelta("<")]
    assert parser.finish() == [ContentDelta("<tool")]
    parser = OutputParser(TOOLS["mistral"])
    assert parser.push("[TOOL_CALLS]" + "x" * (MAX_HEAD - 1)) == []
    assert parser.push("x") == [ContentDelta("[TOOL_CALLS]" + "x" * MAX_HEAD)]


def test_blanks_around_markers_belong_to_them_and_other_blanks_stay() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert plain(parse("hermes", [f" a  b \n\n{call}\n\n{call}\n c \n"])) == [
        ContentDelta(" a  b"), *plain(parse("hermes", [call])), CallStart(1, "", "now"), CallArguments(1, "{}"), CallEnd(1),
        ContentDelta("c \n"),
    ]  # fmt: skip
    assert parse("hermes", ["  \n"]) == [ContentDelta("  \n")]
    assert joined(parse("hermes", [f"{call}\n "]), ContentDelta) == ""


def test_ids_are_unique_and_as_mistral_templates_want_them() -> None:
    ids = [call.id for _ in range(50) for call in tool_calls(parse("hermes", [w.hermes([("now", {})] * 20)]))]
    assert len(set(ids)) == 1000
    assert all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize(
    "body", ["[now(3)]", "[now(days=f())]", "[now(days=x)]", "[now(**{'a': 1})]", "[1, 2]", "[now]", "[now(days=1)", "[other(a=1)]",
             "[now(days={1, 2})]", "[now(days=1e999)]", "[now(days=" + "(" * 300 + "]", "[now(days=b'x')]"]
)  # fmt: skip
def test_python_that_is_no_list_of_calls_with_literals_is_content(body: str) -> None:
    events = parse("pythonic", list(body))
    assert not any(call.complete for call in tool_calls(events))
    assert joined(events, ContentDelta) == body


def test_json_words_count_as_python_literals() -> None:
    assert values(parse("pythonic", ["[now(a=true, b=[false, null])]"])) == [("now", {"a": True, "b": [False, None]})]


def test_values_without_json_follow_the_schema_and_are_text_where_they_do_not_fit() -> None:
    text = w.qwen3_coder([("get_weather", {"city": "12", "days": "12", "where": "None", "more": "{", "unknown": "7"})])
    assert values(parse("qwen3_coder", [text])) == [
        ("get_weather", {"city": "12", "days": 12, "where": None, "more": "{", "unknown": "7"})
    ]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm"])
def test_an_open_value_is_no_call(family: str) -> None:
    text = (
        w.qwen3_coder(CALLS[:1]).replace("</parameter>", "") if family == "qwen3_coder" else "<tool_call>now<arg_key>a</tool_call>"
    )
    assert parse(family, [text]) == [ContentDelta(text)]


TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "qwen3_coder": "<tool_call>\n<function=example>",
    "glm": "<tool_call>{{ name }}<arg_key>",
    "hermes": "return <tool_call>\n{{ call | tojson }}\n</tool_call>",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}",
    "functiongemma": "Gemma3ForCausalLM\n<start_function_call>call:",
    "gemma4": "<|tool_call>call:",
    "granite": "{{ '<|tool_call|>' }}",
    "pythonic": "<|python_start|>",
    "llama3": "LlamaForCausalLM\n<|python_tag|>",
    "gemma": "Gemma3ForCausalLM\n<start_of_turn>model",
}


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "json"])
def test_the_template_or_the_architecture_chooses(name: str) -> None:
    assert choose(TOOLS, "auto", TEMPLATES[name], "tool_parser") is TOOLS[name]


def test_names_choose_and_an_unknown_one_is_refused_with_the_known() -> None:
    assert choose(TOOLS, "mistral", "<tool_call>", "tool_parser") is TOOLS["mistral"]
    assert choose(TOOLS, None, "<tool_call>", "tool_parser") is None
    assert choose(TOOLS, "auto", "nothing of the kind", "tool_parser") is None
    with pytest.raises(
        InvalidRequestError, match=r"tool_parser 'hermess' is not known; possible are auto, None, .*hermes.*"
    ) as caught:
        choose(TOOLS, "hermess", "", "tool_parser")
    assert caught.value.param == "tool_parser"


def tool(name: Any = "now", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("now", "must be a list"),
        ({"type": "function"}, "must be a list"),
        (["now"], r"tools\[0\] must be"),
        ([{"type": "retrieval"}], r"tools\[0\] must be"),
        ([tool(), {"type": "function"}], r"tools\[1\] must be"),
        ([tool("")], "name must be"),
        ([tool(3)], "name must be"),
        ([tool("a b")], "name must be"),
        ([tool("a" * 129)], "name must be"),
        ([tool(parameters=[1])], "must be a JSON schema of an object"),
        ([tool(parameters={"type": "array"})], "must be a JSON schema of an object"),
        ([tool(parameters={"properties": [1]})], "properties must be"),
        ([tool(parameters={"properties": {"a": 3}})], "properties must be"),
        ([tool(), tool()], r"tools\[1\].function.name 'now' is taken"),
    ],
)
def test_bad_tools_are_refused_with_the_place(tools: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ToolUse.of(tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", ["always", 3, {"type": "function"}, tool("other"), {"type": "tool", "name": "now"}, tool([1])])
def test_a_bad_tool_choice_is_refused_with_the_tools(choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tool_choice must be .* \(now\)") as caught:
        ToolUse.of([tool()], choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", tool()])
def test_a_forced_call_needs_tools(choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match="there are none"):
        ToolUse.of(None, choice)


def test_a_forced_call_has_a_schema_of_one_call() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [tool("weather", parameters=schema), tool("now")]
    good, other = {"name": "weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}
    required, named = ToolUse.of(tools, "required").forced, ToolUse.of(tools, tool("weather")).forced
    for value, fits, fits_named in [
        (good, True, True), (other, True, False), ({**good, "arguments": {}}, False, False), ([good], False, False),
        ({"name": "x", "arguments": {}}, False, False), ({"name": "now"}, False, False),
    ]:  # fmt: skip
        for form, want in ((required, fits), (named, fits_named)):
            assert jsonschema.Draft202012Validator(form).is_valid(value) is want
    nested = {
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"n": {"$ref": "#"}}}},
    }
    form = ToolUse.of([tool(), tool("tree", parameters=nested)], "required").forced
    for value, fits in (({"next": {"n": {"next": {}}}}, True), ({"next": {"n": {"next": 3}}}, False)):
        assert jsonschema.Draft202012Validator(form).is_valid({"name": "tree", "arguments": value}) is fits
    assert ToolUse.of(tools, "auto").forced is None is ToolUse.of(tools).forced
    assert ToolUse.of(tools, "none") == ToolUse(None, {}, None)


def lines_run(family: str, text: str) -> int:
    """Lines of Python that parsing `text` in pieces of one character runs."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    parser, before = OutputParser(TOOLS[family], schemas=SCHEMAS), sys.gettrace()
    sys.settrace(trace)
    try:
        for char in text:
            parser.push(char)
        parser.finish()
    finally:
        sys.settrace(before)
    return count


OPEN = '<tool_call>{"name": "f", "arguments": {"a": "'
PIECES = ["x", " ", "<", "[", "{", '"', OPEN, "<tool_call>", "<tool_call>{", "</think>", w.hermes([("now", {})]), "[TOOL_CALLS]"]


@pytest.mark.parametrize("piece", [*PIECES, "<function=f><parameter=a>"])
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "mistral", "gemma"])
def test_work_grows_with_the_text_and_not_faster(family: str, piece: str) -> None:
    for start in ("", OPEN, "<tool_call>", "<tool_call><function=f>"):
        short, long = (lines_run(family, start + piece * (n // len(piece))) for n in (300, 2400))
        assert long < 9 * short + 2000
