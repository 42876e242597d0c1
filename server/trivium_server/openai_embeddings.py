"""OpenAI: /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from msgspec import Meta, Struct
from trivium import PoolingParams

from trivium_server.faults import bad
from trivium_server.http import Call, Route
from trivium_server.openai_completions import prompts_of
from trivium_server.openai_types import Usage
from trivium_server.truncation import Truncation, truncated
from trivium_server.work import embedded


class EmbeddingRequest(Struct, kw_only=True):
    """input: as a completion's prompt. pooling: last, mean or cls; normalize: to length 1; by default both as the model was made
    for. truncate_prompt_tokens: so many of the last tokens of each are read, special tokens included; -1: as many as the model can;
    without it, what is too long is refused."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Annotated[str, Meta(pattern="^(float|base64)$")] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Truncation = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class Embedding(Struct, kw_only=True):
    """embedding: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(Struct, kw_only=True):
    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"


def encoded(vector: Any, form: str | None) -> list[float] | str:
    """float32[dimensions] as the client wants it."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


async def embed(call: Call, body: EmbeddingRequest) -> Embeddings:
    prompts = prompts_of(body.input, "input")
    if len(prompts) > call.app.settings.max_prompts:
        raise bad(f"{len(prompts)} inputs are more than {call.app.settings.max_prompts}", "input")
    if any(len(prompt) == 0 for prompt in prompts):
        raise bad("input must not be empty", "input")
    given = {"pooling": body.pooling, "normalize": body.normalize, "dimensions": body.dimensions}
    pooling = PoolingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    served = await call.use(body.model, body)
    served.check_embeds()
    read = await truncated(served, prompts, body.truncate_prompt_tokens)
    outputs = await embedded(served, read, pooling, call.options(body), call.app.meters)
    data = [Embedding(index=i, embedding=encoded(o.embedding, body.encoding_format)) for i, o in enumerate(outputs)]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Embeddings(data=data, model=served.name, usage=Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens))


ROUTES: tuple[Route, ...] = (Route("POST", "/v1/embeddings", embed, "Embed texts", EmbeddingRequest, Embeddings),)
