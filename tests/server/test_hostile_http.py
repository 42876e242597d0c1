"""Clients that mean harm, or break the rules of HTTP: each is refused or shut out, and the others don't notice."""

from __future__ import annotations

import json
import socket
import time
import urllib.parse

import pytest
from http_server import AUTH, CHAT, SECRET, running, until

pytestmark = pytest.mark.http
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
DEEP = 900


def nested(depth, key="a"):
    return f'{{"{key}":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "field",
    [
        '"chat_template_kwargs":{0}', '"guided_json":{0}', '"structured_outputs":{0}', '"logits_processors":{0}',
        '"response_format":{{"type":"json_schema","json_schema":{{"schema":{0}}}}}',
        '"tools":[{{"type":"function","function":{{"name":"f","parameters":{0}}}}}]', '"tool_choice":{0}',
    ],
)  # fmt: skip
def test_depth_of_a_body_is_limited(http, field):
    for depth in (90, DEEP):
        body = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,' + field.format(nested(depth, "properties")) + "}"
        reply = http.post(CHATS, content=body)
        assert reply.status_code == 400 or (reply.status_code, depth) == (200, 90), reply.text
        assert ("deeper than 100" in reply.text) == (depth == DEEP)
    for messages in (nested(DEEP), f"[{nested(DEEP)}]", f'[{{"role":"user","content":[{nested(DEEP)}]}}]'):
        for path in (CHATS, "/tokenize", "/v1/messages", "/api/chat"):
            body = '{"model":"tiny","max_tokens":1,"messages":' + messages + "}"
            assert http.post(path, content=body).status_code == 400
    schema = json.dumps({"prompt": "a", "guided_json": nested(5000)})
    assert http.post(TEXTS, content=schema).status_code == 400


def test_what_can_not_fit_is_not_cut_into_tokens(http):
    """A prompt of megabytes would keep a processor busy for minutes."""
    long = "ab " * 20_000
    chat = [{"role": "user", "content": long}]
    for path, body in (
        (TEXTS, {"prompt": long}), (TEXTS, {"prompt": ["a", long]}), (TEXTS, {"prompt": long, "add_special_tokens": False}),
        (TEXTS, {"prompt": [1] * 10_000}), (TEXTS, {"prompt": long, "truncate_prompt_tokens": 5}), (CHATS, {"messages": chat}),
        ("/tokenize", {"prompt": long}), ("/tokenize", {"messages": chat}), ("/v1/embeddings", {"input": ["a", long]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": chat}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": chat}), ("/v1/responses", {"input": long}),
        ("/api/generate", {"model": "tiny", "prompt": long}), ("/api/chat", {"model": "tiny", "messages": chat}),
        ("/api/embed", {"model": "tiny", "input": long}), (CHATS, {"messages": [{"role": "user", "content": ""}] * 3_000}),
    ):  # fmt: skip
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "characters" in reply.text, (path, reply.text[:200])
    assert http.post(TEXTS, json={"prompt": "a" * 400, "truncate_prompt_tokens": 5, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"chat_template_kwargs": {"self": 1}}), (CHATS, {"n": 10**6, "stream": True}), (CHATS, {"stop": ["x"] * 65}),
        (CHATS, {"bad_words": ["x"] * 1025}), (CHATS, {"prompt_logprobs": 21}), (CHATS, {"prompt_logprobs": -1}),
        (TEXTS, {"logprobs": 21}), (TEXTS, {"prompt": [["a"]]}), (TEXTS, {"prompt": ["a"] * 2049}),
        ("/api/chat", {"logprobs": True, "top_logprobs": 300}), (CHATS, {"logit_bias": {str(10**40): 1}}),
        (CHATS, {"guided_regex": "|".join(f"{i:x}" for i in range(50_000))}), (CHATS, {"guided_grammar": "start: " + "(" * 5000}),
        (CHATS, {"priority": "low"}), (CHATS, {"timeout": 0}), (CHATS, {"seed": 2**80}), (CHATS, {"beam_width": 10**6}),
    ],
)  # fmt: skip
def test_numbers_of_things_are_limited(http, path, body):
    base = {"model": "tiny", "prompt": "a"} if path == TEXTS else {"model": "tiny", "messages": CHAT["messages"]}
    reply = http.post(path, json={**base, **body})
    assert reply.status_code == 400, reply.text


def connect(server):
    host = urllib.parse.urlsplit(server.url)
    return socket.create_connection((host.hostname, host.port), timeout=60)


def said(sock):
    """All that comes until the server closes; a reset is the end, too."""
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def head(path, *more, size=0, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {SECRET}", f"Content-Length: {size}", *more, "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_offer_of_another_protocol_is_answered_in_this_one(server, pieces):
    """Java's own client offers HTTP/2 so with every first request, and its body counts all the same."""
    body = json.dumps(CHAT).encode()
    offer = ("Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    data = head(CHATS, *offer, size=len(body)) + body
    with connect(server) as sock:
        cut = len(data) // pieces
        for start in range(0, len(data), cut):
            sock.sendall(data[start : start + cut])
            time.sleep(0.01)
        sock.settimeout(10)
        found = b""
        while b'"usage"' not in found:
            found += sock.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 200")


def test_websockets_and_proxies_are_not_spoken(server):
    socketed = head("/v1/models", "Connection: Upgrade, close", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", method="GET")
    with connect(server) as sock:
        sock.sendall(socketed)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    with connect(server) as sock:
        sock.sendall(b"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org:80\r\n\r\n")
        assert said(sock).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "lines",
    [
        b"GET /v1/mod\xc3\xa9ls HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_and_the_connection_closed(server, http, lines):
    with connect(server) as sock:
        sock.sendall(lines)
        assert said(sock).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200


def test_a_chunked_body_that_breaks_its_framing_is_nobodys_answer(server, http):
    data = head(CHATS).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connect(server) as sock:
        sock.sendall(data + b'5\r\n{"mes\r\nzz\r\n')
        assert said(sock).startswith(b"HTTP/1.1 400")
    assert http.post(CHATS, json=CHAT).status_code == 200


def test_clients_that_never_come_to_the_point_are_shut_out(folder):
    with running(folder, max_headers=4000, body_timeout=0.3) as server:
        for begun in (b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"):
            with connect(server) as sock:
                sock.sendall(begun)
                assert said(sock) == b""
        with connect(server) as sock:
            sock.sendall(head("/health", method="GET"))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            sock.sendall(b"\r\n")
            assert said(sock) == b""
        with connect(server) as sock:
            sock.sendall(head("/health", method="GET")[:-2])
            try:
                for i in range(10_000):
                    sock.sendall(b"X-%d: %b\r\n" % (i, b"a" * 1000))
            except (ConnectionResetError, BrokenPipeError):
                pass
            else:
                raise AssertionError("ten megabytes of headers were taken")


def test_a_reader_that_takes_nothing_is_left(folder):
    """It has asked for more than fits into the buffers of both sides."""
    import httpx

    with running(folder, body_timeout=0.3) as server:
        prompts = [[97 + i, *[97] * 500] for i in range(24)]
        asked = json.dumps({"prompt": prompts, "max_tokens": 0, "prompt_logprobs": 20, "echo": True, "logprobs": 20}).encode()
        with connect(server) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head(TEXTS, size=len(asked)) + asked)
            until(lambda: server.connections == 1, "it is taken")
            until(lambda: server.connections == 0, "it is left")
        assert httpx.post(server.url + CHATS, json=CHAT, headers=AUTH, timeout=60).status_code == 200
