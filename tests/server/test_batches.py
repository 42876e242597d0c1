"""Files and batches: what OpenAI's own client does with them, what survives a restart, and what nobody else sees."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from dataclasses import replace

import pytest
from http_server import CHAT, SECRET, SPELL, running
from trivium_server.batch_store import Batch, FileObject, Line, Store
from trivium_server.batches import ENDPOINTS, check
from trivium_server.faults import Refusal, unavailable

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
BODY = {k: v for k, v in CHAT.items() if k != "max_completion_tokens"}


def request(custom_id, url=CHATS, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**(BODY if url == CHATS else {}), **body}}


def lines(*requests):
    return b"".join(json.dumps(r).encode() + b"\n" for r in requests)


def upload(http, data, **fields):
    reply = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch", **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


def begin(http, data, endpoint=CHATS, window="24h"):
    body = {"input_file_id": upload(http, data), "endpoint": endpoint, "completion_window": window}
    reply = http.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


def until(http, id, done):
    """The batch once `done` is true of it."""
    for _ in range(3000):
        batch = http.get(f"/v1/batches/{id}").json()
        if done(batch):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def ended(batch):
    return batch["status"] in ("completed", "failed", "expired", "cancelled")


def content(http, id):
    return [json.loads(line) for line in http.get(f"/v1/files/{id}/content").text.splitlines()]


@contextlib.contextmanager
def client(server, key=SECRET):
    import httpx

    with httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def batched(folder, tmp_path_factory):
    """A client with the key, and one with another."""
    with (
        running(folder, keys=(SECRET, "k2"), batch_dir=tmp_path_factory.mktemp("batches"), max_upload=1 << 20) as server,
        client(server) as http,
        client(server, "k2") as other,
    ):
        yield server, http, other


def test_the_official_client(batched, tmp_path):
    openai = pytest.importorskip("openai")
    server, http, _ = batched
    own = openai.OpenAI(base_url=server.url + "/v1", api_key=SECRET, max_retries=0)
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(request("a", max_tokens=4), request("b", max_tokens=5), request("c", temperature="hot")))
    with path.open("rb") as source:
        given = own.files.create(file=source, purpose="batch")
    assert given.bytes == path.stat().st_size and given.filename == "in.jsonl" and own.files.retrieve(given.id) == given
    assert own.files.content(given.id).read() == path.read_bytes()
    batch = own.batches.create(input_file_id=given.id, endpoint=CHATS, completion_window="24h", metadata={"who": "me"})
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"who": "me"}
    until(http, batch.id, ended)
    batch = own.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.completed_at >= batch.in_progress_at >= batch.created_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    answers = [json.loads(line) for line in own.files.content(batch.output_file_id).text.splitlines()]
    assert [(a["custom_id"], a["error"], a["response"]["status_code"]) for a in answers] == [("a", None, 200), ("b", None, 200)]
    want = http.post(CHATS, json={**BODY, "max_tokens": 5}).json()["choices"]
    assert answers[1]["response"]["body"]["choices"] == want and answers[1]["response"]["request_id"]
    [wrong] = [json.loads(line) for line in own.files.content(batch.error_file_id).text.splitlines()]
    assert wrong["custom_id"] == "c" and wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    assert {batch.id} <= {b.id for b in own.batches.list()} and {given.id} <= {f.id for f in own.files.list(purpose="batch")}
    assert own.files.delete(given.id).deleted
    with pytest.raises(openai.NotFoundError):
        own.files.retrieve(given.id)
    with pytest.raises(openai.BadRequestError, match="can't be cancelled"):
        own.batches.cancel(batch.id)


def test_each_endpoint(batched):
    _, http, _ = batched
    for url, body in (
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3, **SPELL}), ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    ):  # fmt: skip
        http.post(url, json=body)  # so that both find the prompt's prefix
        batch = until(http, begin(http, lines(request("x", url, **body)), url), ended)
        assert batch["status"] == "completed" and batch["error_file_id"] is None, batch
        [answer] = content(http, batch["output_file_id"])
        alone = http.post(url, json=body).json()
        assert answer["response"]["body"].keys() == alone.keys() and answer["response"]["body"]["usage"] == alone["usage"]


def test_another_keys_things_are_not_there(batched):
    _, http, other = batched
    given = upload(http, lines(request("a", max_tokens=1)))
    id = begin(http, lines(request("a", max_tokens=1)))
    made = until(http, id, ended)["output_file_id"]
    for path in (f"/v1/files/{given}", f"/v1/files/{given}/content", f"/v1/files/{made}/content", f"/v1/batches/{id}"):
        assert http.get(path).status_code == 200
        reply = other.get(path)
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    assert other.delete(f"/v1/files/{given}").status_code == 404 and http.get(f"/v1/files/{given}").status_code == 200
    assert other.post(f"/v1/batches/{id}/cancel").status_code == 404
    body = {"input_file_id": given, "endpoint": CHATS, "completion_window": "24h"}
    assert other.post("/v1/batches", json=body).status_code == 404
    assert other.get("/v1/files").json()["data"] == other.get("/v1/batches").json()["data"] == []
    after = other.get("/v1/files", params={"after": given}).json()
    assert after["data"] == [] and after["has_more"] is False


def test_pages_of_a_list(batched):
    _, http, _ = batched
    ids = [upload(http, b"{}\n") for _ in range(3)]
    first = http.get("/v1/files", params={"limit": 2}).json()
    assert [f["id"] for f in first["data"]] == ids[:0:-1] and first["has_more"] and first["last_id"] == ids[1]
    assert http.get("/v1/files", params={"limit": 1, "after": ids[1]}).json()["data"][0]["id"] == ids[0]
    ascending = http.get("/v1/files", params={"order": "asc", "after": ids[0]}).json()
    assert [f["id"] for f in ascending["data"]] == ids[1:] and not ascending["has_more"]
    for params in ({"limit": 0}, {"limit": "x"}, {"order": "up"}):
        reply = http.get("/v1/files", params=params)
        assert reply.status_code == 400 and reply.json()["error"]["param"] in params


def test_what_is_wrong_with_an_input_is_said_by_line(batched):
    _, http, _ = batched
    good = request("a", max_tokens=1)
    data = lines(good) + b"{no json}\n" + lines(good, {**request("b"), "url": "/v1/embeddings"}, {**request("c"), "method": "GET"})
    data += lines({"method": "POST", "url": CHATS, "body": {}}, {**request("d"), "body": [1]})
    batch = until(http, begin(http, data), ended)
    assert batch["status"] == "failed" and batch["failed_at"] and batch["output_file_id"] is batch["error_file_id"] is None
    assert [(e["line"], e["code"], e["param"]) for e in batch["errors"]["data"]] == [
        (2, "invalid_json_line", None), (3, "duplicate_custom_id", "custom_id"), (4, "mismatched_url", "url"),
        (5, "invalid_request", "method"), (6, "invalid_json_line", None), (7, "invalid_request", "body"),
    ]  # fmt: skip
    empty = until(http, begin(http, b"\n\n"), ended)
    assert empty["errors"]["data"][0]["code"] == "empty_file"


def test_limits_of_an_input(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(*(request(str(i)) for i in range(4))) + b"\n")
    found, faults = check(path, CHATS, 4, 1000)
    assert [line.number for line in found] == [1, 2, 3, 4] and not faults
    data = path.read_bytes()
    assert [json.loads(data[line.start : line.start + line.size])["custom_id"] for line in found] == list("0123")
    assert check(path, CHATS, 3, 1000)[1][0].code == "too_many_requests"
    assert [(f.line, f.code) for f in check(path, CHATS, 4, 20)[1]] == [(1, "line_too_long")]
    path.write_bytes(b"x\n" * 1000)
    assert len(check(path, CHATS, 10, 1000)[1]) == 100


def test_forms_that_are_none(batched):
    server, http, _ = batched
    file = {"file": ("x", b"{}")}
    for given, words in (
        ({"files": file}, "purpose"), ({"files": file, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": ("x", b"{}")}, "data": {"purpose": "batch"}}, "file"), ({"json": {"purpose": "batch"}}, "multipart"),
        ({"files": file, "data": {"purpose": "batch" * 1000}}, "longer"), ({"files": [("file", b"{}")] * 2}, "two parts"),
        ({"files": [(f"f{i}", b"") for i in range(20)]}, "parts"),
        ({"files": file, "data": {"purpose": "batch", "expires_after[seconds]": "5"}}, "3600"),
        ({"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "breaks off"),
        ({"content": b"hello", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "not valid"),
    ):  # fmt: skip
        reply = http.post("/v1/files", **given)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert http.post("/v1/files", files={"file": b"x" * (1 << 20)}, data={"purpose": "batch"}).status_code == 413
    kept = {path.name for path in (server.app.settings.batch_dir / "files").iterdir()}
    assert kept == {file["id"] for file in http.get("/v1/files").json()["data"]}


def test_a_files_name_is_no_path(batched):
    _, http, _ = batched
    reply = http.post("/v1/files", files={"file": ("../../etc/passwd", b"{}\n")}, data={"purpose": "batch"})
    found = reply.json()
    assert found["filename"].endswith("passwd") and found["id"].startswith("file-")
    for name in ("../batches.sqlite3", "..%2Fbatches.sqlite3", "%2e%2e/batches.sqlite3", f"{found['id']}/../x"):
        assert http.get(f"/v1/files/{name}/content").status_code == 404


def test_a_file_is_kept_as_long_as_a_batch_needs_it_and_as_its_owner_says(tmp_path):
    store, now = Store(tmp_path), int(time.time())

    def made(expires):
        file = FileObject(id=f"file-{expires}", bytes=1, created_at=now, expires_at=now + expires, filename="", purpose="batch")
        store.path(file.id).write_bytes(b"x")
        return store.add_file("me", file).id

    old, used, young = made(-1), made(5), made(1000)
    batch = Batch(id="batch_1", endpoint=CHATS, input_file_id=used, completion_window="1h", created_at=now, expires_at=now + 9)
    store.add_batch("me", batch, 1, 1)
    with pytest.raises(Refusal, match="under way"):
        store.add_batch("me", batch, 1, 1)
    with pytest.raises(Refusal, match="no file"):
        store.file("me", old)
    with pytest.raises(Refusal, match="input of a batch"):
        store.delete_file("me", used)
    store._db.execute("UPDATE files SET expires = 0 WHERE id = ?", [used])
    store.sweep()
    assert [f.id for f in store.files("me", None, None, 9, True)] == [young] and store.path(used).exists()
    store.fail("me", "batch_1", [])
    store.path("file-left").write_bytes(b"from an upload that broke off")
    store.path(made(900)).unlink()
    store.close()
    store = Store(tmp_path)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [young]
    assert [f.id for f in store.files("me", None, None, 9, True)] == [young]
    store.close()


def test_a_folder_belongs_to_one_server(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_batch_goes_on_after_a_restart_where_it_was(folder, tmp_path):
    data = lines(*(request(f"r{i}", max_tokens=100) for i in range(8)))
    with running(folder, batch_dir=tmp_path, batch_parallel=1) as server, client(server) as http:
        id = begin(http, data)
        until(http, id, lambda batch: batch["request_counts"]["completed"] >= 2)
    store = Store(tmp_path)
    before = [json.loads(line) for line in store._answers(id, "ok = 1")]
    [(owner, left)] = store.under_way()
    assert left == id and store.batch(owner, id).status == "in_progress" and 2 <= len(before) < 8
    assert [line.number for line in store.waiting(id, 0, 100)] == list(range(len(before) + 1, 9))
    store.close()
    with running(folder, batch_dir=tmp_path) as server, client(server) as http:
        batch = until(http, id, ended)
        found = content(http, batch["output_file_id"])
        made = next(line for line in http.get("/metrics").text.splitlines() if line.startswith("trivium:generation_tokens_total"))
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert [answer["custom_id"] for answer in found] == [f"r{i}" for i in range(8)] and found[: len(before)] == before
    assert float(made.split()[-1]) == 100 * (8 - len(before))
    texts = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in found}
    assert len(texts) == 1


def test_cancelling_keeps_what_is_there(folder, tmp_path):
    data = lines(*(request(f"r{i}", max_tokens=100) for i in range(50)))
    with running(folder, batch_dir=tmp_path, batch_parallel=1) as server, client(server) as http:
        id = begin(http, data)
        until(http, id, lambda batch: batch["request_counts"]["completed"] >= 1)
        assert http.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelling"
        batch = until(http, id, ended)
        assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        done, undone = content(http, batch["output_file_id"]), content(http, batch["error_file_id"])
        assert len(done) + len(undone) == 50 and len(done) == batch["request_counts"]["completed"] < 50
        assert {line["error"]["code"] for line in undone} == {"batch_cancelled"} and undone[-1]["response"] is None


def test_a_batch_that_is_cancelled_before_it_begins_answers_nothing(folder, tmp_path, monkeypatch):
    original = Store.begin

    def begun(store, owner, id, lines):
        batch = original(store, owner, id, lines)
        store.cancel(owner, id)  # as a client's call would, before the worker knows that its lines may run
        server.app.batches._cancelled.add(id)
        return batch

    monkeypatch.setattr(Store, "begin", begun)
    with running(folder, batch_dir=tmp_path) as server, client(server) as http:
        batch = until(http, begin(http, lines(request("a"), request("b"))), ended)
        assert batch["status"] == "cancelled" and batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


def test_what_is_not_answered_in_time_is_said(folder, tmp_path):
    data = lines(*(request(f"r{i}", max_tokens=400) for i in range(50)))
    with running(folder, batch_dir=tmp_path, batch_parallel=1) as server, client(server) as http:
        batch = until(http, begin(http, data, window="1s"), ended)
        assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
        assert {line["error"]["code"] for line in content(http, batch["error_file_id"])} == {"batch_expired"}
        for window in ("0s", "31d", "1", "h"):
            body = {"input_file_id": "x", "endpoint": CHATS, "completion_window": window}
            assert http.post("/v1/batches", json=body).json()["error"]["param"] == "completion_window"


def test_batches_wait_for_everybody_else(folder, tmp_path):
    with running(folder, batch_dir=tmp_path, loading={"max_num_seqs": 1}) as server, client(server) as http:
        id = begin(http, lines(*(request(f"r{i}", max_tokens=400) for i in range(20))))
        until(http, id, lambda batch: batch["status"] == "in_progress")
        for _ in range(3):
            assert http.post(CHATS, json=CHAT).status_code == 200
        assert http.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] <= 3
        assert http.post(f"/v1/batches/{id}/cancel").status_code == 200


def test_what_must_wait_keeps_no_other_batch_waiting(folder, tmp_path, monkeypatch):
    """As if the model of /v1/embeddings were not there for now."""
    handler = ENDPOINTS["/v1/embeddings"].handler
    absent = [True]

    async def embed(call, body):
        if absent:
            raise unavailable("not now")
        return await handler(call, body)

    monkeypatch.setitem(ENDPOINTS, "/v1/embeddings", replace(ENDPOINTS["/v1/embeddings"], handler=embed))
    with running(folder, batch_dir=tmp_path, batch_parallel=2) as server, client(server) as http:
        url = "/v1/embeddings"
        waits = begin(http, lines(*(request(f"r{i}", url, input="a") for i in range(9))), url)
        until(http, waits, lambda batch: batch["status"] == "in_progress")
        other = until(http, begin(http, lines(*(request(f"r{i}", max_tokens=1) for i in range(9)))), ended)
        assert other["status"] == "completed" and http.get(f"/v1/batches/{waits}").json()["request_counts"]["completed"] == 0
        absent.clear()
        assert until(http, waits, ended)["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


def test_a_key_that_is_gone_works_no_more(folder, tmp_path):
    with running(folder, batch_dir=tmp_path, batch_parallel=1, keys=("old", SECRET)) as server, client(server, "old") as http:
        id = begin(http, lines(*(request(f"r{i}", max_tokens=400) for i in range(9))))
        until(http, id, lambda batch: batch["status"] == "in_progress")
    with running(folder, batch_dir=tmp_path) as server, client(server) as http:
        assert http.get(f"/v1/batches/{id}").status_code == 404
        while server.app.batches.under_way:
            http.get("/health")
    with running(folder, batch_dir=tmp_path, keys=("old", SECRET)) as server, client(server, "old") as http:
        batch = until(http, id, ended)
        codes = {line["response"]["body"]["error"]["code"] for line in content(http, batch["error_file_id"])}
        assert codes == {"invalid_api_key"}


def test_without_a_folder_the_flag_is_named(http):
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel")):
        reply = http.request(method, path)
        assert reply.status_code == 404 and "--batch-dir" in reply.json()["error"]["message"]
    reply = http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
    assert reply.status_code == 404 and "--batch-dir" in reply.json()["error"]["message"]


def test_answers_are_counted_once(tmp_path):
    store, now = Store(tmp_path), int(time.time())
    file = FileObject(id="file-1", bytes=1, created_at=now, expires_at=now + 9, filename="", purpose="batch")
    store.add_file("me", file)
    batch = Batch(id="batch_1", endpoint=CHATS, input_file_id="file-1", completion_window="1h", created_at=now, expires_at=now + 9)
    store.add_batch("me", batch, 100, 1)
    assert store.begin("me", "batch_1", [Line(1, "a", 0, 1), Line(2, "b", 1, 1)]).status == "in_progress"
    store.answer("me", "batch_1", 2, True, b"{}")
    assert [line.number for line in store.waiting("batch_1", 0, 9)] == [1]
    assert store.begin("me", "batch_1", [Line(1, "a", 0, 1)]).request_counts.total == 2
    store.cancel("me", "batch_1")
    done = store.finish("me", "batch_1", "completed")
    assert done.status == "cancelled" and (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    store.close()
