"""Keys: how they are kept and written, what they open, and how much."""

from __future__ import annotations

import hashlib

import pytest
from http_server import AUTH, CHAT, events, loader, running
from trivium_server import Models, Slot
from trivium_server.app import ROUTES
from trivium_server.faults import Refusal
from trivium_server.keys import SCOPES, Account, Key, Keys, read_keys

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
PAGES = {"style.css", "icon.svg", "common.js", "charts.js", "chat.js", "dashboard.js", "docs.js"}
PUBLIC = {"/", "/health", "/live", "/dashboard", "/docs", *(f"/pages/{name}" for name in PAGES)}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_key_file_has_a_key_a_line():
    digest = hashlib.sha256(b"secret").hexdigest()
    text = f"# people\nplain\n\nsha256:{digest} name=alice scopes=inference,admin requests-per-minute=60 tokens-per-minute=9000"
    plain, alice = read_keys(text + " concurrent-requests=4 priority=-5\n")
    assert plain == Key.of("plain") and plain.scopes == {"inference", "metrics"}
    limits = {"requests_per_minute": 60, "tokens_per_minute": 9000, "concurrent_requests": 4, "priority": -5}
    assert alice == Key.of("secret", scopes=frozenset({"inference", "admin"}), **limits) and alice.name == "alice"
    assert Keys([alice]).find(b"secret").name == "alice" and len({plain.name, Key.of("b").name}) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("k scopes=root", "scopes=root is no option"), ("k scopes=", "scopes= is no"), ("k requests-per-minute=0", "above 0"),
        ("k requests-per-minute=1.5", "above 0"), ("k colour=red", "colour=red"), ("k name=", "name="),
        ("sha256:12", "64 hexadecimal"),
        ("k priority=high", "priority=high"), ("caf\u00e9", "printable ASCII"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_but_not_its_key(line, words):
    with pytest.raises(ValueError, match="line 3: .*" + words) as error:
        read_keys(f"# keys\nfine\nTOPSECRET{line}\n" if line.startswith("k ") else f"\n\n{line}\n")
    assert "TOPSECRET" not in str(error.value)
    with pytest.raises(ValueError, match="two keys are called a"):
        Keys(read_keys("x name=a\ny name=a"))


def refusal(account):
    with pytest.raises(Refusal) as found, account.entered():
        pass
    assert (found.value.status, found.value.code) == (429, "rate_limit_exceeded")
    return found.value.headers


def test_requests_a_minute_come_back_evenly():
    clock = Clock()
    account = Account(Key.of("k", requests_per_minute=3), clock)
    for left in (2, 1, 0):
        with account.entered():
            pass
        assert account.headers()["x-ratelimit-remaining-requests"] == str(left)
    assert account.headers() == {
        "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m0s",
    }  # fmt: skip
    assert refusal(account) == {"retry-after": "20", "retry-after-ms": "20000"}
    clock.now = 19.5
    assert refusal(account)["retry-after"] == "1"
    clock.now = 20.01
    with account.entered():
        pass
    refusal(account)
    clock.now = 1000.0
    assert account.headers()["x-ratelimit-remaining-requests"] == "3" and account.headers()["x-ratelimit-reset-requests"] == "0ms"


def test_tokens_are_taken_at_the_end_and_an_overdraft_is_made_good_first():
    clock = Clock()
    account = Account(Key.of("k", tokens_per_minute=600), clock)
    with account.entered():
        account.charge(900)
    assert refusal(account)["retry-after"] == "31", "300 too many and one more, at 10 a second"
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0" and account.headers()["x-ratelimit-reset-tokens"] == "1m30s"
    clock.now = 30.1
    with account.entered():
        pass


def test_requests_at_a_time():
    account = Account(Key.of("k", concurrent_requests=1, requests_per_minute=60))
    with account.entered():
        assert refusal(account)["retry-after"] == "1"
    with account.entered():
        pass
    assert account.headers()["x-ratelimit-remaining-requests"] == "58", "what is refused is not counted"


@pytest.fixture(scope="module")
def http(folder):
    import httpx

    keys = (
        *(f"{scope} scopes={scope}" for scope in SCOPES), "k1", "few requests-per-minute=2 name=few", "small tokens-per-minute=50",
        "one concurrent-requests=1", "late priority=7",
    )  # fmt: skip
    with running(folder, keys=keys, key_metrics=True) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.app = server.app
        yield client


def call(http, route, key=None):
    headers = {} if key is None else {"x-api-key": key}
    return http.request(route.method, route.path.replace("{", "").replace("}", ""), headers=headers, content=b"{}")


def test_every_route_needs_a_key_but_the_public_ones(http):
    assert {route.path for route in ROUTES if route.public} == PUBLIC and all(r.method == "GET" for r in ROUTES if r.public)
    for route in ROUTES:
        for key in (None, "wrong"):
            reply = call(http, route, key)
            assert (reply.status_code == 401) == (route.path not in PUBLIC), (route, reply.text)
    for path in ("/nothing", "/v1/messages/x", "/api/nothing", "/admin/nothing", "/v1/models/../../health"):
        assert http.get(path).status_code in (401, 200) and (http.get(path).status_code == 401 or path.endswith("health"))


def test_every_route_opens_to_its_scope_alone(http):
    for route in ROUTES:
        for scope in SCOPES:
            reply = call(http, route, scope)
            allowed = route.path in PUBLIC or route.scope in (scope, None)
            assert (reply.status_code == 403) != allowed and reply.status_code != 401, (route, scope, reply.text)
    assert {r.path for r in ROUTES if r.path.startswith("/admin")} == {r.path for r in ROUTES if r.scope == "admin"}
    reply = http.post("/v1/messages", headers={"x-api-key": "metrics"}, content=b"{}")
    assert reply.json()["error"]["type"] == "permission_error" and "inference" in reply.json()["error"]["message"]


def test_an_open_server_is_not_open_to_admin(folder):
    import httpx

    with running(folder, keys=()) as server:
        assert httpx.post(server.url + CHATS, json=CHAT).status_code == 200
        assert httpx.get(server.url + "/admin/splits").status_code == 403


def test_a_client_learns_its_limits(http):
    body, few = {**CHAT, "max_completion_tokens": 1}, {"x-api-key": "few"}
    first = http.post(CHATS, json=body, headers=few)
    assert first.headers["x-ratelimit-limit-requests"] == "2" and first.headers["x-ratelimit-remaining-requests"] == "1"
    assert http.post(CHATS, json=body, headers=few).status_code == 200
    third = http.post(CHATS, json=body, headers=few)
    assert third.status_code == 429 and 1 <= int(third.headers["retry-after"]) <= 30
    assert third.json()["error"] == {**third.json()["error"], "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    other = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 1, "messages": CHAT["messages"]}, headers=few)
    assert other.json()["error"]["type"] == "rate_limit_error"
    assert http.get("/v1/models", headers=few).status_code == 200, "what makes no work is free"
    assert http.post(CHATS, json=body, headers=AUTH).status_code == 200, "another key has its own"
    text = http.get("/metrics", headers=AUTH).text
    assert 'key_requests_total{key="few"} 2.0' in text and 'requests_refused_total{code="rate_limit_exceeded"} 2.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_are_charged(http, stream):
    small = {"x-api-key": "small"}
    account = http.app._account(http.app.settings.keys.find(b"small"))
    account.charge(-10_000)
    reply = http.post(CHATS, json={**CHAT, "max_completion_tokens": 60, "stream": stream}, headers=small)
    assert reply.status_code == 200
    limited = http.post(CHATS, json=CHAT, headers=small)
    assert limited.status_code == 429 and limited.headers["x-ratelimit-remaining-tokens"] == "0"


def test_embeddings_are_charged(http):
    spent = []
    account = http.app._account(http.app.settings.keys.find(b"k1"))
    account.charge = spent.append
    for path, body in (("/v1/embeddings", {"input": "abc"}), ("/api/embed", {"model": "tiny", "input": ["abc", "d"]})):
        assert http.post(path, json=body, headers=AUTH).status_code == 200
    assert spent == [3, 3, 1]
    del account.charge


def test_one_request_at_a_time(http):
    one = {"x-api-key": "one"}
    body = {**CHAT, "max_completion_tokens": 400, "stream": True}
    with http.stream("POST", CHATS, json=body, headers=one) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        assert http.post(CHATS, json=CHAT, headers=one).status_code == 429
        assert events("\n".join([first, *lines]))[-1] == "[DONE]"
    assert http.post(CHATS, json=CHAT, headers=one).status_code == 200


def test_a_key_can_not_be_more_urgent_than_it_may(folder):
    from trivium_server.app import App
    from trivium_server.http import Call

    app = App(Models([Slot("tiny", loader(folder))]))

    def priority(key=None, header=None, field=None):
        body = type("Body", (), {"priority": field})
        headers = {} if header is None else {b"x-priority": header}
        return Call(app, "id", headers, key).options(body).get("priority", 0)

    late = Key.of("late", priority=7)
    assert [priority(), priority(header=b"-3"), priority(header=b"4", field=2), priority(field=-9)] == [0, -3, 2, -9]
    assert [priority(late), priority(late, b"-3"), priority(late, b"9"), priority(late, field=-9)] == [7, 7, 9, 7]
    with pytest.raises(Refusal, match="x-priority must be a number, not 'first'"):
        priority(header=b"first")


def test_names_of_keys_are_in_the_metrics_only_if_asked_for(folder):
    import httpx

    with running(folder) as server:
        httpx.post(server.url + CHATS, json=CHAT, headers=AUTH)
        assert "key_requests" not in httpx.get(server.url + "/metrics", headers=AUTH).text
