"""Anthropic's messages, OpenAI's responses and Ollama's API: the same answers as a chat, in other words, streamed and not."""

from __future__ import annotations

import json

import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHAT, SECRET, events, running

pytestmark = pytest.mark.http
USER = CHAT["messages"]
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A client of a server whose model sees tools."""
    import httpx

    folder = make_chat_model(tmp_path_factory.mktemp("models") / "tools", template=TEMPLATE)
    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client


def post(http, path, **body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.fixture(scope="module")
def text(http):
    """What the model answers to USER with eight tokens, greedily."""
    body = {"messages": USER, "temperature": 0, "max_completion_tokens": 8}
    return post(http, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]


def test_anthropic_says_the_same_streamed_and_not(http, text):
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": USER}
    whole = post(http, "/v1/messages", **body).json()
    assert whole["content"] == [{"type": "text", "text": text}] and whole["stop_reason"] == "max_tokens"
    found = events(post(http, "/v1/messages", **body, stream=True).text)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta") == text
    assert found[-2]["delta"]["stop_reason"] == "max_tokens" and found[-2]["usage"]["output_tokens"] == 8
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    count = post(http, "/v1/messages/count_tokens", model="tiny", messages=USER).json()["input_tokens"]
    usage = whole["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_anthropic_tools_there_and_back(tools):
    tool = {"name": "look", "input_schema": SCHEMA}
    body = {"model": "tiny", "max_tokens": 100, "temperature": 0, "messages": USER, "tools": [tool]}
    forced = {**body, "tool_choice": {"type": "tool", "name": "look"}}
    whole = post(tools, "/v1/messages", **forced).json()
    [block] = whole["content"]
    assert whole["stop_reason"] == "tool_use" and block["type"] == "tool_use" and block["input"]["n"] in (1, 2)
    found = events(post(tools, "/v1/messages", **forced, stream=True).text)
    pieces = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "seen"}]}
    messages = [*USER, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
    assert post(tools, "/v1/messages", **{**body, "messages": messages}).json()["type"] == "message"


def test_anthropic_errors_have_its_form(http, server):
    import httpx

    refused = http.post("/v1/messages", json={"model": "tiny", "messages": USER})
    assert refused.status_code == 400 and refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "invalid_request_error" and "max_tokens" in refused.json()["error"]["message"]
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    assert http.post("/v1/messages", json={"model": "tiny", "max_tokens": 1, "messages": image}).status_code == 400
    assert httpx.post(server.url + "/v1/messages", json={}).json()["error"]["type"] == "authentication_error"


def test_anthropics_client(server, text):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key=SECRET, max_retries=0)
    body = {"model": "tiny", "max_tokens": 8, "messages": USER, "extra_body": {"temperature": 0}}
    assert client.messages.create(**body).content[0].text == text
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text == text
    assert client.messages.count_tokens(model="tiny", messages=USER).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=1, messages=USER)


def test_responses_come_in_order(http, text):
    body = {"model": "tiny", "input": USER, "max_output_tokens": 8, "temperature": 0}
    whole = post(http, "/v1/responses", **body).json()
    assert whole["output"][0]["content"][0]["text"] == text
    found = events(post(http, "/v1/responses", **body, stream=True).text)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "".join(e["delta"] for e in found if "delta" in e) == text == found[-1]["response"]["output"][0]["content"][0]["text"]


def test_responses_call_tools_and_store_nothing(tools):
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    body = {"model": "tiny", "input": "hello", "tools": [tool], "temperature": 0, "max_output_tokens": 100}
    forced = {**body, "tool_choice": {"type": "function", "name": "look"}}
    whole = post(tools, "/v1/responses", **forced).json()
    [item] = whole["output"]
    assert whole["status"] == "completed" and item["type"] == "function_call" and json.loads(item["arguments"])["n"] in (1, 2)
    found = events(post(tools, "/v1/responses", **forced, stream=True).text)
    assert "".join(e["delta"] for e in found if "delta" in e) == item["arguments"]
    back = {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
    assert post(tools, "/v1/responses", **{**body, "input": [*USER, item, back]}).json()["object"] == "response"
    for field, value in (("previous_response_id", "resp_1"), ("store", True), ("background", True)):
        reply = tools.post("/v1/responses", json={**body, field: value})
        assert reply.status_code == 400 and field in reply.json()["error"]["message"]


def test_ollama_says_the_same_streamed_and_not(http, text):
    body = {"model": "tiny", "messages": USER, "options": {"temperature": 0, "num_predict": 8}}
    whole = post(http, "/api/chat", **body, stream=False).json()
    assert whole["message"]["content"] == text and whole["done"] and whole["done_reason"] == "length" and whole["eval_count"] == 8
    assert 0 < whole["eval_duration"] <= whole["total_duration"]
    reply = post(http, "/api/chat", **body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == text and [line["done"] for line in lines][-2:] == [False, True]
    made = post(http, "/api/generate", model="tiny:latest", prompt="hello", stream=False, options=body["options"]).json()
    assert made["response"] == text
    assert post(http, "/api/generate", model="tiny").json()["done_reason"] == "load"
    assert http.post("/api/chat", json={**body, "model": "nope"}).json()["error"].startswith("there is no model")
    shown = post(http, "/api/show", model="tiny").json()
    assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] == 512
    assert shown["capabilities"] == ["completion"] and shown["parameters"].split()[:2] == ["temperature", "0.0"]


def test_ollamas_client(server, text):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url, headers=AUTH)
    options = {"temperature": 0, "num_predict": 8}
    assert client.chat("tiny", USER, options=options).message.content == text
    assert "".join(piece.message.content for piece in client.chat("tiny", USER, options=options, stream=True)) == text
    assert client.generate("tiny", "hello", options=options).response == text
    assert len(client.embed("tiny", ["a", "b"]).embeddings) == 2
    shown = client.show("tiny")
    assert "messages" in shown.template and shown.modified_at and shown.modelinfo["general.context_length"] == 512
    assert [m.model for m in client.list().models] == ["tiny", "other"] and [m.model for m in client.ps().models] == ["tiny"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat("tiny", USER, format=schema, options={"temperature": 0, "num_predict": 80}).message.content
    assert isinstance(json.loads(answer)["n"], int)
