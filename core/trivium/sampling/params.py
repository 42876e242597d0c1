"""SamplingParams: what a request may ask of sampling, checked before it takes memory. Names and defaults are vLLM's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.sampling.structured import StructuredOutputs

_LARGEST = 2**31 - 1
_MOST_BREAKERS = 32


class _Range(NamedTuple):
    kind: type[int] | type[float]
    low: float
    high: float
    open_low: bool = False
    optional: bool = False

    def __str__(self) -> str:
        noun = "an integer" if self.kind is int else "a number"
        low = f"above {self.low:g}" if self.open_low else f"from {_POWERS.get(self.low, f'{self.low:g}')}"
        joint = ", at most" if self.high in _POWERS else " up to"
        high = " up" if self.high == math.inf else f"{joint} {_POWERS.get(self.high, f'{self.high:g}')}"
        return f"{noun} {low}{high}{', or None' if self.optional else ''}"


_POWERS: Mapping[float, str] = {_LARGEST: "2**31 - 1", -(2**63): "-2**63", 2**64 - 1: "2**64 - 1"}
_RANGES: Mapping[str, _Range] = {
    "n": _Range(int, 1, 128), "presence_penalty": _Range(float, -2, 2), "frequency_penalty": _Range(float, -2, 2),
    "repetition_penalty": _Range(float, 0, 100, open_low=True), "temperature": _Range(float, 0, 100),
    "top_p": _Range(float, 0, 1, open_low=True), "top_k": _Range(int, -1, math.inf), "min_p": _Range(float, 0, 1),
    "typical_p": _Range(float, 0, 1, open_low=True), "top_n_sigma": _Range(float, -1, 1000), "xtc_probability": _Range(float, 0, 1),
    "xtc_threshold": _Range(float, 0, 1), "best_of": _Range(int, 1, 128, optional=True),
    "truncate_prompt_tokens": _Range(int, -1, _LARGEST, optional=True), "seed": _Range(int, -(2**63), 2**64 - 1, optional=True),
    "max_tokens": _Range(int, 0, _LARGEST, optional=True), "min_tokens": _Range(int, 0, _LARGEST),
    "logprobs": _Range(int, -1, _LARGEST, optional=True), "prompt_logprobs": _Range(int, -1, _LARGEST, optional=True),
    "dry_multiplier": _Range(float, 0, 100), "dry_base": _Range(float, 1, 100), "dry_allowed_length": _Range(int, 1, _LARGEST),
    "beam_width": _Range(int, 1, 128, optional=True), "length_penalty": _Range(float, -10, 10),
}  # fmt: skip
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_ONLY_WHEN_DRAWN = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "seed")
_WITH_BEAMS = frozenset((
    "n", "beam_width", "length_penalty", "early_stopping", "temperature", "seed", "stop_token_ids", "ignore_eos", "max_tokens",
    "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens",
    "spaces_between_special_tokens",
))  # fmt: skip
BACKEND_PARAMS = (
    "temperature", *_ONLY_WHEN_DRAWN, "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "logprobs", "prompt_logprobs",
    "structured_outputs",
)  # fmt: skip
"""Parameters that a backend's sampler must know; the others are the engine's own work, or come to it as logit_bias."""


def _refuse(name: str, want: str, value: object) -> InvalidRequestError:
    shown = repr(value)
    return InvalidRequestError(f"{name} must be {want}, not {shown if len(shown) < 80 else shown[:76] + ' ...'}", param=name)


def _number(name: str, want: _Range, value: Any) -> Any:
    if value is None and want.optional:
        return None
    right = not isinstance(value, bool) and isinstance(value, Integral if want.kind is int else Real)
    if not right or not want.low <= value <= want.high or (want.open_low and value == want.low):
        raise _refuse(name, str(want), value)
    return want.kind(value)


def _is_id(value: Any) -> bool:
    return type(value) is int or (not isinstance(value, bool) and isinstance(value, Integral))


def _list(name: str, value: Any, want: str, good: Callable[[Any], bool]) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable | None):
        raise _refuse(name, want, value)
    items = () if value is None else tuple(value)
    for item in items:
        if not good(item):
            raise _refuse(name, want, item)
    return items


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    return _list(name, items, "a non-empty string or a list of them", lambda item: isinstance(item, str) and item != "")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(map(int, _list(name, value, "a list of token ids (integers from 0)", lambda item: _is_id(item) and item >= 0)))


def _bias(value: Any) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", "a mapping of token ids to numbers from -100 to 100", value)
    biases = (_number("logit_bias", _Range(float, -100, 100), v) for v in value.values())
    return dict(zip(_ids("logit_bias", value), biases, strict=True))


def _processors(value: Any) -> Mapping[str, Any] | None:
    want = "a mapping of processors' names to arguments that JSON can hold"
    if value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        try:
            return json.loads(json.dumps(value and dict(value), allow_nan=False)) or None
        except (TypeError, ValueError) as e:
            raise _refuse("logits_processors", f"{want} ({e})", value) from e
    raise _refuse("logits_processors", want, value)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Every field is checked on construction (InvalidRequestError).

    n: samples a prompt, 1..128; sample i > 0 draws from a seed derived from `seed` and i. best_of: so many are made, and the n with
    the highest logprob a token are returned, best first.
    temperature: 0 = greedy. top_k: -1 or 0 = off; larger than the vocabulary = off. top_p, min_p, repetition_penalty,
    presence_penalty, frequency_penalty, logit_bias (-100..100), typical_p, top_n_sigma (up to 0 = off), xtc_probability (0 = off),
    xtc_threshold: see ops.sample. seed: None = drawn at arrival.
    dry_multiplier (0 = off), dry_base, dry_allowed_length, dry_sequence_breakers: see sampling.dry.
    logits_processors: plugins' processors by name, with their arguments (plugin.hooks).
    stop: strings at whose first occurrence in the decoded text the output ends, before the match unless
    include_stop_str_in_output. stop_token_ids end the output too. ignore_eos: the model's own end tokens do not.
    bad_words: texts that the output can't contain as tokens. allowed_token_ids: only these can be sampled.
    min_tokens: neither end nor stop tokens are sampled before. max_tokens: None = up to the context; 0 = score the prompt only.
    truncate_prompt_tokens: only so many of the prompt's last tokens are read; -1: as many as leave room for max_tokens.
    spaces_between_special_tokens: means nothing, as the text is that of the tokens, with nothing put between.
    logprobs, prompt_logprobs: alternatives reported a position (0: only the token's own value; -1: the whole vocabulary).
    beam_width: the n best outputs of a beam search (see sampling.beams) of that width, best first, fewer if there are fewer;
    length_penalty and early_stopping (True, False or "never") belong to it. It ranks by the model's own log probabilities, so
    whatever changes them is refused with it, and temperature may be 0 or 1 and means nothing.
    structured_outputs: what the text must look like (a mapping is taken for its fields). End and stop tokens are then sampled only
    where the text may end, and the output ends where nothing may follow, whatever min_tokens says.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logits_processors: Mapping[str, Any] | None = field(default=None, hash=False)
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {name: _number(name, want, getattr(self, name)) for name, want in _RANGES.items()}
        clean |= {name: _texts(name, getattr(self, name)) for name in ("stop", "bad_words", "dry_sequence_breakers")}
        clean |= {name: _ids(name, getattr(self, name)) for name in ("stop_token_ids", "allowed_token_ids")}
        clean |= {"logit_bias": _bias(self.logit_bias), "allowed_token_ids": clean["allowed_token_ids"] or None}
        clean["logits_processors"] = _processors(self.logits_processors)
        if self.allowed_token_ids is not None and clean["allowed_token_ids"] is None:
            raise _refuse("allowed_token_ids", "None or a list of at least one token id", self.allowed_token_ids)
        clean["structured_outputs"] = None if self.structured_outputs is None else StructuredOutputs.of(self.structured_outputs)
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        most = self.max_tokens
        for name, fine, want in (
            *((name, isinstance(getattr(self, name), bool), "True or False") for name in _FLAGS),
            ("min_tokens", most is None or self.min_tokens <= most, f"at most max_tokens ({most})"),
            ("best_of", self.best_of is None or self.best_of >= self.n, f"at least n ({self.n})"),
            ("dry_sequence_breakers", len(self.dry_sequence_breakers) <= _MOST_BREAKERS, f"at most {_MOST_BREAKERS} strings"),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "-1 or at least 1"),
            ("early_stopping", isinstance(self.early_stopping, bool) or self.early_stopping == "never", 'True, False or "never"'),
        ):
            if not fine:
                raise _refuse(name, want, getattr(self, name))
        if self.beam_width is not None:
            self._check_beams(self.beam_width)

    def _check_beams(self, width: int) -> None:
        if self.n > width:
            raise _refuse("n", f"at most beam_width ({width})", self.n)
        if self.max_tokens == 0:
            raise _refuse("max_tokens", "None or at least 1 with beam_width", 0)
        allowed = {"temperature": (0.0, 1.0)}
        for f in fields(self):
            value = getattr(self, f.name)
            if value not in allowed.get(f.name, (value if f.name in _WITH_BEAMS else f.default,)):
                raise _refuse(f.name, f"left at its default with beam_width, which goes by {', '.join(sorted(_WITH_BEAMS))}", value)

    def of_each_beam(self, candidates: int = 0) -> SamplingParams:
        """What each beam asks of the sampler: its likeliest `candidates` tokens. Without beam_width: what it is."""
        if self.beam_width is None:
            return self
        logprobs = -1 if self.logprobs == -1 else max(candidates, self.logprobs or 0)
        return replace(self, n=1, beam_width=None, temperature=0.0, logprobs=logprobs)

    @property
    def ranked(self) -> bool:
        """Whether only the best of the samples are returned."""
        return self.best_of is not None and self.best_of > self.n

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **chosen: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json): greedy unless it says do_sample; `chosen` fields come first."""
        names = ("temperature", "top_k", "top_p", "min_p")
        theirs = {name: config[name] for name in (*names, "repetition_penalty") if config.get(name) is not None}
        if not config.get("do_sample"):
            theirs = {**{k: v for k, v in theirs.items() if k not in names}, "temperature": 0.0}
        return cls(**{**theirs, **chosen})

    def validate(self, *, vocab_size: int) -> None:
        """Refuses token ids outside 0..vocab_size-1, wherever they stand."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_ids(name, getattr(self, name) or (), vocab_size)

    def used(self) -> frozenset[str]:
        """Those of BACKEND_PARAMS that change what the sampler must do; what greedy decoding ignores does not count."""
        defaults = {f.name: f.default for f in fields(self)} | {"temperature": 0.0, "bad_words": ()}
        idle = {name for name in ("top_k", "top_n_sigma") if getattr(self, name) <= 0}
        idle |= set(_ONLY_WHEN_DRAWN) if self.temperature == 0 else set()
        host = {"logit_bias"} if self.dry_multiplier > 0 or self.logits_processors else set()
        scored = {"logprobs"} if self.ranked else set()
        return frozenset(n for n in BACKEND_PARAMS if n not in idle and getattr(self, n) != defaults[n]) | host | scored

    def check_supported(self, supported: frozenset[str] | None, backend: str, reasons: Mapping[str, str]) -> None:
        """Refuses (UnsupportedError, `param` set) what a backend does not declare; None: it declares everything."""
        lacking = sorted(self.used() - supported) if supported is not None else []
        if lacking:
            reason = reasons.get(lacking[0], "it does not declare it")
            message = f"the backend {backend} can't do {lacking[0]}: {reason}; leave it out or choose another backend"
            raise UnsupportedError(message, param=lacking[0])


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """The one bounds check for token ids from a client: integers (no bools) in 0..vocab_size-1, else InvalidRequestError."""
    for token in ids:
        if not _is_id(token) or not 0 <= token < vocab_size:
            message = f"{name}: {token!r} is out of the vocabulary; ids are integers from 0 to {vocab_size - 1}"
            raise InvalidRequestError(message, param=name)


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words, each as at the start of a text and after a blank; `encode` adds no special tokens."""
    found = (tuple(encode(start + word.lstrip())) for word in words for start in ("", " "))
    return tuple(dict.fromkeys(ids for ids in found if ids))
