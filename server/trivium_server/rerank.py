"""Similarity of texts: reranking as Jina and Cohere have it, and scores as vLLM has them.

A model that reads query and document together (a cross-encoder) says itself how well they go together; of every other model the
embeddings are compared, so that the answers say as much as they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from trivium import PoolingParams, RequestOutput

from trivium_server.faults import bad
from trivium_server.http import Call, Route
from trivium_server.models import Served
from trivium_server.openai_types import Object, Usage, new_id
from trivium_server.truncation import Truncation, truncated
from trivium_server.work import embedded


_IMAGES = frozenset({"image", "image_url", "images"})
Text = Annotated[str, Meta(min_length=1)]


class _Compared(Struct, kw_only=True):
    """pooling: last, mean or cls; by default as the model was made for. A cross-encoder pools nothing. truncate_prompt_tokens: so
    many of the last tokens of each text are read, special tokens included, or of each pair, whose query stays whole; -1: as many as
    the model can."""

    model: str | None = None
    pooling: Annotated[str, Meta(pattern="^(last|mean|cls)$")] | None = None
    truncate_prompt_tokens: Truncation = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class RerankRequest(_Compared, kw_only=True):
    """documents: texts, or objects with a text. top_n: how many come back; all if it is not given."""

    query: Text
    documents: Annotated[list[Text | Object], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None


class Document(Struct):
    text: str


class Ranked(Struct, kw_only=True, omit_defaults=True):
    """relevance_score: 0 to 1: the score of a cross-encoder, else (1 + cosine) / 2. index: in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Struct, kw_only=True):
    """results: the most relevant first."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]


class ScoreRequest(_Compared, kw_only=True):
    """text_1: one text for all of text_2, or as many."""

    text_1: Text | Annotated[list[Text], Meta(min_length=1)]
    text_2: Text | Annotated[list[Text], Meta(min_length=1)]


class Score(Struct, kw_only=True):
    """score: a cross-encoder's, 0 to 1, else the cosine, -1 to 1."""

    index: int
    score: float
    object: str = "score"


class Scores(Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: str = "list"


class _Found(NamedTuple):
    """Of each pair its score, and how relevant that is, 0 to 1."""

    model: str
    scores: list[float]
    relevance: list[float]
    usage: Usage


async def _compare(call: Call, body: _Compared, ones: Sequence[str], others: Sequence[str]) -> _Found:
    """The pairs of `ones` and `others`; a single one is that of every pair."""
    count = len(ones) + len(others)
    if count > call.app.settings.max_prompts:
        raise bad(f"{count} texts are more than {call.app.settings.max_prompts}")
    served = await call.use(body.model, body)
    judge = _judged if served.llm.cross_encoder else _cosines
    outputs, scores = await judge(call, served, body, ones, others)
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)
    return _Found(served.name, scores, scores if judge is _judged else [(1 + score) / 2 for score in scores], usage)


async def _judged(
    call: Call, served: Served, body: _Compared, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[RequestOutput], list[float]]:
    """By a cross-encoder: the logistic function of the number that it makes of each pair."""
    if body.pooling is not None:
        raise bad("this model reads pairs of texts and makes one number of each: there is nothing to pool", "pooling")
    pairs = list(zip(ones if len(ones) > 1 else [*ones] * len(others), others, strict=True))
    read = await truncated(served, pairs, body.truncate_prompt_tokens)
    outputs = await embedded(served, read, PoolingParams(), call.options(body), call.app.meters)
    numbers: list[Any] = [output.embedding for output in outputs]
    return outputs, [(1 + math.tanh(float(number[0]) / 2)) / 2 for number in numbers]  # which no number is too large for


async def _cosines(
    call: Call, served: Served, body: _Compared, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[RequestOutput], list[float]]:
    pooling = PoolingParams(pooling=body.pooling, normalize=True)
    read = await truncated(served, [*ones, *others], body.truncate_prompt_tokens)
    outputs = await embedded(served, read, pooling, call.options(body), call.app.meters)
    vectors: list[Any] = [output.embedding for output in outputs]
    first = vectors[: len(ones)] if len(ones) > 1 else vectors[:1] * len(others)
    pairs = zip(first, vectors[len(ones) :], strict=True)
    return outputs, [max(-1.0, min(1.0, float(one @ other))) for one, other in pairs]


async def rerank(call: Call, body: RerankRequest) -> Ranking:
    texts = [_text(document, i) for i, document in enumerate(body.documents)]
    name, _, found, usage = await _compare(call, body, [body.query], texts)
    best = sorted(range(len(texts)), key=lambda i: -found[i])[: body.top_n]
    shown = body.return_documents is not False
    results = [Ranked(index=i, relevance_score=found[i], document=Document(texts[i]) if shown else None) for i in best]
    return Ranking(id=new_id("rerank-"), model=name, usage=usage, results=results)


def _text(document: str | Object, i: int) -> str:
    if not isinstance(document, str) and (shown := _IMAGES & document.keys()):
        raise bad(f"documents[{i}] has {min(shown)}: images can't be compared here, texts only", "documents")
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str) or not text:
        raise bad(f"documents[{i}] has no text", "documents")
    return text


async def score(call: Call, body: ScoreRequest) -> Scores:
    ones, others = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
    if len(ones) not in (1, len(others)):
        raise bad(f"text_1 has {len(ones)} texts and text_2 {len(others)}: give one, or as many", "text_1")
    name, found, _, usage = await _compare(call, body, ones, others)
    data = [Score(index=i, score=value) for i, value in enumerate(found)]
    return Scores(id=new_id("score-"), created=int(call.arrival), model=name, data=data, usage=usage)


ROUTES: tuple[Route, ...] = (
    *(
        Route("POST", path, rerank, f"Sort texts by their similarity to a query{told}", RerankRequest, Ranking)
        for path, told in (("/v1/rerank", ""), ("/rerank", " (Jina's path)"), ("/v2/rerank", " (Cohere's path)"))
    ),
    Route("POST", "/v1/score", score, "Similarity of texts", ScoreRequest, Scores),
    Route("POST", "/score", score, "Similarity of texts (vLLM's path)", ScoreRequest, Scores),
)
