"""The engine: takes requests, runs steps as transactions, hands out what they made.

A step: plan (changes nothing), reserve pages and build the Batch, run, settle (tokens and pages), commit (texts and ends). Whatever
fails before the tokens are there is undone, then the sequences of that step run one by one, each until it is past what it had in
that step: undoing may drop more tokens than one step computes again. Those that fail again on the way there end with finish_reason
"error", the others go on. So every step brings the first of its sequences further than it has ever been, or ends it: no fault can
hold the engine for ever. A preemption is a transition of its own and is not undone.

Where run() returns early, the next step is planned and prepared while this one runs, for the sequences as they will be then, and
started once this one is settled; all the rest of this one is done while it runs. Rows of sequences that have ended in between are
ignored: their pages can be handed out at once, as whatever writes to them next comes later on the device.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

from trivium.engine.adapters import Adapter, enabled
from trivium.engine.config import EngineConfig
from trivium.engine.executor import Model
from trivium.engine.intake import Intake
from trivium.engine.migration import RequestState, export_state, import_state
from trivium.engine.outputs import Logprob, RequestOutput, TokenLogprobs
from trivium.engine.pooling import PoolingParams
from trivium.engine.request import Completion, Request
from trivium.engine.runner import Flight, Part, Runner, Stats
from trivium.engine.speculation.drafter import Drafter, Speculative, lookup_drafter
from trivium.engine.speculation.speculator import Speculator
from trivium.errors import BackendError, DeadlineError, InvalidRequestError, OverloadedError, PageFormatError, TriviumError
from trivium.kv import Disk, Hit, KVCache, Tiers
from trivium.ops import Sampled, Span
from trivium.sampling import SamplingParams
from trivium.sched import Entry, Scheduler, Sequence as Stream, StepPlan
from trivium.text import Tokenizer
from trivium.text.reader import Reader

PREFILL_SHARE = 8
"""Tokens a sequence from which a step counts as prefill when its speed is measured."""


class Engine:
    """Not thread-safe. `clock` gives seconds and may be simulated. `drafter`: in place of the one that config.speculative names; a
    draft model must be given here."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, config: EngineConfig | None = None, *, drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.stats = Stats()
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.kv = KVCache(model.kv_spec, model.num_pages, min(seqs, tokens))
        self.kv.private = not self.config.enable_prefix_caching
        host, path, size = self.config.kv_host_bytes, self.config.kv_disk_path, self.config.kv_disk_bytes
        if host or path is not None:
            self.kv.tiers = Tiers(model.layout, host, None if path is None else Disk(Path(path), size, model.layout))
        self.scheduler = Scheduler(self.kv, seqs, tokens, 0 if model.lora is None else model.lora.slots)
        self._clock = clock
        self._count = 0
        self._requests: dict[int, Request] = {}
        self._completions: dict[Stream, Completion] = {}
        self._flight: Flight | None = None
        self._deadlines: list[tuple[float, int]] = []
        self._suspects: list[tuple[Stream, int]] = []
        """Those of a step that failed, in its order, and how many tokens each has to have computed before it runs with others."""
        self._moved: list[Completion] = []
        """Outputs that are to be reported: a step that is interrupted leaves them to the next one."""
        self.intake = Intake(model, tokenizer, self.config, self.scheduler.check_fits, clock)
        self.runner = Runner(model, self.scheduler, self._completions, self.stats, clock)
        self.speculator: Speculator | None = None
        if speculative := Speculative.of(self.config.speculative):
            drafter = drafter or lookup_drafter(speculative)
            self.speculator = Speculator(speculative, drafter, self.scheduler, self._completions, self.stats, clock)
            self.runner.watched = drafter.watches

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.runner.model

    @model.setter
    def model(self, model: Model) -> None:
        self.runner.model = self.intake.model = model

    def add_request(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, stream: bool = False,
        client_id: str | None = None, cache_salt: str = "", reader: Reader | None = None, pooling: PoolingParams | None = None,
        score_from: int = 1, adapter: str | None = None, timeout: float | None = None, patient: bool = False,
        media: Sequence[Span] = (),
    ) -> int:  # fmt: skip
        """Takes a request and returns its id; `client_id` is only echoed. Lower priority runs first. cache_salt: prefix pages are
        shared only between equal salts. reader: how to read the outputs as answers of a chat. pooling: no tokens are made (and no
        params are taken), the output has an embedding of the prompt. score_from: prompt_logprobs begin with this token of the
        prompt, earlier ones have none. adapter: the name of a loaded one, which the request keeps to its end. timeout: seconds from
        now until it is ended with DeadlineError, keeping what it has. patient: the limits on what waits don't hold. media: what
        stands for images in the prompt, in order. Raises InvalidRequestError, ContextLengthError, CapacityError, UnsupportedError
        or OverloadedError; then nothing has changed."""
        if timeout is not None and not (isinstance(timeout, int | float) and timeout is not True and 0 < timeout < math.inf):
            raise InvalidRequestError(f"timeout must be a number of seconds above 0, or None, not {timeout!r}", param="timeout")
        if stream and params is not None and params.beam_width:
            raise InvalidRequestError("a beam search has nothing to stream: its outputs are chosen at the end", param="stream")
        if stream and params is not None and params.ranked:
            raise InvalidRequestError("best_of can't be streamed: which outputs are best is known at the end", param="best_of")
        number = self._count + 1
        own = cache_salt, pooling, score_from, adapter
        request = self.intake.request(number, prompt_ids, params, client_id, priority, *own, media=media)
        self._check(request, patient)
        request.stream = stream
        if reader is not None:
            request.read_with(reader)
        self.stats.prompt_tokens += len(request.prompt_ids)
        request.clock.deadline = None if timeout is None else request.clock.arrival + timeout
        return self._take(request)

    def export_request(self, request_id: int, *, copy: bool = False, pages: bool = True) -> RequestState:
        """Takes a request out, to be continued by import_request() of this or another engine: nothing more is heard of it here.
        copy: it also stays. pages: with what has been computed of it; else it is computed again. InvalidRequestError: it is not
        under way; UnsupportedError: a beam search or an embedding, which stay."""
        if (request := self._requests.get(request_id)) is None:
            raise InvalidRequestError(f"request {request_id} is not under way", param="request_id")
        stale = not pages or (self._flight is not None and bool(self.kv.recurrent))  # the step under way changes their states
        state = export_state(request, self.model.layout, self.kv, None if stale else self.model.session, self._clock())
        if not copy:
            for completion in [c for c in request.completions if c.seq in self._completions]:
                completion.finish_reason = "moved"
                self._retire(completion)
            del self._requests[request_id]
        return state

    def import_request(self, state: RequestState) -> int:
        """Goes on with a request that export_request() took out, and returns its id here. Raises PageFormatError
        if the state makes no sense or belongs to another model, else what add_request() raises; then nothing has changed."""
        build = partial(self.intake.request, self._count + 1)
        try:
            return self._take(import_state(state, build, self.model, self.tokenizer, self._clock()))
        except Exception as fault:
            message = f"the state of the request makes no sense: {type(fault).__name__}: {fault}"
            raise fault if isinstance(fault, TriviumError) else PageFormatError(message) from fault

    def _take(self, request: Request) -> int:
        self._count = max(self._count, request.id)
        self._requests[request.id] = request
        if request.clock.deadline is not None:
            heapq.heappush(self._deadlines, (request.clock.deadline, request.id))
        self._completions.update((c.seq, c) for c in request.completions if c.finish_reason is None)
        for seq in [c.seq for c in request.completions[: request.started] if c.finish_reason is None]:
            self.scheduler.add(seq)
            self.kv.prefetch(seq, seq.reusable)
        return request.id

    def prepare(self, params: SamplingParams | None) -> None:
        """Compiles the grammar that a request will need, so that add_request() finds it made. From any thread, while others step.
        InvalidRequestError if the grammar is not possible."""
        self.intake.matcher(params)

    def load_adapter(self, name: str, adapter: Adapter | str | PathLike[str]) -> None:
        """Makes an adapter (a PEFT folder, or what Adapters.read() made of one) known as `name`; raises what read() and add()
        raise, and then nothing has changed."""
        known = enabled(self.model.lora)
        known.add(name, adapter if isinstance(adapter, Adapter) else known.read(adapter))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter: no request can name it any more, and those that have it end with it. InvalidRequestError if there is
        none of that name."""
        enabled(self.model.lora).remove(name, {seq.adapter for seq in self._completions})

    @property
    def _queue(self) -> tuple[int, int]:
        """How many wait in vain for a seat, and tokens that wait."""
        return self.scheduler.queued, self.scheduler.waiting_tokens

    def _check(self, request: Request, patient: bool) -> None:
        """Raises OverloadedError if the request would be too much, with the time that the excess takes to go."""
        stats, (queued, tokens) = self.stats, (0, 0) if patient else self._queue
        for name, waits, more, done in (
            ("max_waiting_requests", queued, 1, stats.finished_requests),
            ("max_waiting_tokens", tokens, len(request.prompt_ids), stats.computed_tokens),
        ):
            limit, excess = getattr(self.config, name), waits + more
            if queued and limit is not None and excess > limit:
                seconds = (stats.host_seconds + stats.device_seconds) / done * (excess - limit) if done else 1.0
                message = f"{waits} wait and {more} more would exceed {name} {limit}; try again in {seconds:.1f} seconds"
                raise OverloadedError(message, retry_after=seconds)

    def has_unfinished(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._requests) or self._flight is not None

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the news of the requests that have any, oldest first."""
        began, elsewhere = self._clock(), self.stats.device_seconds + self.stats.draft_seconds
        self._expire(began)
        if self._suspects:
            self._run_alone(began)
        elif (flight := self._flight or self._first_flight(began)) is not None:
            self._flight, flight.started = None, max(flight.started, began)
            self._run(flight)
        moved, self._moved = self._moved, []
        outputs = self._report(moved)
        now = self._clock() if self._flight is None else self.runner.charge(self._flight)
        elsewhere = self.stats.device_seconds + self.stats.draft_seconds - elsewhere
        self.stats.host_seconds += now - began - elsewhere
        return outputs

    def close(self) -> None:
        """Puts what the cache holds on disk, if there is a folder for it. Nothing may be called afterwards."""
        if self.kv.tiers is not None:
            self.kv.tiers.close(self.model.session, self.kv.pool.published())

    def _expire(self, now: float) -> None:
        """Ends what has taken too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                waited = f"{now - request.clock.arrival:.1f} seconds after it came"
                self._moved += self._end(request, "abort", DeadlineError(f"the request's timeout was over {waited}"))

    def _first_flight(self, began: float) -> Flight | None:
        """A step that nobody has prepared."""
        plan = self._plan()
        assert plan.entries or not self._completions, "requests are unfinished and none of them can run"
        if self.speculator is not None and plan.entries:
            self.speculator.extend(plan)
        return self.runner.launch(self.runner.prepare(plan, began)) if plan.entries else None

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request with what it has so far (finish_reason "abort"); None if it is not running any more."""
        if (request := self._requests.get(request_id)) is None:
            return None
        self.stats.aborted_requests += 1
        return self._report(self._end(request, "abort") or request.completions)[0]

    def fail_all(self, fault: TriviumError) -> list[RequestOutput]:
        """Ends every request with an error: for an engine that can't go on."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with contextlib.suppress(Exception):  # its requests end anyway, but not before the device is done with their pages
                self._wait(flight)
        return [output for request in list(self._requests.values()) for output in self._report(self._end(request, "error", fault))]

    def snapshot(self) -> Stats:
        """The totals so far, and what runs, waits and is free now."""
        kv, queue = self.kv.pool, self.scheduler
        return replace(
            self.stats, running=len(queue.running), waiting=len(queue.waiting), waiting_tokens=queue.waiting_tokens,
            pages=kv.pages, free_pages=kv.available,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError unless every page is free or owned, reference counts add up, and no request is lost."""
        self.scheduler.check()
        known = {c.seq for r in self._requests.values() for c in r.completions[: r.started] if not c.resting}
        assert known == {*self.scheduler.running, *self.scheduler.waiting}, "a request is lost"
        assert len(self._completions) == sum(c.finish_reason is None for r in self._requests.values() for c in r.completions)

    def _plan(self, *, ahead: bool = False) -> StepPlan:
        """The next step, with what it restores read from the tiers; made again where that can't be had. ahead: nothing at all if
        somebody would lose pages, as that is decided on facts."""
        while True:
            plan = self.scheduler.plan()
            if ahead and plan.preempted:
                return StepPlan()
            if all(self.kv.collect(entry.seq, entry.hit) for entry in plan.entries if entry.hit is not None):
                return plan

    def _run(self, flight: Flight) -> None:
        """Ends a step; if it fails, its sequences run one by one."""
        ahead = self.model.capabilities.asynchronous and self.speculator is None  # drafts follow from the tokens of this step
        following = self._prepare_after(flight) if ahead else None
        try:
            self._wait(flight, following)
        except (Exception, SystemExit) as fault:
            import logging

            self.stats.failed_steps += 1
            message = "a step of %d sequences failed; they run again one by one: %s"
            logging.getLogger(__name__).warning(message, len(flight.plan.entries), fault, exc_info=fault)
            self._suspects = [(entry.seq, entry.start + entry.tokens) for entry in flight.plan.entries]
            self._run_alone(flight.began)
            return
        if self.speculator is not None:
            self.speculator.measure(flight)
        self._finish(flight, following)

    def _run_alone(self, began: float) -> None:
        """Runs the suspects in turn, as far as each gets in one step; one that has to go on does so in the next step of the engine,
        as it may be aborted or late by then. One that finds no pages now is let off: the first always finds those that it had."""
        while self._suspects:
            seq, end = self._suspects[0]
            plan = self.scheduler.plan(only=seq) if seq in self._completions else StepPlan()
            if plan.entries:
                flight = self.runner.launch(self.runner.prepare(plan, began))
                try:
                    self._wait(flight)
                except (Exception, SystemExit) as fault:
                    self._moved += self._end(self._completions[seq].request, "error", fault)
                else:
                    self._finish(flight)
                if seq in self._completions and seq.computed < end:
                    return
            del self._suspects[0]

    def _wait(self, flight: Flight, following: Flight | None = None) -> None:
        """Until a step has landed; if it fails, all but preemptions is as it was before it and the following one were prepared."""
        try:
            self.runner.wait(flight)
        except BaseException:
            if following is not None:
                self.scheduler.roll_back(following.plan, ran=False)
            self.scheduler.roll_back(flight.plan, ran=flight.ran or following is not None)
            raise

    def _prepare_after(self, flight: Flight) -> Flight | None:
        with self.scheduler.landed(flight.plan):
            plan = self._plan(ahead=True)
            return self.runner.prepare(plan, self._clock()) if plan.entries else None

    def _finish(self, flight: Flight, following: Flight | None = None) -> None:
        """What has landed becomes tokens and pages, which the next step builds on: it starts, and clients see the rest."""
        self.stats.steps += 1
        if self.kv.tiers is not None:
            self._measure(self.kv.tiers, flight)
        if following is not None:
            self._each(flight, self._settle)
            self._flight = self.runner.launch(following)
            self._each(flight, self._commit)
        else:
            self._each(flight, self._settle, self._commit)

    def _each(self, flight: Flight, *actions: Callable[[Part, Flight], bool]) -> None:
        """Does something for every output that has not ended while the step was under way; a fault ends its request."""
        for part in flight.parts:
            completion = part.completion
            try:
                for do in actions:
                    if completion.finish_reason is None and do(part, flight):
                        self._moved.append(completion)
            except Exception as fault:
                self._moved += self._end(completion.request, "error", fault)

    def _settle(self, part: Part, flight: Flight) -> bool:
        """What the next step builds on: tokens and pages. Nothing has moved yet as clients see it."""
        completion, entry, row, at, pooled = part
        right = completion.grow(flight.ids[at + row.scores : at + row.scores + row.sample], entry.draft)
        if row.pooled and completion.request.pool is not None and flight.hidden is not None:
            completion.request.pool.add(flight.hidden[pooled : pooled + row.pooled])
            entry.seq.pooled += row.pooled
        entry.seq.scored += row.scores
        take = self.kv.advance if right == len(entry.draft) else self.kv.take_back
        take(entry.seq, entry.tokens + right)
        self.stats.computed_tokens += entry.tokens + len(entry.draft)
        return False

    def _measure(self, tiers: Tiers, flight: Flight) -> None:
        """How fast prompts are computed, from steps that hardly do anything else."""
        if (tokens := sum(e.tokens for e in flight.plan.entries)) >= PREFILL_SHARE * len(flight.plan.entries):
            tiers.prefill.add(tokens, flight.now - flight.began)
        self.stats.tier_faults = tiers.faults.count

    def _commit(self, part: Part, flight: Flight) -> bool:
        """What clients see of a step, and what that ends."""
        completion, entry, row, at, _ = part
        seq, request = entry.seq, completion.request
        complete = row.sample or seq.computed == seq.length
        if entry.hit is not None:
            self._count_hit(request, completion.index, entry.hit, flight.began)
        for i in range(at, at + row.scores) if row.scores else ():
            asked = completion.sampler.prompt_logprobs
            request.prompt_logprobs.append(self._logprobs(flight.sampled, i, asked) if asked >= 0 else None)
        at += row.scores
        if row.sample:
            self._show(completion, entry, flight, at)
        elif complete:
            completion.finish("length")
        if complete and request.clock.prefill_done is None:
            request.clock.prefill_done = flight.now
        if request.started < len(request.completions) and seq.pending < 2:
            for other in request.completions[1:]:
                self.scheduler.fork(seq, other.seq)
            request.started, seq.fork_at = len(request.completions), 0
        if request.beams is not None and row.sample:
            request.beams.branch(self.scheduler, self._completions)
        if completion.finish_reason is not None:
            self._retire(completion)
        return row.sample > 0 or completion.finish_reason is not None

    def _show(self, completion: Completion, entry: Entry, flight: Flight, at: int) -> None:
        """Accepts the tokens that grew from rows `at` and following, up to one that ends the output."""
        for row, token in enumerate(completion.unseen(), at):
            asked = completion.sampler.logprobs
            completion.accept(token, self._logprobs(flight.sampled, row, asked) if asked >= 0 else None, flight.now)
            self.stats.generated_tokens += 1
            if completion.finish_reason is not None:
                break
        if self.speculator is not None and entry.draft:
            self.speculator.verified(entry, row - at)

    def _count_hit(self, request: Request, index: int, hit: Hit, began: float) -> None:
        stats, page = self.stats, self.kv.page_size
        host, disk = hit.restored("host") * page, hit.restored("disk") * page
        cached = 0 if hit.restored("") else hit.tokens
        request.clock.schedule(index, began, cached, host, disk)
        stats.cached_tokens += cached
        stats.restored_host_tokens += host
        stats.restored_disk_tokens += disk
        stats.restores_chosen += host + disk > 0
        stats.recomputes_chosen += hit.declined > 0

    def _logprobs(self, sampled: Sampled, row: int, alternatives: int) -> TokenLogprobs:
        """The token of a sampled row and its `alternatives`; BackendError if they make no sense."""
        ids, logprobs, ranks, top_ids, top_logprobs = sampled
        if logprobs is None or ranks is None or top_ids is None or top_logprobs is None:
            raise BackendError(f"backend {self.model.backend.name!r} returned no logprobs for a row that asked for them")
        tokens = [int(ids[row]), *top_ids[row, :alternatives].tolist()]
        values = [float(logprobs[row]), *top_logprobs[row, :alternatives].tolist()]
        known = all(0 <= token < self.model.vocab_size for token in tokens)
        if not known or not len(tokens) == len(values) == alternatives + 1 or not all(value < 1e-3 for value in values):
            raise BackendError(f"backend {self.model.backend.name!r} returned logprobs {values!r:.200} of tokens {tokens!r:.200}")
        found: TokenLogprobs = {}
        for token, value, rank in zip(tokens, values, [int(ranks[row]), *range(1, alternatives + 1)]):
            found.setdefault(token, Logprob(value, rank, self.tokenizer.token_text(token), self.tokenizer.token_bytes(token)))
        return found

    def _retire(self, completion: Completion) -> None:
        self.scheduler.remove(completion.seq)
        if self.speculator is not None:
            self.speculator.forget(completion.seq)
        del self._completions[completion.seq]

    def _end(self, request: Request, reason: str, fault: BaseException | None = None) -> list[Completion]:
        """Ends all outputs of a request that still run."""
        live = [c for c in request.completions if c.seq in self._completions]
        request.error = None if fault is None else self._typed(fault)
        for completion in live:
            try:
                completion.finish(reason)
            except Exception as second:
                completion.finish("error")
                request.error = self._typed(second)
            self._retire(completion)
        if request.beams is not None and fault is None:
            request.completions = request.beams.results(reason)
        return live

    def _report(self, moved: list[Completion]) -> list[RequestOutput]:
        """News of the requests that `moved` belong to; forgets those that have finished."""
        news: dict[int, dict[Completion, None]] = {}
        for completion in moved:
            request = completion.request
            if request.id in self._requests and (request.stream or request.finished):
                news.setdefault(request.id, {})[completion] = None
        outputs = [self._requests[number].output(list(news[number]), self._clock) for number in sorted(news)]
        for output in outputs:
            if output.finished:
                self.stats.finished_requests += 1
                del self._requests[output.request_id]
        if not self._requests:
            self.kv.check_idle()
        return outputs

    def _typed(self, fault: BaseException) -> TriviumError:
        if isinstance(fault, TriviumError):
            return fault
        error = BackendError(f"backend {self.model.backend.name!r}: a step failed: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        return error
