"""/metrics: every name that dashboards and gateways look for, and figures that agree with what each answer says of itself."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from http_server import AUTH, CHAT, SPELL, events, running
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.http
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens",
}  # fmt: skip
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}
COUNTERS = {
    "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success", "num_preemptions",
    "requests_refused", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip
"""By vLLM's names, without the prefix and _total."""


@pytest.fixture
def fresh(folder):
    """A client of a server that nobody has asked anything."""
    import httpx

    with running(folder, vllm_metrics=True) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        client.loaded = server.llm.loaded
        yield client


def families(http):
    found = list(text_string_to_metric_families(http.get("/metrics").text))
    names = Counter(family.name for family in found)
    assert max(names.values()) == 1, "a family stands there twice"
    return {family.name: family for family in found}


def value(found, name, **labels):
    family = re.sub(r"_(sum|count|total|bucket)$", "", name)
    return sum(s.value for s in found[family].samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.parametrize("prefix", ["trivium", "vllm"])
def test_the_names_that_others_look_for_are_there(fresh, prefix):
    found = families(fresh)
    for names, kind in ((HISTOGRAMS, "histogram"), (GAUGES, "gauge"), (COUNTERS, "counter")):
        assert {name: found[f"{prefix}:{name}"].type for name in names} == dict.fromkeys(names, kind)


def test_every_metric_has_words_a_model_and_buckets_that_fit(fresh):
    fresh.post(CHATS, json=CHAT)
    for name, family in families(fresh).items():
        assert family.documentation[0].isupper() and len(family.documentation) > 10, name
        if not name.endswith("requests_refused"):  # of calls: which model they meant may not be known
            assert {s.labels.get("model_name") for s in family.samples} <= {"tiny"}, name
        if family.type == "histogram":
            limits = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            assert limits == sorted(limits) and limits[-1] == float("inf") and len(limits) >= 6, name


@pytest.mark.parametrize("streams", [False, True])
def test_histograms_are_the_sum_of_what_the_answers_say(fresh, streams):
    told = []
    for tokens in (1, 2, 9, 24):
        reply = fresh.post(CHATS, json={**CHAT, "max_completion_tokens": tokens, "include_metrics": True, "stream": streams})
        told.append((tokens, (events(reply.text)[-2] if streams else reply.json())["metrics"]))
    found = families(fresh)
    for name, field in (
        ("time_to_first_token", "time_to_first_token_ms"), ("e2e_request_latency", "e2e_time_ms"),
        ("request_queue_time", "queue_time_ms"), ("request_prefill_time", "prefill_time_ms"),
        ("request_decode_time", "generation_time_ms"), ("request_time_per_output_token", "time_per_output_token_ms"),
    ):  # fmt: skip
        each = [metrics[field] / 1e3 for _, metrics in told if metrics.get(field) is not None]
        assert value(found, f"trivium:{name}_seconds_count") == len(each), name
        assert value(found, f"trivium:{name}_seconds_sum") == pytest.approx(sum(each), abs=1e-5), name
    gaps = sum(tokens - 1 for tokens, _ in told)
    assert value(found, "trivium:inter_token_latency_seconds_count") == gaps == 32
    sums = sum(metrics.get("mean_itl_ms", 0) * (tokens - 1) for tokens, metrics in told)
    assert value(found, "trivium:inter_token_latency_seconds_sum") == pytest.approx(sums / 1e3, abs=1e-4)
    ran = sum(m["time_to_first_token_ms"] - m["queue_time_ms"] + m["generation_time_ms"] for _, m in told)
    assert value(found, "trivium:request_inference_time_seconds_sum") == pytest.approx(ran / 1e3, abs=1e-5)
    assert value(found, "trivium:request_generation_tokens_sum") == value(found, "trivium:generation_tokens_total") == 36
    for tokens, metrics in told:
        if tokens > 1:
            rate = (tokens - 1) / metrics["generation_time_ms"] * 1e3
            assert metrics["tokens_per_second"] == pytest.approx(rate, rel=1e-2)


@pytest.mark.parametrize("streams", [False, True])
def test_each_output_counts_once_by_how_it_ended(fresh, streams):
    body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 20, **SPELL, "temperature": 1, "seed": 4, "stop": ["e", "t"]}
    reply = fresh.post(TEXTS, json={**body, "stream": streams})
    chunks = events(reply.text)[:-1] if streams else [reply.json()]
    reasons = Counter(c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"])
    assert sum(reasons.values()) == 6 and reasons["stop"] > 1
    found = families(fresh)
    for reason in ("stop", "length", "tool_calls", "abort", "error"):
        assert value(found, "trivium:request_success_total", finished_reason=reason) == reasons.get(reason, 0), reason


@pytest.mark.parametrize("streams", [False, True])
def test_what_its_deadline_ends_counts_as_aborted(fresh, streams):
    fresh.post(CHATS, json={**CHAT, "max_completion_tokens": 480, "timeout": 0.02, "stream": streams})
    found = families(fresh)
    assert value(found, "trivium:request_success_total", finished_reason="abort") == 1
    assert value(found, "trivium:requests_refused_total", code="deadline_exceeded") == 1


def test_what_requests_ask_for_is_counted(fresh):
    fresh.post(TEXTS, json={"prompt": "ab", "n": 2, "max_tokens": 3, **SPELL})
    fresh.post("/v1/embeddings", json={"input": "abc"})
    found = families(fresh)
    assert [value(found, f"trivium:request_params_{name}_sum") for name in ("n", "max_tokens")] == [2, 3]
    assert value(found, "trivium:request_params_n_count") == 1 and value(found, "trivium:request_prompt_tokens_count") == 2


def test_the_cache_is_described_as_gateways_read_it(fresh):
    [sample] = families(fresh)["vllm:cache_config_info"].samples
    loaded = fresh.loaded
    assert sample.value == 1 and sample.labels == {
        "model_name": "tiny", "version": "tiny", "block_size": str(loaded.kv_spec.page_size),
        "num_gpu_blocks": str(loaded.num_pages), "cache_dtype": loaded.kv_spec.dtype, "enable_prefix_caching": "True",
    }  # fmt: skip


def test_every_rate_says_what_it_is_divided_by(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = [(name, field) for name, schema in schemas.items() for field in schema.get("properties", {})]
    rates = {pair for pair in fields if re.search("per_second|rate$", pair[1])}
    assert {("Timing", "tokens_per_second"), ("Series", "decode_tokens_per_second")} <= rates
    for name, field in rates:
        words = re.search(rf"{field}: ([^:]*)", json.dumps(schemas[name]["description"]))
        assert words and re.search(r"\b(by|share|of)\b", words[1]), (name, field)
