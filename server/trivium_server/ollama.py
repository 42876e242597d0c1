"""Ollama: /api/*. Streams are lines of JSON, and durations are nanoseconds."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from typing import Any

import trivium
from msgspec import Struct
from trivium import CompletionOutput, PoolingParams, StructuredOutputs

from trivium_server.faults import bad, ollama_error
from trivium_server.http import Call, Route, Stream, line
from trivium_server.images import data_url
from trivium_server.models import Facts, Served, Slot
from trivium_server.openai_types import Logprobs, Object, chat_logprobs
from trivium_server.structure import json_object, json_schema
from trivium_server.work import Tally, Work, embedded, sampling, template_arguments


class OllamaOptions(Struct, kw_only=True):
    """Ollama's names of sampling parameters. What belongs to how a model is loaded (num_ctx, num_thread, ...) is the operator's."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Common(Struct, kw_only=True):
    """format: "json" or a JSON schema. think: for templates that know enable_thinking. keep_alive: how long the model stays loaded
    after this call, in seconds or as "5m"; below 0: for ever."""

    model: str
    stream: bool | None = None
    format: str | Object | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None

    def made(self, call: Call, served: Served, prompt: Any, more: Mapping[str, Any] | None) -> Work:
        """The work; more: arguments of a chat, None for plain text."""
        options = self.options or OllamaOptions()
        limit = None if options.num_predict is None or options.num_predict < 0 else options.num_predict
        own = {"repetition_penalty": options.repeat_penalty, "structured_outputs": self._structure(), "logprobs": self.alternatives}
        params = sampling(served, options, limit, **own)
        thinking = {"enable_thinking": bool(self.think)} if self.think is not None and more is not None else {}
        both = {**template_arguments(thinking), **call.options(self), **(more or {})}
        return Work(served, [prompt], params, both, chat=more is not None)

    def _structure(self) -> StructuredOutputs | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return json_object()
        if isinstance(self.format, str):
            raise bad(f'format must be "json" or a JSON schema, not {self.format!r:.80}', "format")
        return json_schema(self.format)

    @property
    def alternatives(self) -> int | None:
        """How many a token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChat(_Common, kw_only=True):
    messages: list[Object] = []
    tools: list[Object] | None = None


class OllamaGenerate(_Common, kw_only=True):
    """raw: the text is continued as it is, without the model's chat template."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class OllamaEmbed(Struct, kw_only=True):
    """truncate is not done: what is too long is refused. images: none are possible."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    images: list[Any] | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(Struct, kw_only=True):
    model: str
    prompt: str
    images: list[Any] | None = None
    keep_alive: str | float | None = None


class OllamaShow(Struct, kw_only=True):
    model: str | None = None
    name: str | None = None


def _name(name: str | None) -> str | None:
    return None if name is None else name.removesuffix(":latest")


async def _use(call: Call, body: OllamaChat | OllamaGenerate | OllamaEmbed) -> Served:
    return await call.use(_name(body.model), body, keep=kept(body.keep_alive))


_DURATION = re.compile(r"([+-]?)((?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|0)")
_PART = re.compile(r"([\d.]+)(\D+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def kept(keep_alive: str | float | None) -> float | None:
    """Seconds of a keep_alive: a number, or a duration as Go writes it ("1h30m"); below 0 is math.inf."""
    if isinstance(keep_alive, str):
        if (found := _DURATION.fullmatch(keep_alive)) is None:
            raise bad(f'keep_alive must be seconds, or a duration such as "5m", not {keep_alive!r:.80}', "keep_alive")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
        keep_alive = -seconds if found[1] == "-" else seconds
    return math.inf if keep_alive is not None and keep_alive < 0 else keep_alive


def _now() -> str:
    return _iso(time.time())


def _iso(at: float) -> str:
    """at: Unix seconds."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


_NEVER = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def _figures(tally: Tally, reason: str | None) -> Object:
    """Of the last piece."""
    m = tally.metrics
    whole, prompt, made = (None, None, None) if m is None else (m.e2e_time, m.prefill_time, m.decode_time)
    return {
        "done": True, "done_reason": reason if reason in ("length", "content_filter") else "stop", "total_duration": _ns(whole),
        "load_duration": 0, "prompt_eval_count": tally.prompt_tokens, "prompt_eval_duration": _ns(prompt), "eval_count": tally.made,
        "eval_duration": _ns(made),
    }  # fmt: skip


def _message(message: Mapping[str, Any]) -> Object:
    """A message as the chat template takes it: Ollama's tool calls have no type, and their results only a name; its images stand
    before the text."""
    kept = {key: value for key, value in message.items() if key != "images"}
    if images := message.get("images"):
        kept["content"] = _shown(images, kept.get("content"))
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [{"type": "function", **call} if isinstance(call, Mapping) else call for call in calls]
    return kept


def _shown(images: Any, text: Any) -> list[Object]:
    """Images (base64) and a text as parts."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise bad("images must be a list of images as base64", "images")
    parts = [{"type": "image_url", "image_url": data_url("image/any", image)} for image in images]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def _chat_piece(output: CompletionOutput, calls: list[Object]) -> Object:
    message: Object = {"role": "assistant", "content": output.content}
    if thinking := output.reasoning:
        message["thinking"] = thinking
    return {"message": {**message, "tool_calls": calls} if calls else message}


def _text_piece(output: CompletionOutput, calls: list[Object]) -> Object:
    thinking = {"thinking": output.reasoning} if output.reasoning else {}
    return {"response": output.content, **thinking}


class _Calls:
    """Tool calls of one output, each given out once it is whole, with its arguments as an object."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[str, str]] = {}

    def take(self, output: CompletionOutput) -> list[Object]:
        """Those that are whole now."""
        whole = []
        for call in output.tool_calls if output.events else ():
            name, text = self._parts.get(call.index, ("", ""))
            self._parts[call.index] = name, text = name or call.name, text + call.arguments
            if call.complete:
                whole.append({"function": {"name": name, "arguments": json.loads(text or "{}")}})
        return whole


async def chat(call: Call, body: OllamaChat) -> Object | Stream:
    if not body.messages:
        return await _loaded(call, body, {"message": {"role": "assistant", "content": ""}})
    served = await _use(call, body)
    messages = [_message(message) for message in body.messages]
    return await _answer(call, body, body.made(call, served, messages, {"tools": body.tools}), _chat_piece)


async def generate(call: Call, body: OllamaGenerate) -> Object | Stream:
    for field in ("suffix", "template"):
        if getattr(body, field):
            raise bad(f"{field} is not possible here", field)
    if not body.prompt and not body.images:
        return await _loaded(call, body, {"response": ""})
    served = await _use(call, body)
    if body.raw or served.llm.tokenizer.chat_template is None:
        if body.images:
            raise bad("images need the model's chat template; leave out raw", "images")
        return await _answer(call, body, body.made(call, served, body.prompt, None), _text_piece)
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    messages = [*system, {"role": "user", "content": _shown(body.images, body.prompt) if body.images else body.prompt}]
    return await _answer(call, body, body.made(call, served, messages, {}), _text_piece)


async def _loaded(call: Call, body: OllamaChat | OllamaGenerate, empty: Object) -> Object:
    """The answer to an empty prompt, by which clients ask that a model be loaded, or with keep_alive 0 that it be unloaded."""
    slot, reason = call.app.models.find(_name(body.model)), "unload" if kept(body.keep_alive) == 0 else "load"
    if reason == "load" or slot.llm is not None:
        await _use(call, body)
    return {"model": slot.name, "created_at": _now(), **empty, "done": True, "done_reason": reason}


async def _answer(call: Call, body: _Common, work: Work, piece: Any) -> Object | Stream:
    if body.stream is not False:
        return Stream(_lines(call, body, work, piece), line, b"", "application/x-ndjson", b"")
    [output] = await call.app.moderation.whole(call, work)
    tally = Tally()
    tally.add(0, output)
    one = output.outputs[0]
    shown = {**piece(one, _Calls().take(one)), **_logprobs(one, body)}
    return {"model": work.served.name, "created_at": _now(), **shown, **_figures(tally, one.finish_reason)}


def _logprobs(output: CompletionOutput, body: _Common) -> Object:
    found = chat_logprobs(output.logprobs, body.alternatives or 0, None)
    return {} if found is None else {"logprobs": found["content"]}


async def _lines(call: Call, body: _Common, work: Work, piece: Any) -> AsyncGenerator[Object, None]:
    tally, calls, reason = Tally(), _Calls(), None
    head = {"model": work.served.name}
    empty = CompletionOutput(0, "", [], None)
    async with contextlib.aclosing(call.app.moderation.stream(call, work)) as news:
        async for number, output in news:
            tally.add(number, output)
            if not output.outputs and not output.finished:
                yield {**head, "created_at": _now(), **piece(empty, []), "done": False}
            for one in output.outputs:
                whole, reason = calls.take(one), one.finish_reason
                if one.content or one.reasoning or whole or one.logprobs:
                    yield {**head, "created_at": _now(), **piece(one, whole), **_logprobs(one, body), "done": False}
    yield {**head, "created_at": _now(), **piece(empty, []), **_figures(tally, reason)}


async def embed(call: Call, body: OllamaEmbed) -> Object:
    began = time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts or "" in texts:
        raise bad("input must not be empty", "input")
    if body.images:
        raise bad("images can't be embedded here, texts only; leave images out", "images")
    served = await _use(call, body)
    served.check_embeds()
    for text in texts:
        served.check_length(text)
    outputs = await embedded(served, texts, PoolingParams(dimensions=body.dimensions), call.options(body), call.app.meters)
    vectors = [[float(x) for x in output.embedding] for output in outputs if output.embedding is not None]
    count = sum(len(output.prompt_token_ids) for output in outputs)
    spent = _ns(time.perf_counter() - began)
    return {"model": served.name, "embeddings": vectors, "total_duration": spent, "load_duration": 0, "prompt_eval_count": count}


async def old_embed(call: Call, body: OllamaEmbeddings) -> Object:
    found = await embed(call, OllamaEmbed(model=body.model, input=body.prompt, keep_alive=body.keep_alive, images=body.images))
    return {"embedding": found["embeddings"][0]}


def _details(facts: Facts | None) -> Object:
    """Of a model that was never loaded little is known."""
    family = "" if facts is None else facts.architecture
    unknown = {"parameter_size": "", "quantization_level": "", "parent_model": ""}
    return {"format": "trivium", "family": family, "families": [family], **unknown}


def _listed(name: str, slot: Slot) -> Object:
    size = 0 if slot.facts is None else slot.facts.size
    at = _iso(slot.created)
    return {"name": name, "model": name, "modified_at": at, "size": size, "digest": "", "details": _details(slot.facts)}


async def tags(call: Call, body: None) -> Object:
    return {"models": [_listed(name, slot) for name, slot in call.app.models.names.items()]}


async def ps(call: Call, body: None) -> Object:
    models = call.app.models
    loaded = [(slot, slot.facts) for slot in models if slot.llm is not None and slot.facts is not None]
    times = {slot.name: min(time.time() + models.expires(slot), _NEVER) for slot, _ in loaded}
    return {
        "models": [
            {**_listed(slot.name, slot), "expires_at": _iso(times[slot.name]), "size_vram": facts.size,
             "context_length": facts.max_model_len}
            for slot, facts in loaded
        ]
    }  # fmt: skip


async def show(call: Call, body: OllamaShow) -> Object:
    name = _name(body.model or body.name)
    slot = call.app.models.find(name)
    facts = slot.facts or Facts.of((await call.use(name)).llm)
    template, length = facts.chat_template or "", facts.max_model_len
    signs = {"tools": ("tools",), "thinking": ("enable_thinking", "<think>", "reasoning_content")}
    can = [
        *(["completion"] if facts.generates else ["embedding"] if facts.embeds else []),
        *(["vision"] if facts.images else []),
        *(name for name, words in signs.items() if any(word in template for word in words)),
    ]
    info = dict.fromkeys(("general.context_length", f"{facts.architecture}.context_length"), length)
    return {
        "modified_at": _iso(slot.created), "details": _details(facts), "capabilities": can, "template": template,
        "model_info": {"general.architecture": facts.architecture, **info}, "parameters": _parameters(facts),
        "modelfile": f"FROM {slot.name}\n",
    }  # fmt: skip


def _parameters(facts: Facts) -> str:
    """The defaults of requests as lines of a Modelfile."""
    ours = {"repeat_penalty": "repetition_penalty"}
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    return "\n".join(f"{name:<30} {getattr(facts.defaults, ours.get(name, name))}" for name in names)


async def version(call: Call, body: None) -> Object:
    return {"version": trivium.__version__}


ROUTES: tuple[Route, ...] = (
    Route("POST", "/api/chat", chat, "Answer a chat (Ollama)", OllamaChat, dict, ollama_error),
    Route("POST", "/api/generate", generate, "Answer or continue a text (Ollama)", OllamaGenerate, dict, ollama_error),
    Route("POST", "/api/embed", embed, "Embed texts (Ollama)", OllamaEmbed, dict, ollama_error),
    Route("POST", "/api/embeddings", old_embed, "Embed a text (Ollama, older)", OllamaEmbeddings, dict, ollama_error),
    Route("GET", "/api/tags", tags, "List the models (Ollama)", None, dict, ollama_error),
    Route("GET", "/api/ps", ps, "List the loaded models (Ollama)", None, dict, ollama_error),
    Route("POST", "/api/show", show, "Describe a model (Ollama)", OllamaShow, dict, ollama_error),
    Route("GET", "/api/version", version, "The version of trivium (Ollama)", None, dict, ollama_error),
)
