"""Running a server: limits, keys, what it says about itself, and the command from start to end."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading

import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHAT, SPELL, events, running
from trivium_server.keys import Key, Keys
from trivium_server.structure import bounded

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"


def test_keys_are_kept_as_hashes():
    import hashlib

    known = Key.of("secret")
    assert Key.of("sha256:" + hashlib.sha256(b"secret").hexdigest()) == known and b"secret" not in known.digest
    keys = Keys([known, Key.of("other")])
    assert keys.find(b"secret") == known and keys.find(b"secre") is None and keys.find(b"") is None
    assert known.salt != Key.of("other").salt
    for wrong in ("", "sha256:12", "caf\u00e9"):
        with pytest.raises(ValueError):
            Key.of(wrong)


def test_keys_share_no_prefixes(folder):
    import httpx

    with (
        running(folder, keys=("a", "b"), loading={"block_size": 4}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def cached(key):
            reply = client.post(CHATS, json=CHAT, headers={"x-api-key": key})
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("a") == 0 and cached("a") > 0 and cached("b") == 0 and cached("b") > 0


@pytest.mark.parametrize("limit", [{"max_waiting_requests": 1}, {"max_waiting_tokens": 8}], ids=str)
def test_a_full_queue_says_when_to_come_back(tmp_path, limit):
    import httpx

    long = make_chat_model(tmp_path / "long", max_position_embeddings=20_000)
    with running(long, loading={"max_num_seqs": 1, **limit}) as server:
        body = {**CHAT, "max_completion_tokens": 15_000, "stream": True}
        with (
            httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client,
            client.stream("POST", CHATS, json=body) as first,
        ):
            lines = first.iter_lines()
            next(lines)
            with client.stream("POST", CHATS, json=body) as second:
                more = second.iter_lines()
                next(more)
                reply = client.post(CHATS, json=CHAT)
                assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"] == {**reply.json()["error"], "type": "rate_limit_error", "code": "overloaded"}
                other = client.post("/v1/messages", json={"model": "tiny", "max_tokens": 1, "messages": CHAT["messages"]})
                assert other.status_code == 529 and other.json()["error"]["type"] == "overloaded_error"
                assert other.headers["retry-after"]


def test_deadlines(folder):
    import httpx

    body = {**CHAT, "max_completion_tokens": 480}
    with running(folder, request_timeout=0.02) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        reply = client.post(CHATS, json=body)
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"
        reply = client.post(CHATS, json={**body, "stream": True})  # its time may be over before the first token, or after it
        error = events(reply.text)[-2]["error"] if reply.status_code == 200 else reply.json()["error"]
        assert error["code"] == "deadline_exceeded"
    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        assert client.post(CHATS, json={**body, "timeout": 0.02}).status_code == 504
        assert client.post(CHATS, json={**body, "timeout": -1}).status_code == 400


def test_limits_of_body_and_headers(folder):
    import httpx

    with running(folder, max_body=1000, max_headers=4000, body_timeout=0.2) as server:  # noqa: SIM117
        with httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
            assert client.post(CHATS, content=b" " * 1001).status_code == 413
            assert client.post(CHATS, content=iter([b" " * 600] * 2)).status_code == 413
            assert client.post("/v1/messages", content=b" " * 1001).json()["error"]["type"] == "request_too_large"
            assert client.get("/v1/models", headers={"x-long": "a" * 4000}).status_code == 431
            slow = threading.Event()

            def body():
                yield b"{"
                slow.wait(30)

            threading.Timer(1.0, slow.set).start()
            assert client.post(CHATS, content=body()).status_code == 408
            assert client.post(CHATS, json=CHAT).status_code == 200


def test_nothing_of_a_request_reaches_files_or_templates(http):
    for name in ("/etc/passwd", "../tiny", "hf:org/name", ""):
        assert http.post(CHATS, json={**CHAT, "model": name}).status_code == 404
    assert http.get("/v1/models/etc/passwd").status_code == 404
    for body in (
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"template": "x"}},
        {"chat_template_kwargs": {"tools": []}},
    ):
        assert http.post(CHATS, json={**CHAT, **body}).status_code == 400
    assert http.post(CHATS, json={**CHAT, "model": "other"}).json()["model"] == "tiny"


def test_what_types_can_not_say_is_refused_with_the_field(http):
    for body, param in (
        ({"temperature": "hot"}, "temperature"), ({"max_completion_tokens": -1}, "max_tokens"), ({"n": 0}, "n"),
        ({"modalities": ["audio"]}, "modalities"), ({"continue_final_message": True}, "continue_final_message"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"), ({"logprobs": 3}, "logprobs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"), ({"tools": [{}]}, "tools"),
    ):  # fmt: skip
        reply = http.post(CHATS, json={**CHAT, **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_integers_of_a_schema_are_bounded_where_it_is_silent():
    literal = {"enum": [{"type": "integer"}]}
    schema = {"properties": {"type": {"type": "integer", "minimum": 3}, "b": literal}, "items": [{"type": ["integer"]}]}
    limit = 2**53 - 1
    assert bounded(schema) == {
        "properties": {"type": {"type": "integer", "minimum": 3, "maximum": limit}, "b": literal},
        "items": [{"type": ["integer"], "minimum": -limit, "maximum": limit}],
    }


def test_the_document_names_every_route_and_resolves(http):
    from trivium_server.app import ROUTES

    found = http.get("/openapi.json").json()
    assert {(m.upper(), path) for path, methods in found["paths"].items() for m in methods} == {(r.method, r.path) for r in ROUTES}
    names = set(re.findall(r"#/components/schemas/([^\"]+)", http.get("/openapi.json").text))
    schemas = found["components"]["schemas"]
    assert names <= set(schemas) and all(name.isidentifier() for name in names)
    assert {"messages", "temperature", "tools", "min_p"} <= set(schemas["ChatRequest"]["properties"])
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_aliases_of_the_metrics(folder):
    import httpx

    with running(folder, vllm_metrics=True) as server:
        text = httpx.get(server.url + "/metrics", headers=AUTH).text
        assert "vllm:time_to_first_token_seconds_bucket" in text and "trivium:time_to_first_token_seconds_bucket" in text


def command(folder, *flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "trivium.cli", "serve", f"tiny={folder}", "--backend", "reference", "--port", "0", *flags]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env)


def address(process):
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)", line):
            return found[1]
    raise AssertionError("it did not start")


def test_the_command_serves_drains_and_ends_well(folder):
    import httpx

    with command(folder, "--api-key", "k1") as process:
        url = address(process)
        body = {**CHAT, "max_completion_tokens": 300, "stream": True}
        with httpx.Client(base_url=url, headers=AUTH, timeout=60) as client, client.stream("POST", CHATS, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "stopping" in process.stderr.readline()
            assert httpx.get(url + "/health").status_code == 503 and httpx.get(url + "/live").status_code == 200
            late = httpx.post(url + CHATS, json=CHAT, headers=AUTH)
            assert late.status_code == 503 and late.headers["retry-after"]
            rest = events("\n".join(lines))
        made = "".join(c["delta"].get("content") or "" for chunk in rest[:-1] for c in chunk["choices"])
        assert rest[-1] == "[DONE]" and len(made) >= 299
        assert process.wait(30) == 0


def test_a_second_signal_ends_at_once(folder):
    import httpx

    with command(folder, "--api-key", "k1") as process:
        url = address(process)
        body = {**CHAT, "max_completion_tokens": 480, "stream": True}
        with httpx.Client(base_url=url, headers=AUTH, timeout=60) as client, client.stream("POST", CHATS, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key", ""], "printable"), (["--api-key-file", "/nothing"], "No such file"),
        (["--host", "300.1.1.1"], "can't listen"), (["--batch-dir", "/dev/null/x"], "Not a directory"),
    ],
)  # fmt: skip
def test_bad_flags_end_with_one_line(folder, flags, words):
    with command(folder, *flags) as process:
        said = process.stderr.read().strip()
        assert process.wait(30) == 2 and words in said and "\n" not in said


UNSERVABLE = [
    ("--max-model-len", "1"), ("--block-size", "0"), ("--block-size", "-1"), ("--max-num-seqs", "0"), ("--num-kv-blocks", "0"),
    ("--max-num-batched-tokens", "0"), ("--dtype", "int3"), ("--backend", "cpuu"), ("--backend", "cpu", "--block-size", "24"),
]  # fmt: skip


@pytest.mark.faults
def test_o24_sizes_that_can_not_work_end_with_one_line(folder):
    with contextlib.ExitStack() as running:
        processes = [(flags, running.enter_context(command(folder, *flags))) for flags in UNSERVABLE]
        for flags, process in processes:
            said = process.stderr.read().strip()
            assert process.wait(60) == 2 and "\n" not in said and said.startswith("trivium"), (flags, said)
            assert flags[-2].strip("-").replace("-", "_") in said.replace("-", "_") or flags[-1] in said, (flags, said)


@pytest.mark.faults
def test_o24_the_smallest_sizes_serve(folder):
    import httpx

    smallest = ("--max-model-len", "64", "--block-size", "1", "--max-num-seqs", "1", "--num-kv-blocks", "64")
    with command(folder, "--max-num-batched-tokens", "1", *smallest) as process:
        reply = httpx.post(address(process) + CHATS, json={**CHAT, "max_completion_tokens": 2}, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 2
        assert process.wait(30) == 0


def test_a_slow_reader_loses_nothing(http):
    body = {**CHAT, "max_completion_tokens": 100, **SPELL}
    want = http.post(CHATS, json=body).json()["choices"][0]["message"]["content"]
    got: queue.Queue[str] = queue.Queue()
    with http.stream("POST", CHATS, json={**body, "stream": True}) as reply:
        http.post(CHATS, json=CHAT)  # the stream is not read in the meantime
        for line in reply.iter_lines():
            got.put(line)
    chunks = events("\n".join(got.queue))
    assert "".join(c["delta"].get("content") or "" for chunk in chunks[:-1] for c in chunk["choices"]) == want
