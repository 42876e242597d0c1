"""Rerank and score are the cosines of the library's embeddings."""

from __future__ import annotations

import pytest

from trivium import LLM

pytestmark = pytest.mark.http
QUERY, TEXTS = "hello", ["a far other text", "hello", "hell", "help me"]


@pytest.fixture(scope="module")
def cosines(folder):
    with LLM(folder, backend="reference", dtype="float32", progress=False) as llm:
        query, *texts = [output.embedding for output in llm.embed([QUERY, *TEXTS])]
    return [float(query @ text) for text in texts]


def ask(http, path, **body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_most_similar_comes_first(http, cosines, path):
    found = ask(http, path, model="tiny", query=QUERY, documents=[*TEXTS[:3], {"text": TEXTS[3]}])
    want = sorted(range(4), key=lambda i: -cosines[i])
    assert [r["index"] for r in found["results"]] == want and want[0] == 1
    assert [r["relevance_score"] for r in found["results"]] == pytest.approx([(1 + cosines[i]) / 2 for i in want], abs=1e-6)
    assert [r["document"]["text"] for r in found["results"]] == [TEXTS[i] for i in want]
    assert found["usage"]["total_tokens"] > 0 and found["model"] == "tiny"
    few = ask(http, path, query=QUERY, documents=TEXTS, top_n=2, return_documents=False)["results"]
    assert [set(r) for r in few] == [{"index", "relevance_score"}] * 2 and [r["index"] for r in few] == want[:2]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(http, cosines, path):
    def scores(one, other):
        found = ask(http, path, text_1=one, text_2=other)["data"]
        assert [score["index"] for score in found] == list(range(len(found)))
        return [score["score"] for score in found]

    assert scores(QUERY, TEXTS) == pytest.approx(cosines, abs=1e-6)
    assert scores([QUERY] * 4, TEXTS) == pytest.approx(cosines, abs=1e-6)
    assert scores(QUERY, TEXTS[1]) == pytest.approx([1.0])


def test_a_pooling_that_is_asked_for(http, folder):
    from trivium import PoolingParams

    with LLM(folder, backend="reference", dtype="float32", progress=False) as llm:
        one, other = [output.embedding for output in llm.embed(["ab", "cd"], PoolingParams(pooling="mean"))]
    found = ask(http, "/score", text_1="ab", text_2="cd", pooling="mean")["data"][0]["score"]
    assert found == pytest.approx(float(one @ other), abs=1e-6)


def test_what_can_not_be_compared(http):
    for path, body, words in (
        ("/rerank", {"query": QUERY, "documents": []}, "documents"), ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": QUERY, "documents": [{"title": "a"}]}, "documents[0]"),
        ("/rerank", {"query": QUERY, "documents": ["a", {"text": ""}]}, "documents[1]"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"), ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "top_n": 0}, "top_n"), ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": QUERY, "documents": ["a"] * 2048}, "2049"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "c", "pooling": "sum"}, "pooling"),
    ):  # fmt: skip
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert http.post("/rerank", json={"query": "a", "documents": ["b"], "model": "nope"}).status_code == 404
