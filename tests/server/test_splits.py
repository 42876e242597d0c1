"""Several versions behind one name: who gets which, and how that changes while the server runs."""

from __future__ import annotations

from collections import Counter

import pytest
from chat_models import make_chat_model
from http_server import CHAT, events, loader, running
from trivium import errors
from trivium_server import Models, Slot
from trivium_server.splits import Split

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer boss"}
USER = {"authorization": "Bearer user"}
NINETY = Split("chat", {"v1": 90, "v2": 10})


def two(*splits):
    return Models([Slot(name, lambda: None) for name in ("v1", "v2")], [("old", "v1")], splits)


def chosen(models, sessions):
    return Counter(models.choose("chat", session)[1].name for session in sessions)


def test_calls_without_a_session_are_divided_exactly_whatever_their_number():
    for first in (0, 10, 33, 50, 99, 100):
        models, sent = two(Split("chat", {"v1": first, "v2": 100 - first})), 0
        for number in range(1, 1001):
            sent += models.choose("chat", "")[1].name == "v1"
            assert abs(sent - number * first / 100) <= 3
        assert abs(sent - 10 * first) <= 1


def test_sessions_are_divided_by_their_hash():
    found = chosen(two(NINETY), (f"user {i}" for i in range(10_000)))
    assert abs(found["v2"] - 1000) < 100 and found.total() == 10_000


def test_a_session_keeps_its_version_and_moves_only_where_a_share_grows():
    sessions = [f"user {i}" for i in range(2000)]

    def second(share):
        models = two(Split("chat", {"v1": 100 - share, "v2": share}))
        return {s for s in sessions if models.choose("chat", s)[1].name == "v2"}

    few, more = second(10), second(40)
    assert few == second(10) and few < more and second(0) == set() and second(100) == set(sessions)


def test_other_names_are_not_divided():
    models = two(NINETY)
    assert {models.choose("v2", str(i)) for i in range(50)} == {("v2", models.find("v2"))}
    assert models.choose(None, "")[0] == models.choose("old", "")[0] == "v1" and models.choose("chat", "")[0] == "chat"
    assert list(models.names) == ["v1", "v2", "old", "chat"] and models.find("chat").name == "v1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat=v1:90,v2:20", "100 together, not 110"), ("chat=v1:110,v2:-10", "not -10"), ("chat=v1:nan,v2:10", "not nan"),
        ("chat", "NAME=MODEL:WEIGHT"), ("chat=", "NAME=MODEL:WEIGHT"), ("chat=v1:ninety", "NAME=MODEL:WEIGHT"),
        ("=v1:100", "needs a name"),
        ("chat=v1:50,v1:100", "twice"), ("chat=v1:90,v3:10", "no model 'v3'"), ("v1=v2:100", "is the name of a model"),
        ("old=v2:100", "is the name of a model"),
    ],
)  # fmt: skip
def test_what_is_no_split_is_refused(text, words):
    with pytest.raises((errors.InvalidRequestError, errors.ModelNotFoundError), match=words):
        two(Split.parse(text))


def test_splits_are_written_as_a_flag():
    assert Split.parse("chat=v1:90,llama:8b:9.5,c:0.5") == Split("chat", {"v1": 90, "llama:8b": 9.5, "c": 0.5})
    want = Split.parse("chat=v1:90,v2:10"), Split.parse("b=v2:100")
    for texts in (["chat=v1:90,v2:10", "b=v2:100"], ["chat=v1:90", "v2:10", "b=v2:100"], ["chat=v1:90,v2:10,b=v2:100"]):
        assert Split.parse_all(texts) == want
    assert Split.parse_all([]) == ()


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    import httpx

    folders = {name: make_chat_model(tmp_path_factory.mktemp("split") / name) for name in ("v1", "v2")}
    models = Models([Slot(name, loader(folder)) for name, folder in folders.items()], [], [NINETY])
    keys = ("boss scopes=admin", "user scopes=inference", "prom scopes=metrics")
    with running(None, models=models, keys=keys) as server, httpx.Client(base_url=server.url, headers=USER, timeout=60) as client:
        yield client


def share(http, first):
    reply = http.post("/admin/splits", headers=ADMIN, json={"name": "chat", "weights": {"v1": first, "v2": 100 - first}})
    assert reply.status_code == 200, reply.text


def test_the_answer_says_which_version_made_it(http):
    share(http, 90)
    body = {**CHAT, "model": "chat", "max_completion_tokens": 1}
    replies = [http.post(CHATS, json=body) for _ in range(20)]
    found = Counter(r.headers["x-model-version"] for r in replies)
    assert found.total() == 20 and 1 <= found["v2"] <= 3
    assert {r.json()["model"] for r in replies} == {"chat"}
    text = http.get("/metrics", headers={"authorization": "Bearer prom"}).text
    for version, number in found.items():
        assert f'request_success_total{{finished_reason="length",model_name="chat",version="{version}"}} {number}.0' in text
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["v1", "v2", "chat"]
    assert http.post(CHATS, json={**body, "model": "v2"}).headers["x-model-version"] == "v2"


def test_sessions_stick_in_every_dialect(http):
    share(http, 50)

    def asked(path, headers=None, **fields):
        body = {"model": "chat", "messages": CHAT["messages"], "max_tokens": 1, "options": {"num_predict": 1}, **fields}
        reply = http.post(path, json={**body, "stream": False}, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.headers["x-model-version"]

    for session in ("s1", "s2", "s3", "s4"):
        want = NINETY.point(session) >= 0.5
        for path in (CHATS, "/v1/messages", "/api/chat"):
            assert asked(path, {"x-session-id": session}) == ("v2" if want else "v1")
        same = [asked(CHATS, user=session), asked("/v1/messages", metadata={"user_id": session})]
        same += [asked("/v1/completions", cache_salt=session, prompt="a")]
        assert set(same) == {"v2" if want else "v1"}
    assert {NINETY.point(s) >= 0.5 for s in ("s1", "s2", "s3", "s4")} == {True, False}


def test_switching_lets_streams_end_on_their_version(http):
    share(http, 100)
    body = {**CHAT, "model": "chat", "max_completion_tokens": 300, "stream": True}
    with http.stream("POST", CHATS, json=body) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        share(http, 0)
        later = http.post(CHATS, json={**CHAT, "model": "chat"})
        assert (reply.headers["x-model-version"], later.headers["x-model-version"]) == ("v1", "v2")
        chunks = events("\n".join([first, *lines]))
    text = "".join(c["delta"].get("content") or "" for chunk in chunks[:-1] for c in chunk["choices"])
    assert chunks[-1] == "[DONE]" and len(text) == 300


def test_the_admin_routes(http):
    share(http, 90)
    assert http.get("/admin/splits", headers=ADMIN).json() == {"data": [{"name": "chat", "weights": {"v1": 90, "v2": 10}}]}
    for weights in ({"v1": 90}, {"v1": -1, "v2": 101}, {}, {"v1": "x"}):
        reply = http.post("/admin/splits", headers=ADMIN, json={"name": "chat", "weights": weights})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "weights"), reply.text
    assert http.post("/admin/splits", headers=ADMIN, json={"name": "chat", "weights": {"v9": 100}}).status_code == 404
    assert http.post("/admin/splits", headers=ADMIN, json={"name": "v1", "weights": {"v2": 100}}).status_code == 400
    assert http.get("/admin/splits", headers=ADMIN).json()["data"][0]["weights"] == {"v1": 90, "v2": 10}, "nothing has changed"
    assert http.delete("/admin/splits/chat", headers=ADMIN).json() == {"data": []}
    assert http.delete("/admin/splits/chat", headers=ADMIN).status_code == 404
    assert http.post(CHATS, json={**CHAT, "model": "chat"}).status_code == 404
    share(http, 90)
    assert http.post("/admin/unload", headers=ADMIN, json={"model": "v2"}).json() == {"loaded": ["v1"]}
    assert http.post("/admin/load", headers=ADMIN, json={"model": "v2"}).json() == {"loaded": ["v1", "v2"]}
