"""What OpenAI's endpoints share: fields of requests, usage, times, logprobs."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from trivium import Metrics, StructuredOutputs

from trivium_server.faults import bad
from trivium_server.structure import json_object, json_schema
from trivium_server.work import Tally

Object = dict[str, Any]
MAX_STOPS, MAX_WORDS = 64, 1024
"""Of one request: each is looked for after every token."""
_LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""


Logprobs = Annotated[int, Meta(ge=0, le=20)]
"""Alternatives a token. All that there are would be a vocabulary for each token, in memory and on the wire."""


class StreamOptions(Struct, kw_only=True):
    """include_usage: a last chunk says how many tokens there were. continuous_usage_stats: so does every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(Struct, kw_only=True):
    """A schema that the answer satisfies; name, description and strict change nothing: it is always kept to."""

    schema: Object | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """type: text, json_object or json_schema; vLLM's structural tags are not known here."""

    type: Annotated[str, Meta(pattern="^(text|json_object|json_schema)$")]
    json_schema: JSONSchema | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields of a request that are trivium's own SamplingParams and Options, under the names of OpenAI and vLLM. null is the same
    as not given: then the model's own defaults hold. Fields that are not named here are ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_WORDS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: Object | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Logprobs | None = None
    truncate_prompt_tokens: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    use_beam_search: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Object | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    include_metrics: bool | None = None

    def check(self) -> None:
        """What types can't say."""
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options needs stream: true", "stream_options")
        if self.use_beam_search:
            raise bad("use_beam_search is not known; give beam_width, the width of the search", "use_beam_search")

    def structure(self) -> StructuredOutputs | None:
        """What the text must look like, said in one of the ways that clients have."""
        ways: list[tuple[str, StructuredOutputs | None]] = [("response_format", self._format())]
        if self.structured_outputs is not None:
            ways.append(("structured_outputs", StructuredOutputs.of(self.structured_outputs)))
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                ways.append((f"guided_{kind}", StructuredOutputs(**{kind: value})))
        given = [(name, form) for name, form in ways if form is not None]
        if len(given) > 1:
            raise bad(f"{given[0][0]} and {given[1][0]} both say what the text looks like; give one", given[1][0])
        return given[0][1] if given else None

    def _format(self) -> StructuredOutputs | None:
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return json_object()
        if form.json_schema is None or form.json_schema.schema is None:
            raise bad("response_format.json_schema.schema is missing", "response_format")
        return json_schema(form.json_schema.schema)


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of a call; on request also Groq's times in seconds: total_time = prompt_time + completion_time, without the queue."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    queue_time: float | None = None
    prompt_time: float | None = None
    completion_time: float | None = None
    total_time: float | None = None


class Timing(Struct, kw_only=True, omit_defaults=True):
    """The request's clock in milliseconds, by vLLM's names. time_to_first_token_ms counts from arrival, the queue included.
    generation_time_ms: first to last token. tokens_per_second: tokens after the first, by generation time."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    prefill_time_ms: float | None = None
    mean_itl_ms: float | None = None
    time_per_output_token_ms: float | None = None
    e2e_time_ms: float | None = None
    tokens_per_second: float | None = None


def usage(tally: Tally, *, timed: bool = False) -> Usage:
    """Of a call; timed: with Groq's fields, if it had one prompt."""
    found = Usage(
        prompt_tokens=tally.prompt_tokens, completion_tokens=tally.made, total_tokens=tally.prompt_tokens + tally.made,
        prompt_tokens_details=PromptDetails(tally.cached), completion_tokens_details=CompletionDetails(tally.reasoning),
    )  # fmt: skip
    if timed and (m := tally.metrics) is not None:
        found.queue_time, found.prompt_time, found.completion_time = m.queue_time, m.prefill_time, m.decode_time or 0.0
        found.total_time = (m.prefill_time or 0.0) + found.completion_time
    return found


def timing(tally: Tally) -> Timing | None:
    """Of a call with one prompt and one output; of others no time can be said to be that of one answer."""
    m = tally.metrics
    if m is None:
        return None
    return Timing(
        time_to_first_token_ms=_ms(m.time_to_first_token), generation_time_ms=_ms(m.decode_time), queue_time_ms=_ms(m.queue_time),
        prefill_time_ms=_ms(m.prefill_time), mean_itl_ms=_ms(m.mean_itl), time_per_output_token_ms=_ms(m.time_per_output_token),
        e2e_time_ms=_ms(m.e2e_time), tokens_per_second=rate(m, tally.made),
    )  # fmt: skip


def rate(metrics: Metrics, made: int) -> float | None:
    """Tokens a second: those after the first, by the time from the first to the last."""
    return round((made - 1) / metrics.decode_time, 3) if metrics.decode_time and made > 1 else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def new_id(prefix: str) -> str:
    """An id that nobody has."""
    return f"{prefix}{secrets.token_hex(12)}"


def token_name(token: int, logprob: Any, by_id: bool | None) -> str:
    """How a token is shown: its text, its bytes where they are no whole text, or its number."""
    if by_id:
        return f"token_id:{token}"
    if "\ufffd" not in logprob.decoded_token:
        return str(logprob.decoded_token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.token_bytes)


def finite(value: float) -> float:
    """A log probability as JSON can hold it."""
    return max(value, _LOWEST)


Found = Mapping[int, Any]
"""trivium.TokenLogprobs: the token itself first, then the alternatives."""


def best(found: Found, count: int) -> list[tuple[int, Any]]:
    """The `count` likeliest, most likely first."""
    ranked = sorted(((token, entry) for token, entry in found.items() if entry.rank <= count), key=lambda pair: pair[1].rank)
    return ranked[:count]


def chat_logprobs(news: Sequence[Found] | None, count: int, by_id: bool | None) -> Object | None:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}; None where they were not asked for."""
    if news is None:
        return None

    def entry(token: int, one: Any) -> Object:
        return {"token": token_name(token, one, by_id), "logprob": finite(one.logprob), "bytes": [*one.token_bytes]}

    content = []
    for found in news:
        token, own = next(iter(found.items()))
        content.append({**entry(token, own), "top_logprobs": [entry(*pair) for pair in best(found, count)]})
    return {"content": content, "refusal": None}


class Offsets:
    """Where each token's text begins. Bytes of a character that is not whole yet count for nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, data: bytes) -> int:
        """Of the token with these bytes."""
        start = self._at
        self._at += len(self._decoder.decode(data))
        return start


class TextLogprobs(Struct):
    """Of a completion; the first token of an echoed prompt has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token: int, found: Found | None, name: str, count: int, by_id: bool | None, start: int) -> None:
        """The next token."""
        self.tokens.append(name)
        self.text_offset.append(start)
        self.token_logprobs.append(None if found is None else finite(found[token].logprob))
        if found is None:
            self.top_logprobs.append(None)
            return
        shown = {token_name(t, one, by_id): finite(one.logprob) for t, one in best(found, count)}
        self.top_logprobs.append({**shown, name: finite(found[token].logprob)} if count else shown)


def prompt_logprobs(found: Sequence[Found | None] | None) -> list[Object | None] | None:
    """vLLM's form: for each token of the prompt {id: {"logprob", "rank", "decoded_token"}}."""
    if found is None:
        return None

    def shown(one: Any) -> Object:
        return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}

    return [None if one is None else {str(token): shown(entry) for token, entry in one.items()} for one in found]
