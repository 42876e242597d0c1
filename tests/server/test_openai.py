"""OpenAI's endpoints: what each field means, streamed = whole, and the official client against them."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from http_server import CHAT, SECRET, SPELL, events

from trivium import LLM, SamplingParams

pytestmark = pytest.mark.http


def ask(http, body, path="/v1/chat/completions"):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def joined(chunks, index=0):
    """Content of one choice, and its finish reasons."""
    found = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" for c in found), [c["finish_reason"] for c in found if c["finish_reason"]]


def stream(http, body, path="/v1/chat/completions"):
    reply = http.post(path, json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = events(reply.text)
    assert found[-1] == "[DONE]"
    return found


def test_a_stream_is_the_whole_answer_in_pieces(http):
    whole = ask(http, CHAT)
    chunks = stream(http, CHAT)
    text, reasons = joined(chunks)
    assert text == whole["choices"][0]["message"]["content"] and len(text) == 24
    assert reasons == ["length"] == [whole["choices"][0]["finish_reason"]]
    roles = [c["delta"]["role"] for chunk in chunks[:-1] for c in chunk["choices"] if "role" in c["delta"]]
    assert roles == ["assistant"]
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


def test_the_answer_is_the_librarys(http, folder):
    with LLM(folder, backend="reference", dtype="float32", progress=False) as llm:
        [want] = llm.chat(CHAT["messages"], SamplingParams(max_tokens=24, **SPELL))
    assert ask(http, CHAT)["choices"][0]["message"]["content"] == want.outputs[0].text


def test_several_outputs_have_an_index_each(http):
    body = {**CHAT, "n": 3, "temperature": 1, "seed": 5}
    whole = ask(http, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 72
    chunks = stream(http, body)
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == (choice["message"]["content"], ["length"])


def test_max_completion_tokens_comes_before_max_tokens_and_null_is_missing(http):
    assert ask(http, {**CHAT, "max_tokens": 3, "max_completion_tokens": 5})["usage"]["completion_tokens"] == 5
    assert ask(http, {**CHAT, "max_tokens": 3, "max_completion_tokens": None})["usage"]["completion_tokens"] == 3
    assert ask(http, {**CHAT, "stop": None, "seed": None, "tools": None})["usage"]["completion_tokens"] == 24


def test_a_json_schema_is_kept_to(http):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"messages": CHAT["messages"], "max_completion_tokens": 80, "temperature": 0, "response_format": form}
    answer = json.loads(ask(http, body)["choices"][0]["message"]["content"])
    assert set(answer) == {"age"} and isinstance(answer["age"], int)


def test_the_four_forms_of_a_prompt(http):
    def texts(prompt):
        found = ask(http, {"prompt": prompt, "max_tokens": 6, **SPELL}, "/v1/completions")["choices"]
        assert [choice["index"] for choice in found] == list(range(len(found)))
        return [choice["text"] for choice in found]

    one, two = texts("ab"), texts("cd")
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("ab", "cd")]
    assert texts(["ab", "cd"]) == texts(ids) == one + two
    assert texts(ids[0]) == one


def test_several_prompts_stream_side_by_side(http):
    body = {"prompt": ["ab", "cd"], "max_tokens": 6, "n": 2, **SPELL}
    whole = [choice["text"] for choice in ask(http, body, "/v1/completions")["choices"]]
    pieces = [c for chunk in stream(http, body, "/v1/completions")[:-1] for c in chunk["choices"]]
    assert ["".join(c["text"] for c in pieces if c["index"] == i) for i in range(4)] == whole


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_has_logprobs_of_the_prompt_and_offsets(http, max_tokens):
    body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": max_tokens, **SPELL}
    [choice] = ask(http, body, "/v1/completions")["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert text.startswith("hello") and len(text) == 5 + max_tokens
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert None not in found["token_logprobs"][1:]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["text_offset"])
    shown = [(offset, token) for offset, token in zip(found["text_offset"], found["tokens"]) if not token.startswith("<")]
    assert all(text[offset - shown[0][0] :].startswith(token) for offset, token in shown)
    assert all(token in top for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:]))


def test_embeddings_are_the_same_as_numbers_and_in_base64(http):
    body = {"input": ["a", "b"], "model": "tiny"}
    numbers = ask(http, {**body, "encoding_format": "float"}, "/v1/embeddings")["data"]
    packed = ask(http, {**body, "encoding_format": "base64"}, "/v1/embeddings")["data"]
    for one, other in zip(numbers, packed):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == pytest.approx(one["embedding"])


def test_tokens_go_there_and_back(http):
    found = ask(http, {"prompt": "héllo"}, "/tokenize")
    assert found["count"] == len(found["tokens"])
    assert ask(http, {"tokens": found["tokens"]}, "/detokenize")["prompt"].endswith("héllo")


def test_times_come_only_where_they_are_asked_for(http):
    assert "metrics" not in ask(http, CHAT) and "queue_time" not in ask(http, CHAT)["usage"]
    found = ask(http, {**CHAT, "include_metrics": True})
    assert found["metrics"]["time_to_first_token_ms"] <= found["metrics"]["e2e_time_ms"]
    usage = found["usage"]
    assert usage["total_time"] == pytest.approx(usage["prompt_time"] + usage["completion_time"])
    last = stream(http, {**CHAT, "include_metrics": True})[-2]
    assert last["choices"] == [] and last["metrics"]["tokens_per_second"] > 0 and last["x_groq"]["usage"]["queue_time"] >= 0


def test_the_official_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=SECRET, max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny", "other"] and client.models.retrieve("tiny").id == "tiny"
    extra = {k: v for k, v in SPELL.items() if k != "temperature"}
    asked = {"model": "tiny", "messages": CHAT["messages"], "temperature": 0, "max_completion_tokens": 8, "extra_body": extra}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == 8 and whole.usage.total_tokens > 8
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(client.embeddings.create(model="tiny", input=["a"]).data[0].embedding) == 64
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=4, temperature=0, extra_body={})
    assert answer.object == "response" and answer.status in ("completed", "incomplete")
    with pytest.raises(openai.NotFoundError, match="no model 'nope'"):
        client.chat.completions.create(model="nope", messages=CHAT["messages"])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_groqs_client_reads_the_times(server):
    groq = pytest.importorskip("groq")
    client = groq.Groq(base_url=server.url, api_key=SECRET, max_retries=0)
    extra = {"include_metrics": True, "ignore_eos": True}
    asked = {"model": "tiny", "messages": CHAT["messages"], "temperature": 0, "max_completion_tokens": 8, "extra_body": extra}
    usage = client.chat.completions.create(**asked).usage
    assert usage.total_time == pytest.approx(usage.prompt_time + usage.completion_time) and usage.queue_time >= 0
    last = list(client.chat.completions.create(**asked, stream=True))[-1]
    assert last.x_groq.usage.completion_tokens == 8 and last.x_groq.usage.total_time > 0
