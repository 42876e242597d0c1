"""What a request must pass before it takes memory, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trivium.engine.adapters import Adapter, enabled
from trivium.engine.beams import Beam, Beams
from trivium.engine.config import EngineConfig
from trivium.engine.executor import Model
from trivium.engine.outputs import Clock
from trivium.engine.pooling import Pool, PoolingParams
from trivium.engine.request import Completion, Request, Text
from trivium.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from trivium.kv import root_key
from trivium.ops import Span
from trivium.ops.sample import derive_seed
from trivium.plugin.processors import Processors
from trivium.sampling import (
    BeamSearch, Dry, SamplerState, SamplingParams, StructuredOutputs, bad_word_ids, breaker_ids, check_ids, fresh_seed,
)  # fmt: skip
from trivium.sched import Sequence as Stream
from trivium.text import Grammars, Matcher, Tokenizer


@dataclass(eq=False, repr=False)
class Intake:
    """Checks requests and builds them. `check_fits(tokens)` raises CapacityError where a sequence could not run even alone."""

    model: Model
    _tokenizer: Tokenizer
    _config: EngineConfig
    _check_fits: Callable[[int], None]
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._processors = Processors(self._tokenizer)
        self._containing = lru_cache(maxsize=64)(self._find_containing)
        self._grammars = Grammars(self._tokenizer, self.model.vocab_size, self.model.eos_ids)

    def matcher(self, params: SamplingParams | None) -> Matcher | None:
        """A new matcher for one output, compiled if its grammar is new; from any thread."""
        if params is None or params.structured_outputs is None:
            return None
        return self._grammars.matcher(*StructuredOutputs.of(params.structured_outputs).spec, self._end_ids(params))

    def request(
        self, number: int, prompt_ids: Sequence[int], params: SamplingParams | None, client_id: str | None,
        priority: int, salt: str, pooling: PoolingParams | None, score_from: int, adapter: str | None, seed: int | None = None,
        media: Sequence[Span] = (),
    ) -> Request:  # fmt: skip
        """The request `number`, which nobody knows yet. seed: where the parameters have none. Raises InvalidRequestError,
        ContextLengthError, CapacityError or UnsupportedError."""
        name = "" if client_id is None else client_id
        for param, value, kind in (("priority", priority, int), ("cache_salt", salt, str), ("request_id", name, str)):
            if type(value) is not kind:
                raise InvalidRequestError(f"{param} must be of type {kind.__name__}, not {value!r:.80}", param=param)
        if priority and self._config.scheduling_policy == "fcfs":
            message = f"priority {priority} needs scheduling_policy 'priority'; leave it out or 0"
            raise InvalidRequestError(message, param="priority")
        ids = self._check_prompt(prompt_ids)
        pool = None if pooling is None else self._pool(pooling, params, len(ids))
        if pool is None and not self.model.kv_spec.groups:
            raise UnsupportedError("this model reads whole texts and makes no tokens; ask for embeddings or scores", param="prompt")
        params = SamplingParams(temperature=0.0, max_tokens=0) if pool is not None else params or SamplingParams()
        media, before = self._check_media(media, len(ids)), len(ids)
        ids = self._truncated(ids, params)
        shown = (span.cut(before - len(ids), before) for span in media)
        media = [s._replace(start=s.start - before + len(ids), stop=s.stop - before + len(ids)) for s in shown if s is not None]
        if type(score_from) is not int or not 1 <= score_from <= len(ids):
            raise InvalidRequestError(f"score_from must be from 1 to {len(ids)}, not {score_from!r}", param="score_from")
        capabilities = self.model.capabilities
        params.of_each_beam().check_supported(capabilities.sampling, self.model.backend.name, capabilities.unsupported)
        max_tokens = self._check_length(len(ids), params.max_tokens)
        own = None if adapter is None else enabled(self.model.lora).get(adapter)
        if seed is None:
            seed = fresh_seed() if self._config.seed is None else derive_seed(self._config.seed % 2**64, number)
        request = Request(
            number, ids, params, max_tokens, self._end_ids(params), Clock(self._clock()), client_id=client_id, salt=salt,
            adapter=adapter, seed=seed, pool=pool, prompt_logprobs=[None] * score_from, media=media,
        )  # fmt: skip
        self._build(request, priority, own)
        return request

    def _pool(self, pooling: PoolingParams, params: SamplingParams | None, tokens: int) -> Pool:
        if params is not None:
            raise InvalidRequestError("a request with pooling makes no tokens; give it no sampling parameters", param="pooling")
        if not self.model.hidden_size:
            message = f"the backend {self.model.backend.name} gives no hidden states, which embeddings are made of; choose another"
            raise UnsupportedError(message, param="pooling")
        return Pool(pooling, tokens, self.model.hidden_size, self.model.pooling, whole=not self.model.kv_spec.groups)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        ids = list(prompt_ids)
        check_ids("prompt", ids, self.model.vocab_size)
        if not ids and self._tokenizer.bos_id is not None:
            return [self._tokenizer.bos_id]
        if not ids:
            message = "the prompt is empty and this model has no token to begin with; give at least one token"
            raise InvalidRequestError(message, param="prompt")
        return [int(i) for i in ids]

    def _check_media(self, media: Sequence[Span], length: int) -> Sequence[Span]:
        refusal = "this model takes text only, no images" if self.model.images is None else self.model.images.refusal
        if media and refusal:
            raise UnsupportedError(refusal, param="messages")
        if any(not 0 <= a.start < a.stop <= b for a, b in zip(media, [*(span.start for span in media[1:]), length])):
            raise InvalidRequestError("what stands for images must be in order, and within the prompt", param="media")
        return media

    def _truncated(self, ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep == -1:
            keep = max(self.model.max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
        return ids if keep is None else ids[-keep:]

    def _check_length(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens to make: prompt + max_tokens <= max_model_len; None becomes the room left."""
        limit = self.model.max_model_len
        wanted = max(limit - prompt, 1) if max_tokens is None else max_tokens
        if prompt + wanted > limit:
            message = f"the prompt has {prompt} tokens and {wanted} more are asked for, but prompt and output together"
            raise ContextLengthError(f"{message} can have {limit}; shorten the prompt or lower max_tokens", param="prompt")
        self._check_fits(prompt + max(wanted - 1, 0))
        return wanted

    def _build(self, request: Request, priority: int, adapter: Adapter | None) -> None:
        """Gives a request its outputs."""
        ids, params, pool, model = request.prompt_ids, request.params, request.pool, self.model
        owner = "" if self._config.enable_prefix_caching else str(request.id)
        root = root_key(model.fingerprint, adapter.fingerprint if adapter else "", request.salt, owner)
        search = BeamSearch(params, request.end_ids, request.max_tokens) if params.beam_width else None
        asked = params.of_each_beam(search.candidates) if search else params
        banned, dry = bad_word_ids(params.bad_words, self._encode), self._dry(ids, params)
        processors = self._processors.make(params.logits_processors or {}, model.vocab_size)
        known = ids if pool is None else ids[: pool.tokens]
        for index in range(count := asked.best_of or asked.n):
            rules = asked, ids, model.eos_ids, model.vocab_size, request.seed
            grammar = self.matcher(asked)
            sampler = SamplerState(*rules, index=index, bad_words=banned, dry=dry, processors=processors, grammar=grammar)
            scores = len(ids) - 1 if params.prompt_logprobs is not None and index == 0 else 0
            seq = Stream(known, root, (priority, request.id, index), limit=len(known) + request.max_tokens, score_end=scores)
            seq.scored, seq.adapter, seq.media = len(request.prompt_logprobs) - 1, adapter, request.media
            if pool is not None:
                seq.pooled = pool.first
            text = Text(self._tokenizer, params)
            if search is None:
                request.completions.append(Completion(request, seq, sampler, text))
            else:
                request.completions.append(beam := Beam(request, seq, sampler, text))
                request.beams = Beams(beam, search, self._tokenizer)
        request.completions[0].seq.fork_at = len(ids) - 1 if count > 1 else 0

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        return (frozenset() if params.ignore_eos else self.model.eos_ids) | set(params.stop_token_ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _dry(self, ids: list[int], params: SamplingParams) -> Dry | None:
        if params.dry_multiplier == 0:
            return None
        return Dry(params, ids, breaker_ids(params.dry_sequence_breakers, self._encode, self._containing))

    def _find_containing(self, part: bytes) -> list[int]:
        """The tokens in whose bytes `part` occurs."""
        count = min(self.model.vocab_size, self._tokenizer.vocab_size)
        return [i for i in range(count) if part in self._tokenizer.token_bytes(i)]
