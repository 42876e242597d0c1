"""Rerank and score by a model that reads pairs: its own numbers, as transformers makes them."""

from __future__ import annotations

import math
from contextlib import closing

import pytest
from encoder_cases import encoder, hidden_of, logits_of
from http_server import AUTH, running
from trivium_server.run import slots

from trivium.errors import NoCacheError

pytestmark = pytest.mark.http
QUERY, TEXTS = "the quick fox", ["Paris is the capital of France.", "the quick brown fox jumps", "dog " * 20, "a"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """(a client, what the oracle makes of each text and the query)."""
    import httpx

    folder = tmp_path_factory.mktemp("judge")
    model, tokenizer = encoder("bert", folder, "ForSequenceClassification", num_labels=1)
    want = [1 / (1 + math.exp(-logits_of(model, tokenizer, QUERY, text).item())) for text in TEXTS]
    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client, want


def test_the_ranking_is_the_model_s_own(judge):
    http, want = judge
    found = http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS}).json()
    order = sorted(range(len(TEXTS)), key=lambda i: -want[i])
    assert [r["index"] for r in found["results"]] == order
    assert [r["relevance_score"] for r in found["results"]] == pytest.approx([want[i] for i in order], abs=1e-4)
    assert found["usage"]["total_tokens"] > len(TEXTS) * 3


@pytest.mark.parametrize("one", [QUERY, [QUERY] * len(TEXTS)])
def test_scores_are_the_model_s_own(judge, one):
    http, want = judge
    found = http.post("/v1/score", json={"text_1": one, "text_2": TEXTS}).json()["data"]
    assert [score["score"] for score in found] == pytest.approx(want, abs=1e-4)


def test_what_a_cross_encoder_does_not_do_is_refused(judge):
    http, _ = judge
    for path, body, words in (
        ("/v1/score", {"text_1": "a", "text_2": "b", "pooling": "mean"}, "pool"), ("/v1/embeddings", {"input": "a"}, "/v1/rerank"),
        ("/v1/completions", {"prompt": "a"}, "makes no tokens"), ("/v1/score", {"text_1": "a", "text_2": "b " * 200}, "130"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "template"),
    ):  # fmt: skip
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    for path, body in (("/api/embed", {"model": "tiny", "input": "a"}), ("/api/embeddings", {"model": "tiny", "prompt": "a"})):
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "/v1/rerank" in reply.json()["error"], reply.text
    assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == []


def test_embeddings_of_an_encoder_over_http(tmp_path):
    import httpx
    import numpy as np

    model, tokenizer = encoder("modernbert", tmp_path)
    with running(tmp_path) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http:
        data = http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
        for row, text in zip(data, TEXTS, strict=True):
            want = hidden_of(model, tokenizer, text).mean(0)
            np.testing.assert_allclose(row["embedding"], want / np.linalg.norm(want), atol=1e-4)
        reply = http.post("/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 400 and "makes no tokens" in reply.json()["error"]["message"]
        assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["embedding"]
        first = http.post("/v1/rerank", json={"query": TEXTS[1], "documents": TEXTS}).json()["results"][0]
        assert first["index"] == 1 and first["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_models_beside_an_encoder_keep_their_cache_options(folder, tmp_path, caplog):
    encoder("bert", tmp_path)
    options = {"backend": "reference", "dtype": "float32", "progress": False, "block_size": 4, "kv_host_bytes": 1 << 16}
    alone = slots([("judge", str(tmp_path))], options)[0]
    with pytest.raises(NoCacheError, match="leave kv_host_bytes out"):
        alone.load()
    chat, judge = (slot.load() for slot in slots([("chat", str(folder)), ("judge", str(tmp_path))], options))
    with closing(chat), closing(judge):
        assert (chat.loaded.kv_spec.page_size, chat.engine.kv.tiers is None) == (4, False)
        assert judge.engine.kv.tiers is None
    said = [record.message for record in caplog.records if record.name == "trivium.server"]
    assert ["kv_host_bytes" in line for line in said] == [True, False] and "block_size" in said[1]
