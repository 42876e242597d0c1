"""What is no dialect: models, tokens, health, version, metrics, and the document that describes it all."""

from __future__ import annotations

import asyncio
from typing import Any

import trivium
from msgspec import Struct

from trivium_server.dashboard import page
from trivium_server.faults import bad, unavailable
from trivium_server.http import Call, Plain, Route
from trivium_server.models import Slot
from trivium_server.openai_types import Object
from trivium_server.work import template_arguments

_INDEX = page("index.html")


class Model(Struct, kw_only=True):
    """root: the name that is behind an alias. max_model_len: tokens of prompt and output together; null: it was never loaded."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    object: str = "model"


class ModelList(Struct, kw_only=True):
    data: list[Model]
    object: str = "list"


class TokenizeRequest(Struct, kw_only=True):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = None


class Tokens(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Text(Struct, kw_only=True):
    prompt: str


class Version(Struct, kw_only=True):
    version: str


class Health(Struct, kw_only=True):
    status: str


def described(name: str, slot: Slot) -> Model:
    """As /v1/models shows it."""
    length = None if slot.facts is None else slot.facts.max_model_len
    return Model(id=name, created=slot.created, owned_by="trivium", root=slot.name, max_model_len=length)


async def models(call: Call, body: None) -> ModelList:
    return ModelList(data=[described(name, slot) for name, slot in call.app.models.names.items()])


async def model(call: Call, body: None) -> Model:
    return described(call.rest, call.app.models.find(call.rest))


async def tokenize(call: Call, body: TokenizeRequest) -> Tokens:
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either prompt or messages", "prompt")
    served = await call.use(body.model)
    served.check_length(body.prompt or body.messages)
    llm = served.llm
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(llm.tokenizer.encode, body.prompt, add_special_tokens=special)
    else:
        ready = body.add_generation_prompt is not False
        more = template_arguments(body.chat_template_kwargs, tools=body.tools)
        ids = await asyncio.to_thread(llm.encode_chat, body.messages or [], add_generation_prompt=ready, **more)
    names = [llm.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return Tokens(tokens=ids, count=len(ids), max_model_len=served.max_model_len, token_strs=names)


async def detokenize(call: Call, body: DetokenizeRequest) -> Text:
    tokenizer = (await call.use(body.model)).llm.tokenizer
    wrong = [token for token in body.tokens if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise bad(f"token id {wrong[0]} is outside the vocabulary; ids are 0 to {tokenizer.vocab_size - 1}", "tokens")
    return Text(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


async def health(call: Call, body: None) -> Health:
    """Whether requests are taken."""
    if call.app.draining:
        raise unavailable("the server is about to stop")
    if not call.app.models.ready:
        raise unavailable("models are being loaded, or one has stopped, as the log says then")
    return Health(status="ok")


async def live(call: Call, body: None) -> Health:
    """Whether the process answers, draining or not."""
    return Health(status="ok")


async def version(call: Call, body: None) -> Version:
    return Version(version=trivium.__version__)


async def metrics(call: Call, body: None) -> Plain:
    return Plain(await call.app.meters.text(), "text/plain; version=0.0.4; charset=utf-8")


async def root(call: Call, body: None) -> Plain:
    """For browsers a page with the same links."""
    if b"text/html" in call.headers.get(b"accept", b""):
        return _INDEX
    return Plain(b"trivium is running\n/dashboard: how it runs, and a chat\n/docs: the API\n")


async def openapi(call: Call, body: None) -> Any:
    from trivium_server.app import ROUTES
    from trivium_server.openapi import document

    return document(ROUTES)


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/models", models, "List the models", None, ModelList),
    Route("GET", "/v1/models/{model}", model, "Describe a model", None, Model),
    Route("GET", "/openai/v1/models", models, "List the models, where Groq's client looks for them", None, ModelList),
    Route("POST", "/tokenize", tokenize, "Tokens of a text or chat", TokenizeRequest, Tokens),
    Route("POST", "/detokenize", detokenize, "Text of tokens", DetokenizeRequest, Text),
    Route("GET", "/", root, "Say that the server is there", None, "text/plain", public=True, open=True),
    Route("GET", "/health", health, "Whether requests are taken", None, Health, public=True, open=True),
    Route("GET", "/live", live, "Whether the process answers", None, Health, public=True, open=True),
    Route("GET", "/version", version, "The version of trivium", None, Version, open=True, scope=None),
    Route("GET", "/metrics", metrics, "Prometheus metrics", None, "text/plain", open=True, scope="metrics"),
    Route("GET", "/openapi.json", openapi, "This document", None, dict, open=True, scope=None),
)
