"""Moderation: the plugin of the documents and others, before and after generation, whole and streamed, in each dialect."""

from __future__ import annotations

import sys

import documented_plugins
import httpx
import pytest
from http_server import AUTH, CHAT, SECRET, SPELL, events, running

from trivium.errors import InvalidRequestError

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
SAYS = {"messages": CHAT["messages"], "temperature": 0, "structured_outputs": {"regex": "well, xyzzy!"}}
OTHERS = """
import asyncio
from trivium.plugin import hookimpl
from trivium_server import Moderator

calls = []
ended = set()

class Other(Moderator):
    async def before(self, asked):
        calls.append(asked)
    async def after(self, asked, text, final):
        if any(text.startswith(start) for start in ended):
            return "no more"
        if "boom" in ended:
            raise ValueError("the service is not there")
        if "number" in ended:
            return 7

@hookimpl
def trivium_moderation():
    return Other()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        quiet = tmp_path_factory.mktemp("site")
        documented_plugins.install(quiet, patch)
        other = tmp_path_factory.mktemp("other")
        (other / "other_moderation.py").write_text(OTHERS)
        documented_plugins.distribution(other, "other", {"trivium.moderations": {"other": "other_moderation"}})
        patch.syspath_prepend(other)
        yield
        sys.modules.pop("other_moderation", None)


@pytest.fixture(scope="module")
def quiet(site, folder):
    with (
        running(folder, moderation=("quiet",)) as server,
        httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http,
    ):
        yield http


@pytest.fixture
def other(site, folder):
    """A client, what the plugin was asked, and the texts that it ends."""
    with (
        running(folder, moderation=("quiet", "other")) as server,
        httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http,
    ):
        module = sys.modules["other_moderation"]
        module.calls.clear()
        module.ended.clear()
        yield http, module.calls, module.ended


def test_a_request_can_be_refused_in_every_dialect(quiet):
    said = [{"role": "user", "content": "say XYZZY"}]
    for path, body in (
        (CHATS, {"messages": said}), (CHATS, {"messages": said, "stream": True}), ("/v1/completions", {"prompt": ["a", "xyzzy"]}),
        ("/v1/responses", {"input": "xyzzy"}), ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": said}),
        ("/api/chat", {"model": "tiny", "messages": said}),
    ):  # fmt: skip
        reply = quiet.post(path, json=body)
        assert reply.status_code == 400 and "we don't speak of xyzzy here" in reply.text
    ids = quiet.post("/tokenize", json={"prompt": "xyzzy"}).json()["tokens"]
    reply = quiet.post("/v1/completions", json={"prompt": ids})
    assert reply.json()["error"] == {
        "message": "we don't speak of xyzzy here", "type": "invalid_request_error", "param": "prompt", "code": "content_filter",
    }  # fmt: skip
    assert quiet.post(CHATS, json=CHAT).status_code == 200


def test_an_answer_can_be_ended_in_every_dialect(quiet):
    [choice] = quiet.post(CHATS, json=SAYS).json()["choices"]
    assert choice["finish_reason"] == "content_filter" and choice["message"]["content"] == ""
    found = events(quiet.post(CHATS, json={**SAYS, "stream": True, "stream_options": {"include_usage": True}}).text)
    choices = [c for chunk in found[:-1] for c in chunk["choices"]]
    said = "".join(c["delta"].get("content") or "" for c in choices)
    assert "well, xyzz".startswith(said)  # a reader that lags gets several tokens in a piece, and the piece is dropped whole
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["content_filter"]
    assert found[-1] == "[DONE]" and found[-2]["usage"]["completion_tokens"] >= 11
    [choice] = quiet.post("/v1/completions", json={**SAYS, "prompt": "a", "max_tokens": 50}).json()["choices"]
    assert choice["finish_reason"] == "content_filter" and choice["text"] == ""
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": "xyzzy"}}}
    reply = quiet.post("/v1/responses", json={"input": "a", "text": form, "temperature": 0}).json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    last = events(quiet.post("/v1/responses", json={"input": "a", "text": form, "temperature": 0, "stream": True}).text)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["incomplete_details"] == {"reason": "content_filter"}
    body = {"model": "tiny", "max_tokens": 50, "messages": CHAT["messages"], "output_format": form["format"]}
    assert quiet.post("/v1/messages", json=body).json()["stop_reason"] == "refusal"
    stop = [e for e in events(quiet.post("/v1/messages", json={**body, "stream": True}).text) if e["type"] == "message_delta"]
    assert stop[0]["delta"]["stop_reason"] == "refusal"
    body = {"model": "tiny", "messages": CHAT["messages"], "format": {"const": "xyzzy"}, "stream": False}
    assert quiet.post("/api/chat", json=body).json()["done_reason"] == "content_filter"
    text = quiet.get("/metrics").text
    assert 'trivium:requests_refused_total{code="content_filter"}' in text
    assert all(line.endswith(" 0.0") for line in text.splitlines() if line.startswith("trivium:num_requests_running{"))


def test_a_moderator_is_told_who_asks_but_not_the_key(other):
    http, calls, _ = other
    http.post(CHATS, json=CHAT, headers={"x-request-id": "mine"})
    http.post("/v1/completions", json={"prompt": ["ab", "cd"], "max_tokens": 1})
    chat, text = calls
    assert (chat.request_id, chat.model, list(chat.messages), chat.prompts) == ("mine", "tiny", CHAT["messages"], [])
    assert list(text.prompts) == ["ab", "cd"] and not text.messages
    assert chat.key == text.key and chat.key and SECRET not in chat.key


@pytest.mark.parametrize("n", [1, 2])
def test_one_output_ends_and_the_others_go_on(other, n):
    http, _, ended = other
    body = {"prompt": ["ab", "cd"], "max_tokens": 12, "n": n, "seed": 3, **SPELL, "temperature": 5}
    texts = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    assert len(set(texts)) == 2 * n and len(texts[0]) == 12
    ended.add(texts[0][:6])
    found = events(http.post("/v1/completions", json={**body, "stream": True}).text)
    choices = [c for chunk in found[:-1] for c in chunk["choices"]]
    made = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(2 * n)]
    reasons = [[c["finish_reason"] for c in choices if c["index"] == i and c["finish_reason"]] for i in range(2 * n)]
    assert texts[0][:5].startswith(made[0]) and made[1:] == texts[1:]
    assert reasons == [["content_filter"], *[["length"]] * (2 * n - 1)]


@pytest.mark.parametrize("how", ["boom", "number"])
def test_what_was_not_judged_does_not_pass(other, how):
    http, _, ended = other
    ended.add(how)
    reply = http.post(CHATS, json=CHAT)
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "bad_plugin" and "other" in reply.text
    found = events(http.post(CHATS, json={**CHAT, "stream": True}).text)
    assert found[-2]["error"]["code"] == "bad_plugin"
    assert not any(c["delta"].get("content") for chunk in found[:-2] for c in chunk["choices"])


def test_a_name_that_is_not_installed(site, folder):
    with pytest.raises(InvalidRequestError, match="'loud'; installed are: other, quiet"), running(folder, moderation=("loud",)):
        pass
