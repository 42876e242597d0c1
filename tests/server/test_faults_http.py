"""Reported faults, tried over HTTP. A bad request is sent beside a known stream, which must end unharmed, and a good one must work
afterwards."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.parse

import pytest
from chat_models import make_chat_model
from http_server import AUTH, CHAT, CHATS, LONG, SECRET, SPELL, TEXTS, beside, events, metric, running, until

pytestmark = [pytest.mark.http, pytest.mark.faults]
MAX_LEN = 512


def texts(http, **body):
    reply = http.post(TEXTS, json={"prompt": "ab", "max_tokens": 8, **SPELL, **body})
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def answer(http, **body):
    reply = http.post(CHATS, json={**CHAT, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_o01_min_p(http, refused):
    greedy = texts(http)
    for min_p in (0, 0.05, 0.999, 1.0):
        found = texts(http, temperature=1, min_p=min_p, seed=1)
        assert min_p < 1 or found == greedy
    refused(CHATS, {**CHAT, "min_p": -0.1}, {**CHAT, "min_p": 1.1}, words="min_p")


def test_o02_token_ids_outside_the_vocabulary(http, refused):
    prompts = [[-1], [320], [2**63], [1.5], [True], [[1, 2], [-3]], [], [[1, "a"]]]
    refused(TEXTS, *[{"prompt": prompt, **SPELL} for prompt in prompts], words="prompt")
    assert len(texts(http, prompt=[1, 2, 3])) == 1 and len(texts(http, prompt=[[1, 2], [3]])) == 2


def test_o03_beam_search_is_asked_for_by_its_width(http, refused):
    refused(TEXTS, {"prompt": "ab", "use_beam_search": True}, words="beam_width")
    plain = {"prompt": "ab", "max_tokens": 8, "beam_width": 2, "n": 2, "temperature": 0, "ignore_eos": True}
    assert len(http.post(TEXTS, json=plain).json()["choices"]) == 2
    refused(TEXTS, {**plain, "stream": True}, words="beam search")


def test_o05_temperature_zero_is_greedy_whatever_else_is_asked(http):
    found = {texts(http, seed=seed)[0] for seed in range(1, 6)}
    found |= {texts(http, temperature=0.0, top_p=0.1, top_k=5, min_p=0.3)[0]}
    assert len(found) == 1


def test_o06_top_k_of_any_size_in_one_batch(http, server):
    greedy = texts(http)
    body = {"prompt": ["ab"] * 4, "max_tokens": 8, **SPELL}
    for chosen in ({"temperature": 1, "top_k": 9999999}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_k": -1}):
        found = http.post(TEXTS, json={**body, **chosen, "seed": 3})
        assert found.status_code == 200
        assert chosen["top_k"] != 1 or [c["text"] for c in found.json()["choices"]] == greedy * 4
    assert http.get("/health").status_code == 200


def test_o07_ids_in_parameters_pass_the_same_check(refused):
    bodies = [{"stop_token_ids": [330], "min_tokens": 4}, {"allowed_token_ids": [320]}, {"logit_bias": {"320": 1}}]
    refused(CHATS, *[{**CHAT, **body} for body in bodies], {**CHAT, "stop_token_ids": [-1]}, {**CHAT, "logit_bias": {"x": 1}})


def test_o10_logprobs_are_strict_json_with_all_fields(http):
    body = {"messages": CHAT["messages"], "max_completion_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    reply = http.post(CHATS, json=body)

    def never(name):
        raise AssertionError(name)

    found = json.loads(reply.text, parse_constant=never)["choices"][0]["logprobs"]["content"]
    assert found and all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} and len(e["top_logprobs"]) == 20 for e in found)


def test_o11_logprobs_without_alternatives(http, refused):
    for top in (None, 0, 5):
        found = answer(http, logprobs=True, top_logprobs=top)
        content = found["choices"][0]["logprobs"]["content"]
        assert len(content) == found["usage"]["completion_tokens"]
        assert {len(entry["top_logprobs"]) for entry in content} == {top or 0}
    for k in (0, 1, 5):
        body = {"prompt": "ab", "max_tokens": 4, "logprobs": k, "temperature": 0, "ignore_eos": True}
        found = http.post(TEXTS, json=body).json()["choices"][0]["logprobs"]
        assert len(found["token_logprobs"]) == 4 and {len(top) for top in found["top_logprobs"]} == {k}
    refused(CHATS, {**CHAT, "top_logprobs": 2}, {**CHAT, "logprobs": True, "top_logprobs": 21}, words="top_logprobs")


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 4), (5, 12), (22, 24)])
def test_o13_o14_a_stop_string_is_cut_out_and_never_shown_in_part(http, first, last):
    full = answer(http)["choices"][0]["message"]["content"]
    stop = full[first:last]
    want = full[: full.index(stop)]
    body = {**CHAT, "stop": [stop, "ZZZZ"]}
    assert answer(http, stop=[stop, "ZZZZ"])["choices"][0]["message"]["content"] == want
    chunks = events(http.post(CHATS, json={**body, "stream": True}).text)
    pieces = [c for chunk in chunks[:-1] for c in chunk["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in pieces) == want
    assert [c["finish_reason"] for c in pieces if c["finish_reason"]] == ["stop"]


def test_o17_echo_with_nothing_to_make(http):
    body = {"prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "max_tokens": 0}
    found = http.post(TEXTS, json=body).json()
    [choice] = found["choices"]
    assert choice["text"] == body["prompt"] and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0 and len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert texts(http, max_tokens=0) == [""]


def raw(server, body, *, path=CHATS, cut=None):
    """A socket on which a call was sent, or `cut` bytes of it."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    host = urllib.parse.urlsplit(server.url)
    sock = socket.create_connection((host.hostname, host.port))
    sock.sendall((head + data)[:cut])
    return sock


@pytest.mark.parametrize("streams", [False, True])
def test_o18_a_client_that_goes_away_frees_what_it_had(http, server, streams):
    free = metric(http, "trivium:kv_cache_free_pages")
    aborts = metric(http, "trivium:request_success_total", finished_reason="abort")
    sock = raw(server, {**CHAT, "max_completion_tokens": 480, "stream": streams})
    until(lambda: metric(http, "trivium:num_requests_running") == 1, "it has begun")
    sock.close()
    until(lambda: metric(http, "trivium:num_requests_running") == 0, "it ends")
    until(lambda: server.app.active <= 1, "nobody answers it any more")
    assert metric(http, "trivium:kv_cache_free_pages") == free
    assert metric(http, "trivium:request_success_total", finished_reason="abort") == aborts + 1


def test_o20_empty_prompts(http, known):
    bodies = [(TEXTS, {"prompt": p, "max_tokens": 2, **SPELL}) for p in ("", [""], [], [[]], "\u0000")]
    bodies += [
        (CHATS, {**CHAT, "messages": m}) for m in ([], [{"role": "user", "content": ""}], [{"role": "user", "content": None}])
    ]
    with beside(http, known):
        for path, body in bodies:
            assert http.post(path, json=body).status_code in (200, 400), body


def test_o22_the_clients_request_id_is_only_echoed(http, server, known):
    same = {"x-request-id": "same"}
    with beside(http, known), http.stream("POST", CHATS, json={**LONG, "stream": True}, headers=same) as one:
        assert one.headers["x-request-id"] == "same"
        next(one.iter_lines())
        with http.stream("POST", CHATS, json={**LONG, "stream": True}, headers=same) as other:
            found = events(other.read().decode())
    assert "".join(c["delta"].get("content") or "" for chunk in found[:-1] for c in chunk["choices"]) == known
    assert http.get("/v1/models").headers["x-request-id"]
    assert len(http.get("/v1/models", headers={"x-request-id": "a" * 10_000}).headers["x-request-id"]) == 128


def test_o23_the_length_rule(http, refused):
    prompt = [97] * MAX_LEN

    def used(tokens, **body):
        reply = http.post(TEXTS, json={"prompt": prompt[:tokens], **SPELL, **body})
        return reply.status_code, reply.json()

    status, found = used(MAX_LEN - 2, max_tokens=2)
    assert status == 200 and found["usage"]["total_tokens"] == MAX_LEN
    assert used(MAX_LEN, max_tokens=0, echo=True, logprobs=1)[0] == 200
    for tokens, max_tokens in ((MAX_LEN, 1), (MAX_LEN - 1, 2)):
        status, found = used(tokens, max_tokens=max_tokens)
        assert status == 400 and found["error"]["code"] == "context_length_exceeded" and str(MAX_LEN) in found["error"]["message"]
    chat = answer(http, max_completion_tokens=None)
    assert chat["usage"]["total_tokens"] == MAX_LEN and chat["choices"][0]["finish_reason"] == "length"


def test_o28_parts_of_content(http, refused):
    def of(content):
        found = answer(http, messages=[{"role": "user", "content": content}])
        return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]

    assert of("abc") == of([{"type": "text", "text": "abc"}])
    bad = ([{"text": "abc"}], [{"type": "image_url", "image_url": {"url": "data:,"}}], [3], 3, {"type": "text"})
    refused(CHATS, *[{**CHAT, "messages": [{"role": "user", "content": content}]} for content in bad])


def test_o30_the_developer_role_is_the_systems(http):
    def of(role):
        messages = [{"role": role, "content": "be brief"}, *CHAT["messages"]]
        found = answer(http, messages=messages)
        return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]

    assert of("developer") == of("system")


def test_o31_browsers(folder):
    import httpx

    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with running(folder, origins=("http://a.test",)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        preflight = client.options(CHATS, headers={"origin": "http://a.test", **wanted})
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "http://a.test"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert "x-api-key" in preflight.headers["access-control-allow-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        origin = {"origin": "http://a.test"}
        assert client.post(CHATS, json=CHAT, headers=origin).status_code == 401
        for streams in (False, True):
            reply = client.post(CHATS, json={**CHAT, "stream": streams}, headers={**origin, **AUTH})
            assert reply.headers["access-control-allow-origin"] == "http://a.test"
        other = client.post(CHATS, json=CHAT, headers={"origin": "http://b.test", **AUTH})
        assert "access-control-allow-origin" not in other.headers
        assert client.options(CHATS, headers={"origin": "http://b.test", **wanted}).status_code == 401


def test_o32_finish_reasons_are_null_until_the_end(http):
    chunks = events(http.post(CHATS, json={**CHAT, "stream": True}).text)[:-1]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


def test_o33_a_response_that_was_cut_says_so(http):
    body = {"model": "tiny", "input": "count to 50", "max_output_tokens": 3, "temperature": 0}
    whole = http.post("/v1/responses", json=body).json()
    found = events(http.post("/v1/responses", json={**body, "stream": True}).text)
    assert found[-1]["type"] == "response.incomplete"
    for response in (whole, found[-1]["response"]):
        assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == 3


def test_o34_every_route_wants_the_key(server):
    import httpx
    from trivium_server.app import ROUTES

    pages = {f"/pages/{name}" for name in ("style.css", "icon.svg", "common.js", "charts.js", "chat.js", "dashboard.js", "docs.js")}
    public = {"/", "/health", "/live", "/dashboard", "/docs", *pages}  # the pages are empty until they have asked for data
    assert {route.path for route in ROUTES if route.public} == public
    wrong = [{}, *({"authorization": text} for text in ("Bearer wrong", "Bearer", "bearer wrong"))]
    wrong += [{"x-api-key": "wrong"}, {"authorization": f"Basic {SECRET}"}, {"authorization": SECRET}, {"x-api-key": ""}]
    paths = [(route.method, re.sub(r"{\w+}", "tiny", route.path)) for route in ROUTES if not route.public]
    paths += [("GET", p) for p in ("//v1/models", "/v1/../v1/models", "/V1/models", "/nothing", "/health/x", "//health")]
    paths += [("OPTIONS", "/v1/models"), ("DELETE", "/v1/models")]
    with httpx.Client(base_url=server.url) as client:
        for method, path in paths:
            for headers in wrong:
                reply = client.request(method, httpx.URL(server.url + path), headers=headers)
                assert reply.status_code == 401, (method, path, headers)
                assert reply.headers["www-authenticate"] == "Bearer"
        for headers in (AUTH, {"x-api-key": SECRET}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == client.get("/live").status_code == client.head("/").status_code == 200


@pytest.mark.parametrize(
    "option", [{"include_usage": True}, {"include_usage": True, "other": 1}, {}, None, {"include_usage": False}]
)
def test_o35_usage_comes_once_and_only_if_asked_for(http, refused, option):
    whole = answer(http)["usage"]
    chunks = events(http.post(CHATS, json={**CHAT, "stream": True, "stream_options": option}).text)[:-1]
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert all("choices" in chunk for chunk in chunks)
    if option and option["include_usage"]:
        assert [chunks[-1]] == with_usage and chunks[-1]["choices"] == []
        assert all(with_usage[0]["usage"][name] == whole[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    else:
        assert with_usage == []


def test_o35_usage_options_belong_to_streams(http, refused):
    refused(CHATS, {**CHAT, "stream_options": {"include_usage": True}}, words="stream_options")
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post(CHATS, json={**CHAT, "stream": True, "stream_options": both}).text)[:-1]
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert made == sorted(made) and made[0] < 24 and made[-2:] == [24, 24]


def test_o36_forms_of_embeddings(http, refused):
    def vectors(given):
        reply = http.post("/v1/embeddings", json={"input": given, "encoding_format": "float"}).json()
        assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
        return [item["embedding"] for item in reply["data"]]

    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("ab", "cd")]
    assert vectors("ab") == vectors(ids[0]) == vectors(["ab"])
    assert vectors(["ab", "cd"]) == vectors(ids)
    many = [f"text {i}" for i in range(40)]
    assert vectors(many)[7] == pytest.approx(vectors(many[7])[0], abs=1e-5)
    short = http.post("/v1/embeddings", json={"input": "ab", "dimensions": 8, "encoding_format": "float"}).json()
    assert len(short["data"][0]["embedding"]) == 8
    bad = [{"input": ""}, {"input": []}, {"input": ["a", ""]}, {"input": "a", "dimensions": 0}, {"input": "a", "dimensions": 65}]
    refused("/v1/embeddings", *bad, {"input": "a", "encoding_format": "int"})


def test_o40_the_names_on_metrics_are_a_contract(http):
    from prometheus_client.parser import text_string_to_metric_families

    before = metric(http, "trivium:prompt_tokens_total"), metric(http, "trivium:generation_tokens_total")
    usages = [answer(http, n=n, temperature=1)["usage"] for n in (1, 2, 1)]
    after = metric(http, "trivium:prompt_tokens_total"), metric(http, "trivium:generation_tokens_total")
    made = tuple(sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    assert (after[0] - before[0], after[1] - before[1]) == made
    families = {f.name: f.type for f in text_string_to_metric_families(http.get("/metrics").text)}
    times = {
        "time_to_first_token",
        "inter_token_latency",
        "request_time_per_output_token",
        "request_queue_time",
        "request_prefill_time",
    }
    times |= {"request_decode_time", "e2e_request_latency", "request_inference_time"}
    want = {f"trivium:{name}_seconds": "histogram" for name in times}
    want |= {f"trivium:{name}": "histogram" for name in ("request_prompt_tokens", "request_generation_tokens")}
    want |= {f"trivium:{name}": "histogram" for name in ("request_params_n", "request_params_max_tokens")}
    counts = {
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "request_success",
    }
    counts |= {"spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "engine_steps", "engine_host_seconds"}
    counts |= {"engine_device_seconds", "requests_refused", "engine_draft_seconds", "engine_computed_tokens", "engine_failed_steps"}
    counts |= {"spec_decode_num_failed_drafts", "spec_decode_num_accepted_tokens_per_pos", "kv_tier_faults"}
    counts |= {"prefix_cache_restored_host_tokens", "prefix_cache_restored_disk_tokens"}
    want |= {f"trivium:{name}": "counter" for name in counts}
    gauges = ("num_requests_running", "num_requests_waiting", "num_tokens_waiting", "kv_cache_usage_perc", "kv_cache_free_pages")
    want |= {f"trivium:{name}": "gauge" for name in (*gauges, "cache_config_info")}
    assert {name: kind for name, kind in families.items() if not name.endswith("_created")} == want


def test_o41_gaps_and_time_per_token_are_two_things(http):
    names = ("trivium:inter_token_latency_seconds_count", "trivium:request_time_per_output_token_seconds_count")
    before = [metric(http, name) for name in names]
    answer(http, max_completion_tokens=5)
    answer(http, max_completion_tokens=1)
    assert [metric(http, name) - old for name, old in zip(names, before)] == [4, 1]


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}])
def test_o55_a_finish_reason_of_tool_calls_has_calls(tmp_path, choice):
    import httpx

    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    folder = make_chat_model(tmp_path / "tools", template=template)
    body = {"messages": CHAT["messages"], "tools": [TOOL], "tool_choice": choice, "temperature": 0, "max_completion_tokens": 100}
    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        whole = client.post(CHATS, json=body).json()["choices"][0]
        chunks = events(client.post(CHATS, json={**body, "stream": True}).text)[:-1]
        deltas = [c for chunk in chunks for c in chunk["choices"]]
        pieces = [piece for c in deltas for piece in c["delta"].get("tool_calls", ())]
        reasons = [c["finish_reason"] for c in deltas if c["finish_reason"]]
        forced = choice not in ("auto", "none")
        assert reasons == [whole["finish_reason"]] and (reasons == ["tool_calls"]) == bool(pieces) == forced
        assert ("tool_calls" in whole["message"]) == forced
        if forced:
            [call] = whole["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
            assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
            assert {piece["index"] for piece in pieces} == {0}
            cut = client.post(CHATS, json={**body, "max_completion_tokens": 3}).json()["choices"][0]
            assert cut["finish_reason"] == "length" and "tool_calls" not in cut["message"]


def test_a_bad_body_harms_nobody(http, server, known):
    sent = [b"", b"{", b"[]", b"\xff", b'{"messages": 3}', b"[" * 100_000, b'{"messages": [], "temperature": 1e999}', b'"\\ud800"']
    with beside(http, known):
        for body in sent:
            reply = http.post(CHATS, content=body)
            assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", body
        for cut in (10, 60, 150):
            raw(server, CHAT, cut=cut).close()
        assert http.post("/v1/chat", json=CHAT).status_code == 404
        assert http.get(CHATS).status_code == 405 and http.get(CHATS).headers["allow"] == "POST"


def test_many_clients_leave_and_nothing_is_left(http, server, known):
    free = metric(http, "trivium:kv_cache_free_pages")

    def leave(number):
        sock = raw(server, {**LONG, "stream": number % 2 == 0})
        if number % 3:
            sock.recv(1 << 10)
        sock.close()

    with beside(http, known):
        threads = [threading.Thread(target=leave, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    until(lambda: metric(http, "trivium:num_requests_running") == metric(http, "trivium:num_requests_waiting") == 0, "all end")
    assert metric(http, "trivium:kv_cache_free_pages") == free
