"""Reported faults of text: what LLM and AsyncLLM say, streamed and whole, on both backends, when the model's tokens are known."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import pytest
from call_writers import hermes, mistral_names
from scripted import make_scripted_model, say

from trivium import LLM, AsyncLLM, SamplingParams
from trivium.errors import InvalidRequestError
from trivium.text.events import CallStart, merge

pytestmark = pytest.mark.faults

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call>"
    "{% endif %}{% if add_generation_prompt %}[assistant]{% if open %}<think>\n{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]
PARAMS = SamplingParams(temperature=0, max_tokens=200)
TOOLS = [
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}
]
CALL = hermes([("now", {"zone": "a }b"})])
WAYS = ("whole", "stream", "async", "async stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_scripted_model(tmp_path_factory.mktemp("models") / "scripted", template=TEMPLATE)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def llm(folder, backend):
    with LLM(folder, backend=backend, dtype="float32", progress=False) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    llm.engine.check()
    assert not llm.engine.has_unfinished()


@contextlib.contextmanager
def as_async(llm):
    """An AsyncLLM around the same loaded model."""
    from trivium.engine.async_engine import AsyncEngine

    model = object.__new__(AsyncLLM)
    model.loaded, model.tokenizer, model.engine, model._parsers = llm.loaded, llm.tokenizer, llm.engine, llm._parsers
    model.async_engine = AsyncEngine(llm.engine)
    try:
        yield model
    finally:
        model.async_engine.close()


def join(pieces):
    """One output from the news of a stream; the reason comes last and once."""
    outs = [p.outputs[0] for p in pieces]
    assert [o.finish_reason for o in outs[:-1]] == [None] * (len(outs) - 1)
    return dataclasses.replace(
        outs[-1],
        text="".join(o.text for o in outs),
        token_ids=[t for o in outs for t in o.token_ids],
        events=None if outs[0].events is None else merge(e for o in outs for e in o.events),
    )


def ask(llm, way, prompt, params=PARAMS, **options):
    """The one output, made in one of four ways."""
    chat = not isinstance(prompt[0], int)
    if way == "whole":
        return (llm.chat if chat else llm.generate)(prompt, params, **options)[0].outputs[0]
    if way == "stream":
        return join(list(llm.stream(prompt, params, **options)))

    async def run(model):
        if way == "async":
            return (await (model.chat if chat else model.generate)(prompt, params, **options))[0].outputs[0]
        return join([news async for news in model.stream(prompt, params, **options)])

    with as_async(llm) as model:
        return asyncio.run(run(model))


def answers(llm, answer, params=PARAMS, *, tools=None, choice=None, **template):
    """The answer of a model that says `answer`, the same in four ways but for the ids of calls."""
    offered = None if choice == "none" else tools
    say(llm, answer, len(llm.encode_chat(CHAT, tools=offered, **template)))
    outs = [ask(llm, way, CHAT, params, tools=tools, tool_choice=choice, **template) for way in WAYS]
    for out in outs:
        out.events = [dataclasses.replace(e, id="") if isinstance(e, CallStart) else e for e in out.events]
        assert out == outs[0]
    return outs[0]


def calls_of(out):
    return [(call.name, json.loads(call.arguments)) for call in out.tool_calls if call.complete]


def test_o15_reasoning_and_content_are_right_with_a_stop_that_never_comes(llm):
    out = answers(llm, "<think>a b</think>Hello", dataclasses.replace(PARAMS, stop=["ZZZZZZ"]))
    assert (out.reasoning, out.content, out.finish_reason) == ("a b", "Hello", "stop")
    assert out.text == "<think>a b</think>Hello"


def test_o15_what_matcher_and_parser_hold_comes_out_at_the_end(llm):
    params = dataclasses.replace(PARAMS, stop=["ZZZZZZ"])
    for answer, reasoning, content in [
        ("<think>a</think>bZZZ", "a", "bZZZ"),
        ("<think>a</thZZZZZ", "a</thZZZZZ", ""),
        ("<thiZZ", None, "<thiZZ"),
        ("bZZ<tool_c", None, "bZZ<tool_c"),
    ]:
        out = answers(llm, answer, params, tools=TOOLS)
        assert (out.reasoning, out.content, out.text) == (reasoning, content, answer)


def test_o15_a_half_character_held_by_the_decoder_comes_out_before_the_parser_ends(llm):
    answer = [*llm.tokenizer.encode("<think>a</think>b", add_special_tokens=False), *"\U0001f642".encode()[:3]]
    out = answers(llm, answer)
    assert (out.reasoning, out.content) == ("a", "b\ufffd")


def test_o15_a_stop_cuts_reasoning_content_and_calls_in_one_place(llm):
    for answer, reasoning, content in [
        ("<think>a ST b</think>c", "a ", ""),
        ("<think>a</think>b ST c", "a", "b "),
        ("<think>a</thST", "a</th", ""),
        ("b <tST", None, "b <t"),
    ]:
        out = answers(llm, answer, dataclasses.replace(PARAMS, stop=["ST"]), tools=TOOLS)
        assert (out.reasoning, out.content, out.stop_reason, out.finish_reason) == (reasoning, content, "ST", "stop")
    out = answers(llm, CALL, dataclasses.replace(PARAMS, stop=["zone"]), tools=TOOLS)
    assert [(call.arguments, call.complete) for call in out.tool_calls] == [('{"', False)]
    assert (out.finish_reason, out.stop_reason) == ("stop", "zone")


def test_o15_a_plain_answer_with_tools_and_a_stop_word_in_it(llm):
    out = answers(llm, "Plain text, then STOP and more", dataclasses.replace(PARAMS, stop=["STOP"]), tools=TOOLS, choice="auto")
    assert (out.content, out.tool_calls, out.finish_reason) == ("Plain text, then ", (), "stop")


def test_o55_auto_says_tool_calls_if_and_only_if_there_is_one(llm):
    for answer, calls, reason in [
        (f"I look. {CALL}", 1, "tool_calls"),
        (CALL + CALL, 2, "tool_calls"),
        ("No need.", 0, "stop"),
        ("<tool_call>no</tool_call>", 0, "stop"),
    ]:
        for choice in ("auto", None):
            out = answers(llm, answer, tools=TOOLS, choice=choice)
            assert calls_of(out) == [("now", {"zone": "a }b"})] * calls
            assert [call.index for call in out.tool_calls] == list(range(calls))
            assert out.finish_reason == reason
            assert out.text == answer


def test_o55_ids_differ_within_and_between_answers(llm):
    say(llm, CALL + CALL, len(llm.encode_chat(CHAT, tools=TOOLS)))
    params = dataclasses.replace(PARAMS, n=3)
    outs = [o for request in llm.chat([CHAT, CHAT], params, tools=TOOLS) for o in request.outputs]
    ids = [call.id for out in outs for call in out.tool_calls]
    assert len(ids) == len(set(ids)) == 12


def test_o55_none_gives_no_call(llm):
    out = answers(llm, CALL, tools=TOOLS, choice="none")
    assert (out.content, out.tool_calls, out.finish_reason) == (CALL, (), "stop")
    out = answers(llm, CALL)
    assert (out.content, out.tool_calls, out.finish_reason) == (CALL, (), "stop")


def test_o55_a_call_that_is_cut_off_is_length_and_not_complete(llm):
    size = len(llm.tokenizer.encode(CALL, add_special_tokens=False))
    for count in [*range(1, size - 14, 6), *range(size - 14, size + 1, 2), size]:
        out = answers(llm, CALL, dataclasses.replace(PARAMS, max_tokens=count), tools=TOOLS)
        done = any(call.complete for call in out.tool_calls)
        assert out.finish_reason == ("tool_calls" if done else "length")
        assert done == (out.text.count("{") == 2 == out.text.count("}") - 1)
        assert out.tool_calls or out.content.strip() == out.text.strip()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_o55_a_forced_call_is_made_by_any_model_and_is_valid(folder, backend, choice):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet", "\u5317"]}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    with LLM(folder, backend=backend, dtype="float32", progress=False) as model:  # it speaks for itself, and nonsense
        for params in (PARAMS, dataclasses.replace(PARAMS, temperature=2, seed=3), dataclasses.replace(PARAMS, stop=["ZZZZZZ"])):
            outs = [ask(model, way, CHAT, params, tools=tools, tool_choice=choice, open=True) for way in WAYS]
            for out in outs:
                [(name, arguments)] = calls_of(out)
                assert name == "now" and arguments["zone"] in schema["properties"]["zone"]["enum"] and len(arguments) == 1
                assert (out.finish_reason, out.content, out.reasoning) == ("tool_calls", "", None)
                assert out.text == outs[0].text
        for way in WAYS:
            out = ask(model, way, CHAT, dataclasses.replace(PARAMS, max_tokens=3), tools=tools, tool_choice=choice)
            assert out.finish_reason == "length" and not any(call.complete for call in out.tool_calls)
            with pytest.raises(InvalidRequestError, match="no tool call can be forced"):
                ask(
                    model,
                    way,
                    CHAT,
                    dataclasses.replace(PARAMS, structured_outputs={"regex": "a"}),
                    tools=tools,
                    tool_choice=choice,
                )


def test_reasoning_that_the_template_opened_is_reasoning_from_the_first_token(llm):
    out = answers(llm, "a b\n</think>\n\nHello", open=True)
    assert (out.reasoning, out.content) == ("a b", "Hello")
    out = answers(llm, "a b", open=False)
    assert (out.reasoning, out.content) == (None, "a b")


def test_a_call_inside_reasoning_is_reasoning(llm):
    out = answers(llm, f"{CALL}</think>{CALL}", tools=TOOLS, open=True)
    assert (out.reasoning, len(out.tool_calls), out.finish_reason) == (CALL, 1, "tool_calls")


def test_special_tokens_that_a_parser_needs_are_shown_to_it_and_no_others(folder, backend):
    with LLM(folder, backend=backend, tool_parser="mistral", progress=False) as model:
        answer = model.tokenizer.encode("a<|python_tag|>" + mistral_names([("now", {"zone": "x"})]), add_special_tokens=False)
        assert {259, 261} < set(answer)
        out = answers(model, answer, tools=TOOLS)
        assert (calls_of(out), out.content) == ([("now", {"zone": "x"})], "a")
        assert out.text == 'a[TOOL_CALLS]now[ARGS]{"zone": "x"}'
        out = answers(model, answer)
        assert out.text == out.content == 'anow[ARGS]{"zone": "x"}'


def test_parsers_may_be_named_or_switched_off_and_unknown_names_are_refused(folder, backend):
    with LLM(folder, backend=backend, tool_parser=None, reasoning_parser=None, progress=False) as model:
        answer = f"<think>a</think>{CALL}"
        out = answers(model, answer, tools=TOOLS)
        assert (out.content, out.reasoning, out.tool_calls, out.finish_reason) == (answer, None, (), "stop")
    for field in ("tool_parser", "reasoning_parser"):
        with pytest.raises(InvalidRequestError, match=f"{field} 'hermess' is not known; possible are auto, None, ") as caught:
            LLM(folder, backend=backend, progress=False, **{field: "hermess"})
        assert caught.value.param == field


def test_bad_tools_are_refused_and_nothing_runs(llm):
    for way in WAYS:
        with pytest.raises(InvalidRequestError, match=r"tools\[0\] must be"):
            ask(llm, way, CHAT, tools=[{"name": "now"}])
    with pytest.raises(InvalidRequestError, match="belong to a chat"):
        next(llm.stream("plain", PARAMS, tools=TOOLS))


def test_a_plain_prompt_is_not_read(llm):
    prompt = llm.encode("abc")
    say(llm, f"<think>a</think>{CALL}", len(prompt))
    for way in WAYS:
        out = ask(llm, way, prompt)
        assert (out.content, out.reasoning, out.tool_calls, out.events) == (out.text, None, (), None)
        assert out.finish_reason == "stop"


def test_o13_o14_stops_end_the_text_in_every_way(llm):
    text = "The answer is 42, as ever."
    prompt = llm.encode("abc")
    say(llm, text, len(prompt))
    for start, length in [(0, 1), (4, 7), (13, 2), (25, 1), (0, 26)]:
        stop = text[start : start + length]
        for way in WAYS:
            out = ask(llm, way, prompt, dataclasses.replace(PARAMS, stop=[stop, "never"]))
            assert (out.text, out.finish_reason, out.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_o25_special_tokens_are_hidden_or_shown_raw(llm):
    prompt = llm.encode("abc")
    bos, end = llm.tokenizer.bos_id, llm.tokenizer.encode("<pad>", add_special_tokens=False)[0]
    say(llm, [bos, *b"Hi", end, *b"x", *llm.tokenizer.encode("<think>", add_special_tokens=False)], len(prompt))
    for skip, want, cut in ((True, "Hix<think>", "Hi"), (False, "<s>Hi<pad>x<think>", "<s>Hi")):
        for way in WAYS:
            params = dataclasses.replace(PARAMS, skip_special_tokens=skip)
            assert ask(llm, way, prompt, params).text == want
            out = ask(llm, way, prompt, dataclasses.replace(params, stop_token_ids=[end]))
            assert (out.text, out.stop_reason) == (cut, end)


@pytest.mark.parametrize(
    "text", [" a", "  two", "x\n\n y", "a    b", "a" + " " * 40 + "b", "\tif x:\n\t\ty  ", "中文 日本 \U0001f642"]
)
def test_o26_blanks_come_through_in_every_way(llm, text):
    prompt = llm.encode("abc")
    say(llm, text, len(prompt))
    assert [ask(llm, way, prompt).text for way in WAYS] == [text] * 4


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_o27_a_cut_character_is_one_replacement_in_every_way(llm, kept):
    prompt = llm.encode("abc")
    say(llm, [*b"ab", *"\U0001f642".encode()], len(prompt))
    for way in WAYS:
        out = ask(llm, way, prompt, dataclasses.replace(PARAMS, max_tokens=2 + kept))
        assert (out.text, out.finish_reason) == ("ab\ufffd", "length")


def test_o28_o29_o30_parts_one_bos_and_the_developer(llm):
    plain = llm.encode_chat([{"role": "system", "content": "S"}, *CHAT])
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert llm.encode_chat(parts) == plain and plain.count(llm.tokenizer.bos_id) == 1
    say(llm, "yes", len(plain))
    for way in WAYS:
        assert ask(llm, way, parts).text == "yes"
        with pytest.raises(InvalidRequestError, match="image_url"):
            ask(llm, way, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_o15_several_tokens_a_step_change_nothing(folder, llm, backend):
    answer = f"<think>a b a b a b a b a b</think>Hello Hello Hello Hello {CALL}{CALL}{CALL}"
    params = dataclasses.replace(PARAMS, stop=["ZZZZZZ"], max_tokens=300)
    want = answers(llm, answer, params, tools=TOOLS)
    assert (want.reasoning, want.content, len(want.tool_calls)) == ("a b a b a b a b a b", "Hello Hello Hello Hello", 3)
    speculative = {"method": "ngram", "num_speculative_tokens": 6}
    with LLM(folder, backend=backend, dtype="float32", speculative=speculative, progress=False) as model:
        assert answers(model, answer, params, tools=TOOLS) == want
        pieces = list(model.stream(CHAT, params, tools=TOOLS))
        assert max(len(piece.outputs[0].token_ids) for piece in pieces) > 1
