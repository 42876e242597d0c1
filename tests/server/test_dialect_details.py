"""What clients notice beyond the answer: tokens of thinking, one call where one is wanted, limits in each dialect's words."""

from __future__ import annotations

import httpx
import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHAT, SECRET, events, running
from trivium_server.blocks import whole
from trivium_server.work import Tally

from trivium import CompletionOutput, RequestOutput
from trivium.text.events import CallArguments, CallEnd, CallStart, ContentDelta, ReasoningDelta

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
USER = CHAT["messages"]
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A client of a server whose model can think and call tools."""
    folder = make_chat_model(tmp_path_factory.mktemp("models") / "thinking", template=TEMPLATE)
    parsers = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    with running(folder, loading=parsers) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client


def test_tokens_of_thinking_are_told_apart(thinking):
    body = {"messages": USER, "temperature": 0, "structured_outputs": {"regex": "<think>abc</think>wxyz"}}
    whole = thinking.post(CHATS, json=body).json()
    assert (whole["choices"][0]["message"]["reasoning"], whole["choices"][0]["message"]["content"]) == ("abc", "wxyz")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>abc")}
    chunks = events(thinking.post(CHATS, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert chunks[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>abc")}
    plain = thinking.post(CHATS, json={**body, "structured_outputs": {"regex": "abc"}}).json()
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


class Bytes:
    """Every token is one byte."""

    def token_bytes(self, token):
        return b"x"


@pytest.mark.parametrize(
    ("pieces", "want"),
    [
        ([("<t>", []), ("ab", [ReasoningDelta("ab")]), ("</t>", []), ("c", [ContentDelta("c")])], 5),
        ([("<t>ab</t>cd", [ReasoningDelta("ab"), ContentDelta("cd")])], 5),
        ([("<t>a", [ReasoningDelta("a")]), ("b</", [ReasoningDelta("b")]), ("t>c", [ContentDelta("c")])], 5),
        ([("a", []), ("b</", [ReasoningDelta("ab")]), ("t>", [])], 2),
        ([("é", [ReasoningDelta("é")]), ("b</t>c", [ReasoningDelta("b"), ContentDelta("c")])], 3),
        ([("a", [ReasoningDelta("a")]), ("bb", [ContentDelta("bb")]), ("c", [ReasoningDelta("c")])], 2),
        ([("ab", [ContentDelta("ab")])], 0), ([("ab", None)], 0),
    ],
)  # fmt: skip
def test_thinking_is_counted_in_pieces_as_in_one(pieces, want):
    tally = Tally(Bytes())
    for text, found in pieces:
        one = CompletionOutput(0, text, [0] * len(text.encode()), None, events=found)
        tally.add(0, RequestOutput(1, [1], [one], finished=False))
    assert tally.reasoning == want <= tally.made


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_one_call_where_one_is_wanted(thinking, parallel, count):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    regex = (CALL * 2).replace("{", "\\{").replace("}", "\\}")
    body = {
        "messages": USER,
        "temperature": 0,
        "tools": [tool],
        "parallel_tool_calls": parallel,
        "structured_outputs": {"regex": regex},
    }
    [choice] = thinking.post(CHATS, json=body).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == count and choice["finish_reason"] == "tool_calls"
    chunks = events(thinking.post(CHATS, json={**body, "stream": True}).text)[:-1]
    deltas = [d for chunk in chunks for c in chunk["choices"] for d in c["delta"].get("tool_calls", ())]
    assert {d["index"] for d in deltas} == set(range(count))


def test_one_call_in_blocks():
    found = [
        CallStart(0, "a", "look"),
        CallArguments(0, "{}"),
        CallEnd(0),
        CallStart(1, "b", "look"),
        CallArguments(1, "{}"),
        CallEnd(1),
    ]
    output = CompletionOutput(0, "", [], "tool_calls", events=found)
    assert [block.id for block in whole(output)] == ["a", "b"] and [block.id for block in whole(output, single=True)] == ["a"]


def test_anthropic_answers_end_with_the_context(http):
    body = {"model": "tiny", "max_tokens": 32_000, "temperature": 1, "messages": [{"role": "user", "content": "a" * 480}]}
    reply = http.post("/v1/messages", json=body).json()
    found = events(http.post("/v1/messages", json={**body, "stream": True}).text)
    end = found[-2]["delta"]["stop_reason"]
    for reason, usage in ((reply["stop_reason"], reply["usage"]), (end, {**reply["usage"], **found[-2]["usage"]})):
        total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        assert reason == ("model_context_window_exceeded" if total == 512 else "end_turn")
    assert "model_context_window_exceeded" in (reply["stop_reason"], end)
    for stream in (False, True):
        refused = http.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": "a" * 600}], "stream": stream})
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


def test_anthropics_client_finds_its_request_id(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key=SECRET, max_retries=0)
    body = {"model": "tiny", "max_tokens": 2, "messages": USER, "extra_headers": {"x-request-id": "mine"}}
    assert client.messages.create(**body)._request_id == "mine"
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**{**body, "model": "nope"})
    assert refused.value.request_id == "mine"
