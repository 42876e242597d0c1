"""Chat: messages are checked, fitted to the template, rendered, and tokenised without a second BOS."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, CONVERSATIONS, GEMMA_LIKE, LLAMA3_LIKE, TOOL_CHATML, TOOLS
from tiny_tokenizers import byte_level_data, sentencepiece_gguf

from trivium.errors import InvalidRequestError, TemplateError
from trivium.text import Tokenizer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return Tokenizer.from_data(byte_level_data() | {"chat_template": CHATML})


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return Tokenizer.from_data(sentencepiece_gguf(chat_template=GEMMA_LIKE))


def test_a_conversation_is_written_as_the_template_says(chatml: Tokenizer, gemma: Tokenizer) -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert chatml.render_chat(USER, add_generation_prompt=False) == expected
    assert chatml.render_chat(USER) == expected + "<|im_start|>assistant\n"
    assert gemma.render_chat(USER) == "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"


def test_markers_in_the_rendered_text_become_special_tokens_also_those_a_user_wrote(chatml: Tokenizer) -> None:
    start = chatml.bos_id
    assert chatml.encode_chat(USER).count(start) == 3
    assert chatml.encode_chat([{"role": "user", "content": "<|im_start|>"}]).count(start) == 4


def test_json_is_not_escaped_for_html_and_keeps_unicode(chatml: Tokenizer) -> None:
    text = chatml.render_chat(CONVERSATIONS["call"], tools=TOOLS, template=TOOL_CHATML)
    assert "Today's <weather> & more" in text
    assert '{"city": "Köln \\"<b>\\" \'q\'", "days": [1, 2.5, null, true]}' in text


def test_arguments_reach_the_template(chatml: Tokenizer) -> None:
    text = chatml.render_chat(USER, template=TOOL_CHATML, enable_thinking=False)
    assert "<think>\n\n</think>" in text
    assert "<think>" not in chatml.render_chat(USER, template=TOOL_CHATML)


def test_the_models_named_tokens_reach_the_template(chatml: Tokenizer) -> None:
    assert chatml.render_chat(USER, template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}") == (
        "<|im_start|>|<|im_end|>|<|endoftext|>|False"
    )


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*generate.*pass"):
        Tokenizer.from_data(sentencepiece_gguf()).render_chat(USER)


def test_a_template_can_be_given_in_place_of_the_models() -> None:
    assert Tokenizer.from_data(sentencepiece_gguf()).render_chat(USER, template="{{ messages[0].content }}!") == "hi!"


def test_named_templates_are_chosen_by_name_and_for_tools() -> None:
    data = byte_level_data(
        chat_template=[
            {"name": "default", "template": "D"},
            {"name": "tool_use", "template": "{% if tools %}T{% endif %}"},
            {"name": "rag", "template": "R"},
        ]
    )
    tokenizer = Tokenizer.from_data(data | {"chat_template": None})
    assert [tokenizer.render_chat(USER), tokenizer.render_chat(USER, tools=TOOLS), tokenizer.render_chat(USER, template="rag")] == [
        "D",
        "T",
        "R",
    ]
    with_tools = sentencepiece_gguf(chat_template="D")
    with_tools["read"].args[0]["tokenizer.chat_template.tool_use"] = "{% if tools %}T{% endif %}"
    assert Tokenizer.from_data(with_tools).render_chat(USER, tools=TOOLS) == "T"


def test_a_refusal_of_the_template_reaches_the_caller_in_its_words(gemma: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        gemma.render_chat(USER + USER)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user"}, "at least one message"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": "wizard", "content": "x"}], "'wizard'; possible are assistant, developer"),
        ([*USER, {"role": "user", "content": 3}], r"messages\[1\]\.content must be text, null or a list of parts, not int"),
        ([{"role": "user", "content": {"a": 1}}], "not dict"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\.content is a object"),
        ([{"role": "user", "content": "x", "extra": [b"x"]}], r"extra\[0\] is a bytes"),
    ],
)
def test_messages_that_no_template_could_take_are_refused_with_their_place(chatml: Tokenizer, messages: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        chatml.render_chat(messages)  # type: ignore[arg-type]
    assert not isinstance(caught.value, TemplateError)
    assert caught.value.param == "messages"


def test_a_role_that_the_template_names_is_possible(chatml: Tokenizer) -> None:
    template = "{% for m in messages %}{% if m.role == 'wizard' %}W{% endif %}{% endfor %}"
    assert chatml.render_chat([{"role": "wizard", "content": ""}], template=template) == "W"


def test_null_content_is_empty_and_left_out_beside_tool_calls(chatml: Tokenizer) -> None:
    template = "{% for m in messages %}[{{ m.content is defined }}]{% endfor %}"
    assert chatml.render_chat([{"role": "assistant", "content": None}], template=template) == "[True]"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    assert chatml.render_chat(calls, template=template) == "[False]"


def test_the_callers_messages_are_not_changed(gemma: Tokenizer) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": None}]
    copy = [dict(message) for message in messages]
    gemma.render_chat(messages)
    assert messages == copy


@pytest.mark.faults
@pytest.mark.parametrize("template", [CHATML, LLAMA3_LIKE, GEMMA_LIKE, TOOL_CHATML])
def test_o28_text_parts_are_the_plain_text(chatml: Tokenizer, template: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    plain = [{"role": "user", "content": "abc"}]
    assert chatml.encode_chat(parts, template=template) == chatml.encode_chat(plain, template=template)


@pytest.mark.faults
def test_o28_several_parts_are_joined_or_handed_to_a_template_that_iterates(chatml: Tokenizer, gemma: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in chatml.render_chat(parts)
    assert "user\nab<end_of_turn>" in gemma.render_chat(parts)
    assert "user\n<|im_end|>" in chatml.render_chat([{"role": "user", "content": []}])
    aliased = "{% set body = messages[0]['content'] %}{% for p in body | list %}({{ p.text }}){% endfor %}"
    assert chatml.render_chat(parts, template=aliased) == "(a)(b)"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
        ({"text": "x"}, "has no type"),
        ("x", "has no type"),
        ({"type": 3}, "type 3"),
    ],
)
def test_o28_other_parts_are_refused_by_name(gemma: Tokenizer, part: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        gemma.render_chat([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert "content[1]" in str(caught.value)


@pytest.mark.faults
def test_o29_a_rendered_chat_and_a_prompt_with_bos_have_one_bos(gemma: Tokenizer) -> None:
    assert gemma.encode_chat(USER).count(2) == 1
    assert gemma.encode("hi").count(2) == 1
    assert gemma.encode("<bos>hi") == gemma.encode("hi")
    assert gemma.encode("<bos><bos>hi").count(2) == 2
    assert gemma.encode("<bos>hi", add_special_tokens=False).count(2) == 1


@pytest.mark.faults
def test_o30_developer_is_system_unless_the_template_knows_it(chatml: Tokenizer, gemma: Tokenizer) -> None:
    for tokenizer in (chatml, gemma):
        asked = [tokenizer.encode_chat([{"role": role, "content": "Be kind."}, *USER]) for role in ("developer", "system")]
        assert asked[0] == asked[1]
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }};{% endfor %}"
    assert chatml.render_chat([{"role": "developer", "content": "x"}, *USER], template=knows) == "D;user;"


@pytest.mark.faults
def test_o30_developer_beside_system_becomes_one_system_message(chatml: Tokenizer) -> None:
    for roles in (("developer", "system"), ("system", "developer")):
        text = chatml.render_chat([{"role": roles[0], "content": "A"}, {"role": roles[1], "content": "B"}, *USER])
        assert text.startswith("<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user")
    both = chatml.render_chat([{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, *USER])
    assert both.count("<|im_start|>system") == 2


def test_tools_for_a_template_that_does_not_show_them_are_refused(gemma: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="does not show tools to the model") as caught:
        gemma.render_chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    assert caught.value.param == "tools"


def history(arguments: object) -> list[dict[str, object]]:
    call = {"id": "abc123def", "type": "function", "function": {"name": "now", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [{"role": "user", "content": "hi"}, answer, {"role": "tool", "tool_call_id": "abc123def", "content": "noon"}]


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
AS_OBJECT = ROLES + "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
AS_ITEMS = (
    ROLES
    + "{{ c.function.name }}={% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}{% endfor %}{% endfor %}"
)
AS_TEXT = ROLES + "{{ c['function']['name'] + '=' + c['function']['arguments'] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}])
def test_earlier_calls_reach_a_template_as_it_takes_them(chatml: Tokenizer, arguments: object) -> None:
    for template, shown in ((AS_OBJECT, '{"a": "ü"}'), (AS_ITEMS, "a:ü"), (AS_TEXT, '{"a": "ü"}')):
        assert chatml.render_chat(history(arguments), template=template) == f"[user]hi[assistant]now={shown}[tool]noon"


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_earlier_calls_without_arguments(chatml: Tokenizer, arguments: object) -> None:
    for template in (AS_OBJECT, AS_TEXT):
        assert chatml.render_chat(history(arguments), template=template) == "[user]hi[assistant]now={}[tool]noon"


@pytest.mark.parametrize("arguments", ["{", "[1]", "nothing", 3, [1]])
def test_earlier_calls_whose_arguments_are_no_object_are_refused(chatml: Tokenizer, arguments: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments must be a JSON object"):
        chatml.render_chat(history(arguments))


@pytest.mark.parametrize("calls", ["now", [3], [{"id": "x"}], [{"function": {"arguments": "{}"}}]])
def test_earlier_calls_of_another_form_are_refused(chatml: Tokenizer, calls: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].tool_calls"):
        chatml.render_chat([{"role": "assistant", "tool_calls": calls}])
