"""The engine: takes requests, runs steps as transactions, hands out what they made.

A step: plan (changes nothing), reserve pages and build the Batch, run, commit. Whatever fails before the commit is undone, then the
sequences of that step run one by one, once: those that fail again end with finish_reason "error", the others go on. A preemption
is a transition of its own and is not undone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trivium.engine.executor import Model
from trivium.engine.outputs import Clock, Logprob, RequestOutput, TokenLogprobs
from trivium.engine.request import Completion, Request, Text
from trivium.errors import BackendError, ContextLengthError, InvalidRequestError, TriviumError
from trivium.kv import KVCache, root_key
from trivium.ops import Sampled
from trivium.ops.sample import derive_seed
from trivium.plugin.contract import Step
from trivium.sampling import SamplerState, SamplingParams, bad_word_ids, build_inputs, check_ids, fresh_seed
from trivium.sched import Entry, RowMap, Scheduler, StepPlan, make_batch, sampled_rows
from trivium.sched import Sequence as Stream

if TYPE_CHECKING:
    from trivium.text import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens a step; longer prompts are computed in chunks.
    enable_prefix_caching: full pages are shared between requests (off: only within one). seed: requests without a seed get one that
    depends on this and their number; None: on chance."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequestError(f"{name} must be an integer from 1 up, not {value!r}", param=name)
        if self.seed is not None and type(self.seed) is not int:
            raise InvalidRequestError(f"seed must be an integer or None, not {self.seed!r}", param="seed")


@dataclass
class Stats:
    """Totals since the start. device_seconds: from run() to the return of tokens(); host_seconds: the rest of the steps' time."""

    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def host_share(self) -> float:
        """Part of the steps' time that the host took, 0..1."""
        total = self.host_seconds + self.device_seconds
        return self.host_seconds / total if total else 0.0


class _Flight(NamedTuple):
    """A step under way."""

    plan: StepPlan
    rows: list[RowMap]
    step: Step
    started: float


class Engine:
    """Not thread-safe. `clock` gives seconds and may be simulated."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.stats = Stats()
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.kv = KVCache(model.kv_spec, model.num_pages, min(seqs, tokens))
        self.scheduler = Scheduler(self.kv, seqs, tokens)
        self._clock = clock
        self._count = 0
        self._requests: dict[int, Request] = {}
        self._completions: dict[Stream, Completion] = {}

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
        client_id: str | None = None,
        cache_salt: str = "",
    ) -> int:
        """Takes a request and returns its id; `client_id` is only echoed. Lower priority runs first. cache_salt: prefix pages are
        shared only between equal salts. Raises InvalidRequestError, ContextLengthError, CapacityError or UnsupportedError; then
        nothing has changed."""
        params = params or SamplingParams()
        ids = self._check_prompt(prompt_ids)
        capabilities = self.model.capabilities
        params.check_supported(capabilities.sampling, self.model.backend.name, capabilities.unsupported)
        max_tokens = self._check_length(len(ids), params.max_tokens)
        request = self._make_request(ids, params, max_tokens, priority, cache_salt)
        request.stream, request.client_id = stream, client_id
        self._count = request.id
        self._requests[request.id] = request
        self._completions.update((c.seq, c) for c in request.completions)
        self.stats.prompt_tokens += len(ids)
        self._start(request, 1)
        return request.id

    def has_unfinished(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the news of the requests that have any, oldest first."""
        began, device = self._clock(), self.stats.device_seconds
        plan = self.scheduler.plan()
        if not plan.entries:
            assert not self._requests, "requests are unfinished and none of them can run"
            return []
        outputs = self._report(self._attempt(plan, began))
        self.stats.host_seconds += self._clock() - began - (self.stats.device_seconds - device)
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request with what it has so far (finish_reason "abort"); None if it is not running any more."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._report(self._end(request, "abort") or request.completions)[0]

    def fail_all(self, fault: TriviumError) -> list[RequestOutput]:
        """Ends every request with an error: for an engine that can't go on."""
        return [output for request in list(self._requests.values()) for output in self._report(self._end(request, "error", fault))]

    def check(self) -> None:
        """Raises AssertionError unless every page is free or owned, reference counts add up, and no request is lost."""
        self.scheduler.check()
        known = {c.seq for r in self._requests.values() for c in r.completions[: r.started] if c.finish_reason is None}
        assert known == {*self.scheduler.running, *self.scheduler.waiting}, "a request is lost"
        assert len(self._completions) == sum(c.finish_reason is None for r in self._requests.values() for c in r.completions)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        ids = list(prompt_ids)
        check_ids("prompt", ids, self.model.vocab_size)
        if not ids and self.tokenizer.bos_id is not None:
            return [self.tokenizer.bos_id]
        if not ids:
            message = "the prompt is empty and this model has no token to begin with; give at least one token"
            raise InvalidRequestError(message, param="prompt")
        return [int(i) for i in ids]

    def _check_length(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens to make: prompt + max_tokens <= max_model_len; None becomes the room left."""
        limit = self.model.max_model_len
        wanted = max(limit - prompt, 1) if max_tokens is None else max_tokens
        if prompt + wanted > limit:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {wanted} more are asked for, but prompt and output together can have "
                f"{limit}; shorten the prompt or lower max_tokens", param="prompt",
            )  # fmt: skip
        self.scheduler.check_fits(prompt + max(wanted - 1, 0))
        return wanted

    def _make_request(self, ids: list[int], params: SamplingParams, max_tokens: int, priority: int, salt: str) -> Request:
        number = self._count + 1
        owner = "" if self.config.enable_prefix_caching else str(number)
        eos = frozenset() if params.ignore_eos else self.model.eos_ids
        request = Request(number, ids, params, max_tokens, eos | set(params.stop_token_ids), Clock(self._clock()))
        scored = params.prompt_logprobs is not None
        request.prompt_logprobs.append(None)
        root = root_key(self.model.fingerprint, "", salt, owner)
        seed = fresh_seed() if self.config.seed is None else derive_seed(self.config.seed % 2**64, number)
        bad_words = bad_word_ids(params.bad_words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        for index in range(params.n):
            sampler = SamplerState(params, ids, self.model.eos_ids, self.model.vocab_size, seed, index=index, bad_words=bad_words)
            seq = Stream(
                ids, root, (priority, number, index), samples=max_tokens > 0,
                score_end=len(ids) - 1 if scored and index == 0 else 0,
            )  # fmt: skip
            request.completions.append(Completion(request, seq, sampler, Text(self.tokenizer, params)))
            request.live += 1
        return request

    def _start(self, request: Request, count: int) -> None:
        for completion in request.completions[request.started : count]:
            self.scheduler.add(completion.seq)
            request.started += 1

    def _attempt(self, plan: StepPlan, began: float) -> list[Completion]:
        """Runs a plan; if it fails, its sequences one by one. Returns the outputs that moved."""
        try:
            return self._run(plan, began)
        except Exception as fault:
            self.stats.failed_steps += 1
            _log.warning("a step of %d sequences failed; they run again one by one: %s", len(plan.entries), fault, exc_info=fault)
        moved: list[Completion] = []
        for seq in [entry.seq for entry in plan.entries]:
            alone = self.scheduler.plan(only=seq) if seq in self._completions else StepPlan()
            try:
                moved += self._run(alone, began) if alone.entries else []
            except Exception as fault:
                moved += self._end(self._completions[seq].request, "error", _typed(fault))
        return moved

    def _run(self, plan: StepPlan, began: float) -> list[Completion]:
        flight = self._launch(plan, began)
        return self._commit(flight, *self._wait(flight), began)

    def _launch(self, plan: StepPlan, began: float) -> _Flight:
        """Reserves pages, builds the Batch, starts it on the device. Undone if it fails."""
        ran = False
        try:
            self._reserve(plan, began)
            rows = [sampled_rows(entry) for entry in plan.entries]
            inputs = build_inputs(self._sampler_rows(plan.entries, rows), self.model.vocab_size)
            batch = make_batch(plan.entries, rows, self.kv, inputs)
            started, ran = self._clock(), True
            return _Flight(plan, rows, self.model.executable.run(batch), started)
        except BaseException:
            self.scheduler.roll_back(plan, ran=ran)
            raise

    def _reserve(self, plan: StepPlan, began: float) -> None:
        for seq in plan.preempted:
            self.scheduler.preempt(seq)
            self.stats.preemptions += 1
            self._completions[seq].request.clock.preempt(seq.order[2], began)
        self.scheduler.reserve(plan)

    def _wait(self, flight: _Flight) -> tuple[Sampled, list[int], float]:
        """What the device sampled, its ids, and when. The step is undone if it fails or returns nonsense."""
        try:
            try:
                sampled = flight.step.tokens()
            finally:
                now = self._clock()
                self.stats.device_seconds += now - flight.started
            return sampled, self._check_sampled(sampled, flight.rows), now
        except BaseException:
            self.scheduler.roll_back(flight.plan, ran=True)
            raise

    def _check_sampled(self, sampled: Sampled, rows: list[RowMap]) -> list[int]:
        want = sum([row.scores + row.sample for row in rows])
        ids: list[int] = sampled.ids.tolist()
        vocab = self.model.vocab_size
        if len(ids) != want or (want and not (min(ids) >= 0 and max(ids) < vocab)):
            raise BackendError(f"the backend returned {ids!r} for {want} rows of a vocabulary of {vocab}")
        return ids

    def _sampler_rows(self, entries: list[Entry], rows: list[RowMap]) -> list[tuple[SamplerState, int, int]]:
        found: list[tuple[SamplerState, int, int]] = []
        for entry, row in zip(entries, rows):
            seq, sampler = entry.seq, self._completions[entry.seq].sampler
            if row.scores:
                targets = seq.tokens(row.start + 1, row.start + 1 + row.scores).tolist()
                found.extend((sampler, row.start + 1 + i, target) for i, target in enumerate(targets))
            if row.sample:
                found.append((sampler, seq.length, -1))
        return found

    def _commit(self, flight: _Flight, sampled: Sampled, ids: list[int], now: float, began: float) -> list[Completion]:
        at, moved = 0, list[Completion]()
        self.stats.steps += 1
        for entry, row in zip(flight.plan.entries, flight.rows):
            completion = self._completions.get(entry.seq)
            try:
                if completion is not None:
                    self._commit_entry(completion, entry, row, sampled, ids, at, now, began)
                    if row.sample or completion.finish_reason:
                        moved.append(completion)
            except Exception as fault:
                moved += self._end(completion.request, "error", _typed(fault)) if completion else []
            at += row.scores + row.sample
        return moved

    def _commit_entry(
        self, completion: Completion, entry: Entry, row: RowMap, sampled: Sampled, ids: list[int], at: int, now: float, began: float
    ) -> None:
        seq, request = entry.seq, completion.request
        complete = entry.start + entry.tokens == seq.length
        if entry.hit is not None:
            request.clock.schedule(completion.index, began, entry.start)
            self.stats.cached_tokens += entry.start
        for _ in range(row.scores):
            request.prompt_logprobs.append(self._logprobs(sampled, at, completion.sampler.prompt_logprobs))
            seq.scored += 1
            at += 1
        if row.sample:
            completion.accept(ids[at], self._logprobs(sampled, at, completion.sampler.logprobs), now)
            self.stats.generated_tokens += 1
        elif complete:
            completion.finish("length")
        self.kv.advance(seq, entry.tokens)
        self.stats.computed_tokens += entry.tokens
        if complete and request.clock.prefill_done is None:
            request.clock.prefill_done = now
            self._start(request, len(request.completions))
        if completion.finish_reason is not None:
            self._retire(completion)

    def _logprobs(self, sampled: Sampled, row: int, alternatives: int) -> TokenLogprobs | None:
        """The token of a sampled row and its `alternatives` (-1: nothing was asked for)."""
        if alternatives < 0 or sampled.logprobs is None or sampled.ranks is None:
            return None
        text = self.tokenizer.token_text
        token = int(sampled.ids[row])
        found = {token: Logprob(float(sampled.logprobs[row]), int(sampled.ranks[row]), text(token))}
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            pairs = zip(sampled.top_ids[row, :alternatives].tolist(), sampled.top_logprobs[row, :alternatives].tolist())
            for rank, (i, value) in enumerate(pairs, 1):
                found.setdefault(i, Logprob(value, rank, text(i)))
        return found

    def _retire(self, completion: Completion) -> None:
        self.scheduler.remove(completion.seq)
        completion.request.live -= 1
        del self._completions[completion.seq]

    def _end(self, request: Request, reason: str, fault: TriviumError | None = None) -> list[Completion]:
        """Ends all outputs of a request that still run."""
        live = [c for c in request.completions if c.seq in self._completions]
        request.error = fault
        for completion in live:
            try:
                completion.finish(reason)
            except Exception as second:
                completion.finish("error")
                request.error = _typed(second)
            self._retire(completion)
        return live

    def _report(self, moved: list[Completion]) -> list[RequestOutput]:
        """News of the requests that `moved` belong to; forgets those that have finished."""
        by_request: dict[int, list[Completion]] = {}
        for completion in moved:
            by_request.setdefault(completion.request.id, []).append(completion)
        now = self._clock()
        outputs = []
        for number in sorted(by_request):
            request = self._requests[number]
            if request.finished:
                del self._requests[number]
            if request.stream or request.finished:
                outputs.append(request.output(by_request[number], now))
        if not self._requests:
            self.kv.check_idle()
        return outputs


def _typed(fault: Exception) -> TriviumError:
    if isinstance(fault, TriviumError):
        return fault
    error = BackendError(f"a step failed: {type(fault).__name__}: {fault}")
    error.__cause__ = fault
    return error
