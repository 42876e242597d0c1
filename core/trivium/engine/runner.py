"""One step on the device: a plan's pages reserved, its Batch built, run and waited for, or undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trivium.engine.adapters import Adapters
from trivium.engine.executor import Model
from trivium.engine.request import Completion
from trivium.errors import BackendError
from trivium.ops import Batch, SampleInputs, Sampled, Span
from trivium.ops.batch import F32, I32
from trivium.plugin.contract import Step
from trivium.sampling import SamplerState, build_inputs
from trivium.sched import Entry, RowMap, Scheduler, Sequence as Stream, StepPlan, make_batch, sampled_rows

_NO_ROWS = build_inputs([], 1)
_NOTHING = Sampled(np.zeros(0, np.int32))


@dataclass
class Stats:
    """Totals since the start. device_seconds: from run() to the return of tokens(); draft_seconds: spent on proposing drafts;
    host_seconds: the rest of the steps' time, in which the device has nothing to do. accepted_by_position[j]: drafts that came
    true in the j-th place of their step. failed_drafts: proposals that raised. cached_tokens: found at admission, in the pool or a
    tier; restored_*: those of them that came from a tier. restores_chosen, recomputes_chosen: admissions that found more in a tier
    and took it, or computed it as that was quicker. tier_faults: pages that could not be moved or read, or were not what they
    should be. finished_requests: all that ended, also aborted. In a snapshot: sequences that run and wait, tokens of the latter,
    pages of the KV cache and how many are free."""

    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    restored_host_tokens: int = 0
    restored_disk_tokens: int = 0
    restores_chosen: int = 0
    recomputes_chosen: int = 0
    tier_faults: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    failed_drafts: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages: int = 0
    free_pages: int = 0


class Part(NamedTuple):
    """What a step does for one output. `row`: the rows it wants, which begin at `at` among all that are sampled or scored, and at
    `pooled` among those whose hidden states are wanted."""

    completion: Completion
    entry: Entry
    row: RowMap
    at: int
    pooled: int


@dataclass(slots=True, eq=False)
class Flight:
    """A step on its way, planned at `began` and on the device since `started`. batch: its arrays, made before the tokens that the
    step before it gives are known: those belong to `holes`, indices of entries. rows, pooled: how many tokens and how many hidden
    states it will give. fault: why there is nothing to wait for. Once it has landed: what was sampled, its ids, the pooled rows'
    hidden states (None: there are none), when that was, and how long the device took."""

    plan: StepPlan
    began: float
    parts: list[Part] = field(default_factory=list)
    rows: int = 0
    pooled: int = 0
    holes: list[int] = field(default_factory=list)
    batch: Batch | None = None
    step: Step | None = None
    started: float = 0.0
    ran: bool = False
    fault: BaseException | None = None
    sampled: Sampled = _NOTHING
    ids: list[int] = field(default_factory=list)
    hidden: F32 | None = None
    now: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False, repr=False)
class Runner:
    """Runs plans. `completions`: the output that each sequence under the scheduler belongs to (the engine's own mapping). watched:
    the hidden states of all rows are wanted, for a drafter."""

    model: Model
    _scheduler: Scheduler
    _completions: Mapping[Stream, Completion]
    _stats: Stats
    _clock: Callable[[], float]
    _kept: dict[Any, SampleInputs] = field(default_factory=dict)
    watched: bool = False

    def prepare(self, plan: StepPlan, began: float) -> Flight:
        """Reserves pages and builds the arrays as far as tokens are known. A fault, here and in launch(), is raised by wait()."""
        flight = Flight(plan, began)
        try:
            for seq in plan.preempted:
                self._scheduler.preempt(seq)
                self._stats.preemptions += 1
                self._completions[seq].request.clock.preempt(seq.order[2], began)
            self._scheduler.reserve(plan)
            for entry, row in zip(plan.entries, rows := [sampled_rows(entry, self.watched) for entry in plan.entries]):
                flight.parts.append(Part(self._completions[entry.seq], entry, row, flight.rows, flight.pooled))
                flight.rows += row.scores + row.sample
                flight.pooled += row.pooled
            flight.holes = [i for i, entry in enumerate(plan.entries) if entry.seq.due]
            flight.batch = make_batch(plan.entries, rows, self._scheduler.kv, _NO_ROWS)
        except BaseException as fault:
            flight.fault = fault
        return flight

    def launch(self, flight: Flight) -> Flight:
        """Puts in the tokens that were missing, copies pages and starts the step on the device."""
        if flight.batch is None:
            return flight
        try:
            tokens, ends = flight.batch.token_ids, flight.batch.query_starts
            for i in flight.holes:
                tokens[ends[i + 1] - 1] = flight.plan.entries[i].seq.last
            flight.batch.sampling = build_inputs(_sampler_rows(flight), self.model.vocab_size, self._kept)
            if self.model.lora is not None:
                flight.batch.adapters = self._adapters(self.model.lora, flight, ends)
            self._stage_images(flight, tokens, ends)
            self._move_pages(flight.plan)
            flight.started, flight.ran = self._clock(), True
            flight.step = self.model.executable.run(flight.batch)
        except BaseException as fault:
            flight.fault = fault
        return flight

    def _adapters(self, lora: Adapters, flight: Flight, ends: I32) -> I32:
        """The slot of each token's adapter, which is put there if need be: int32[tokens]."""
        held = {seq.adapter for seq in self._scheduler.running}
        return lora.place([entry.seq.adapter for entry in flight.plan.entries], held).repeat(np.diff(ends))

    def _stage_images(self, flight: Flight, tokens: I32, ends: I32) -> None:
        """What stands for images among the step's tokens; what the tower takes for it counts as the device's time."""
        parts = list[tuple[int, Span]]()
        for i, (seq, start, count, *_) in enumerate(flight.plan.entries):
            if seq.media and start < seq.media[-1].stop:
                cuts = (span.cut(start, start + count) for span in seq.media)
                parts += [(int(ends[i]) + cut.start - start, cut) for cut in cuts if cut is not None]
        if parts and self.model.images is not None:
            flight.started = self._clock()
            self.model.images.stage(tokens, parts)
            self.charge(flight)

    def _move_pages(self, plan: StepPlan) -> None:
        """What the pool has given away goes to the tiers; then what is restored comes in, and shared or kept pages are copied."""
        kv, session = self._scheduler.kv, self.model.session
        if kv.tiers is not None:
            kv.tiers.save(session, kv.pool.evicted)
            kv.pool.evicted.clear()
        for seq, hit in [(entry.seq, entry.hit) for entry, _, _ in plan.undo if entry.hit is not None]:
            kv.restore(session, seq, hit)
            self._completions[seq].request.clock.land(self._clock())
        if copies := plan.copies:
            session.copy_pages([copy.src for copy in copies], [copy.dst for copy in copies])

    def wait(self, flight: Flight) -> None:
        """Until it has landed. If this raises, or the engine can't use what it gave, the flight is to be undone."""
        if (tiers := self._scheduler.kv.tiers) is not None:
            tiers.settle()  # while the step is still on the device
        if flight.fault is not None:
            raise flight.fault
        assert flight.step is not None
        started = flight.started
        try:
            flight.sampled = flight.step.tokens()
            flight.hidden = self._hidden(flight, flight.step) if flight.pooled else None
        finally:
            flight.now = self.charge(flight)
        flight.seconds = flight.now - started
        flight.ids = self._check_sampled(flight)

    def charge(self, flight: Flight) -> float:
        """Counts the device's time up to now, which is returned."""
        now = self._clock()
        self._stats.device_seconds += now - flight.started
        flight.started = now
        return now

    def _hidden(self, flight: Flight, step: Step) -> F32:
        """float32[pooled rows, hidden_size]."""
        hidden, want = step.output("hidden"), (flight.pooled, self.model.hidden_size)
        if hidden.shape != want:
            raise BackendError(f"the backend returned hidden states of shape {hidden.shape}, not {want}")
        return hidden

    def _check_sampled(self, flight: Flight) -> list[int]:
        want, vocab = flight.rows, self.model.vocab_size
        ids: list[int] = flight.sampled.ids.tolist()
        if len(ids) != want or (want and not (min(ids) >= 0 and max(ids) < vocab)):
            raise BackendError(f"the backend returned {ids!r} for {want} rows of a vocabulary of {vocab}")
        return ids


def _sampler_rows(flight: Flight) -> list[tuple[SamplerState, int, int]]:
    found: list[tuple[SamplerState, int, int]] = []
    for completion, entry, row, *_ in flight.parts:
        seq, sampler = completion.seq, completion.sampler
        if row.scores:
            targets = seq.tokens(row.start + 1, row.start + 1 + row.scores).tolist()
            found.extend((sampler, row.start + 1 + i, target) for i, target in enumerate(targets))
        if row.sample:
            score = 0 if completion.over else -1  # what has ended is not to be sampled
            found.append((sampler, seq.length, score))
            found.extend((state, seq.length + i, score) for i, state in enumerate(entry.states, 1))
    return found
