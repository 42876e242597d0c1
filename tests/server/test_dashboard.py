"""The dashboard's data: the same readings as /metrics, no words of anybody, and pages that load nothing from elsewhere."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from http_server import AUTH, CHAT, running
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.http
DATA = "/dashboard/data/5"
PAGES = {
    "/": "text/html",
    "/dashboard": "text/html",
    "/docs": "text/html",
    "/pages/style.css": "text/css",
    "/pages/icon.svg": "image/svg+xml",
}


@pytest.fixture
def fresh(folder):
    """A client of a server that nobody has asked anything."""
    import httpx

    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client


def samples(http):
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_it_says_what_metrics_says(fresh):
    for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "max_completion_tokens": 1}):
        assert fresh.post("/v1/chat/completions", json=body).status_code == 200
    assert fresh.post("/v1/embeddings", json={"input": ["abc", "d"]}).status_code == 200
    found, metrics = fresh.get(DATA).json(), samples(fresh)
    assert found["requests_ended"] == len(found["requests"]) == 5
    fields = {
        "time_to_first_token": "time_to_first_token_seconds", "inter_token_latency": "inter_token_latency_seconds",
        "time_per_output_token": "request_time_per_output_token_seconds", "queue_time": "request_queue_time_seconds",
        "prefill_time": "request_prefill_time_seconds", "decode_time": "request_decode_time_seconds",
        "e2e_time": "e2e_request_latency_seconds",
    }  # fmt: skip
    assert found["latency"].keys() == fields.keys()
    for field, name in fields.items():
        assert found["latency"][field]["count"] == metrics[f"trivium:{name}_count"][0].value, field
    for field, name in (("total", "e2e_request_latency"), ("queue", "request_queue_time"), ("prefill", "request_prefill_time")):
        total = sum(one[field] for one in found["requests"])
        assert total == pytest.approx(metrics[f"trivium:{name}_seconds_sum"][0].value)
    made = sum(one["generated_tokens"] for one in found["requests"])
    assert made == metrics["trivium:generation_tokens_total"][0].value == 49
    assert {one["operation"] for one in found["requests"]} == {"chat", "embeddings"}


def test_a_waterfall_adds_up_and_tells_no_words(http):
    secret = "the owl flies at noon"
    body = {**CHAT, "messages": [{"role": "user", "content": secret}], "include_metrics": True}
    answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "my-own-id"}).json()
    reply = http.get(DATA)
    shown = reply.json()["requests"][0]
    times = answer["metrics"]
    assert shown["queue"] + shown["prefill"] == pytest.approx(shown["first_token"])
    assert shown["first_token"] + shown["decode"] <= shown["total"]
    assert shown["total"] == pytest.approx(times["e2e_time_ms"] / 1e3, abs=1e-6)
    assert shown["tokens_per_second"] == times["tokens_per_second"]
    assert (shown["prompt_tokens"], shown["generated_tokens"]) == (answer["usage"]["prompt_tokens"], 24)
    assert abs(shown["began"] + shown["total"] - reply.json()["now"]) < 60
    for word in (secret, answer["choices"][0]["message"]["content"], "my-own-id"):
        assert word not in reply.text


def test_the_window_and_the_model_are_chosen_by_the_path(http):
    series = http.get("/dashboard/data/15/tiny").json()["series"]
    assert {len(curve) for name, curve in series.items() if isinstance(curve, list)} == {90}
    assert http.get("/dashboard/data/1/other").status_code == 200
    for path in ("0", "16", "-1", "x", "1e0", "5/nobody", "5/"):
        assert http.get(f"/dashboard/data/{path}").status_code == 404, path


def test_models_say_where_they_run(http, server):
    [card] = http.get(DATA).json()["models"]
    loaded = server.llm.loaded
    assert (card["name"], card["ready"], card["backend"]) == ("tiny", True, "reference")
    assert sum(way["tensors"] for way in card["weights"]) == len(loaded.routes)
    assert sum(way["bytes"] for way in card["weights"]) == sum(route.nbytes for route in loaded.routes)
    assert card["pages"] == loaded.num_pages and card["kv_memory"] == loaded.session.memory().kv > 0


def test_a_model_that_has_stopped_is_not_ready(folder):
    import httpx

    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        assert client.get(DATA).json()["models"][0]["ready"]
        server.llm.async_engine.close()
        assert not client.get(DATA).json()["models"][0]["ready"]


@pytest.mark.parametrize(("path", "media"), PAGES.items())
def test_pages_are_public_and_may_load_nothing_but_their_like(server, path, media):
    import httpx

    reply = httpx.get(server.url + path, headers={"accept": "text/html,*/*"})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith(media)
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and set(policy.values()) == {"'none'", "'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_root_is_a_page_for_browsers_and_words_for_others(server):
    import httpx

    words = httpx.get(server.url + "/")
    assert words.text.startswith("trivium is running\n") and words.headers["content-type"].startswith("text/plain")
    page = httpx.get(server.url + "/", headers={"accept": "text/html"}).text
    assert [link for link in ("dashboard", "docs") if f'href="{link}"' not in page or f"/{link}" not in words.text] == []


def test_pages_name_no_other_host_and_have_nothing_inline():
    for file in (files("trivium_server") / "pages").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//\w|@import|url\(|\beval\b|innerHTML|localStorage|document\.cookie",
            re.sub(r"^\s*//.*", "", text, flags=re.M),
        ), file.name
        assert not re.search(r"\sstyle=|\son\w+=|<script>|<style", text), file.name


def test_the_figures_are_those_that_openapi_describes(http):
    jsonschema = pytest.importorskip("jsonschema")
    document = http.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/DashboardData", "components": document["components"]}
    http.post("/v1/chat/completions", json=CHAT)
    jsonschema.validate(json.loads(http.get(DATA).text), schema)
