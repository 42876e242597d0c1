"""truncate_prompt_tokens of texts that are embedded or compared: what is left is what the library makes of the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from chat_models import make_chat_model
from encoder_cases import encoder, hidden_of, logits_of
from http_server import AUTH, running

from trivium import LLM

pytestmark = pytest.mark.http
EMBED, LONG = "/v1/embeddings", "the quick brown fox jumps over the lazy dog"


def ask(http, path, **body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A decoder of 32 positions, and its own embeddings of ids."""
    import httpx

    folder = make_chat_model(tmp_path_factory.mktemp("short"), max_position_embeddings=32)
    with (
        LLM(folder, backend="reference", dtype="float32", progress=False) as llm,
        running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http,
    ):  # fmt: skip
        yield http, lambda ids: llm.embed(ids)[0].embedding, llm.tokenizer


def test_the_last_tokens_are_embedded(short):
    http, vector, tokenizer = short
    ids = tokenizer.encode(LONG)
    for keep, left in ((5, ids[-5:]), (-1, ids[-32:]), (32, ids[-32:]), (None, None)):
        if left is not None:
            found = ask(http, EMBED, input=LONG, truncate_prompt_tokens=keep)
            close(found["data"][0]["embedding"], vector(left))
            assert found["usage"]["prompt_tokens"] == len(left)
            assert ask(http, EMBED, input=ids, truncate_prompt_tokens=keep)["data"] == found["data"]
    assert http.post(EMBED, json={"input": LONG}).status_code == 400
    close(ask(http, EMBED, input="é" * 200_000 + LONG, truncate_prompt_tokens=5)["data"][0]["embedding"], vector(ids[-5:]))
    both = ask(http, EMBED, input=["ab", LONG], truncate_prompt_tokens=3)
    assert both["usage"]["prompt_tokens"] == 2 + 3
    close(both["data"][0]["embedding"], vector(tokenizer.encode("ab")))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_what_is_compared_is_cut_too(short, path):
    http, vector, tokenizer = short
    query, document = (vector(tokenizer.encode(text)[-4:]) for text in ("hello", LONG))
    body = {"query": "hello", "documents": [LONG]} if "rerank" in path else {"text_1": "hello", "text_2": LONG}
    found = ask(http, path, **body, truncate_prompt_tokens=4)
    score = found["results"][0]["relevance_score"] * 2 - 1 if "rerank" in path else found["data"][0]["score"]
    assert score == pytest.approx(float(query @ document), abs=1e-5)
    assert found["usage"]["total_tokens"] == 8
    assert ask(http, path, **body, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 5 + 32


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/score"])
@pytest.mark.parametrize("keep", [0, -2, 33, "5", 2.5])
def test_a_number_that_can_not_be_is_refused_by_its_name(short, path, keep):
    http, _, _ = short
    body = {"input": "a", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b", "truncate_prompt_tokens": keep}
    error = http.post(path, json=body)
    assert error.status_code == 400 and "truncate_prompt_tokens" in str(error.json()["error"]), error.text


def test_an_encoder_keeps_its_special_tokens(tmp_path):
    import httpx

    model, tokenizer = encoder("bert", tmp_path)
    content = tokenizer(LONG, add_special_tokens=False)["input_ids"]
    rest = tokenizer.decode(content[-3:])
    want = hidden_of(model, tokenizer, rest).mean(0)
    with running(tmp_path) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http:
        found = ask(http, EMBED, input=LONG, truncate_prompt_tokens=5)
        assert found["usage"]["prompt_tokens"] == 5
        np.testing.assert_allclose(found["data"][0]["embedding"], want / np.linalg.norm(want), atol=1e-4)
        assert ask(http, EMBED, input="dog " * 400, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 130
        reply = http.post(EMBED, json={"input": LONG, "truncate_prompt_tokens": 2})
        assert reply.status_code == 400 and "no room" in reply.json()["error"]["message"]


def test_a_cross_encoder_s_query_stays_and_its_document_is_cut(tmp_path):
    import httpx

    model, tokenizer = encoder("bert", tmp_path, "ForSequenceClassification", num_labels=1)
    query = "the quick fox"
    used = len(tokenizer(query, "a")["input_ids"]) - len(tokenizer("a", add_special_tokens=False)["input_ids"])
    rest = tokenizer.decode(tokenizer(LONG, add_special_tokens=False)["input_ids"][-4:])
    want = 1 / (1 + math.exp(-logits_of(model, tokenizer, query, rest).item()))
    with running(tmp_path) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as http:
        found = ask(http, "/v1/score", text_1=query, text_2=[LONG, "dog " * 200], truncate_prompt_tokens=used + 4)
        assert found["data"][0]["score"] == pytest.approx(want, abs=1e-4)
        assert found["usage"]["total_tokens"] == 2 * (used + 4)
        ranked = ask(http, "/v1/rerank", query=query, documents=["dog " * 200], truncate_prompt_tokens=-1)
        assert ranked["usage"]["total_tokens"] == 130
        reply = http.post("/v1/score", json={"text_1": query, "text_2": LONG, "truncate_prompt_tokens": used})
        assert reply.status_code == 400 and "beside the query" in reply.json()["error"]["message"]
