"""One step on the device: a plan's pages reserved, its Batch built, run and waited for; undone if any of that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trivium.engine.executor import Model
from trivium.engine.request import Completion
from trivium.errors import BackendError
from trivium.ops import Sampled
from trivium.plugin.contract import Step
from trivium.sampling import SamplerState, build_inputs
from trivium.sched import Entry, RowMap, Scheduler, StepPlan, make_batch, sampled_rows
from trivium.sched import Sequence as Stream


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


class Flight(NamedTuple):
    """A step under way."""

    plan: StepPlan
    rows: list[RowMap]
    step: Step
    started: float


class Runner:
    """Runs plans. `completions`: the output that each sequence under the scheduler belongs to (the engine's own mapping)."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        completions: Mapping[Stream, Completion],
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self._scheduler = scheduler
        self._completions = completions
        self._stats = stats
        self._clock = clock

    def launch(self, plan: StepPlan, began: float) -> Flight:
        """Reserves pages, builds the Batch, starts it on the device. Undone if it fails."""
        ran = False
        try:
            self._reserve(plan, began)
            rows = [sampled_rows(entry) for entry in plan.entries]
            inputs = build_inputs(self._sampler_rows(plan.entries, rows), self.model.vocab_size)
            batch = make_batch(plan.entries, rows, self._scheduler.kv, inputs)
            started, ran = self._clock(), True
            return Flight(plan, rows, self.model.executable.run(batch), started)
        except BaseException:
            self._scheduler.roll_back(plan, ran=ran)
            raise

    def _reserve(self, plan: StepPlan, began: float) -> None:
        for seq in plan.preempted:
            self._scheduler.preempt(seq)
            self._stats.preemptions += 1
            self._completions[seq].request.clock.preempt(seq.order[2], began)
        self._scheduler.reserve(plan)

    def wait(self, flight: Flight) -> tuple[Sampled, list[int], float]:
        """What the device sampled, its ids, and when. The step is undone if it fails or returns nonsense."""
        try:
            try:
                sampled = flight.step.tokens()
            finally:
                now = self._clock()
                self._stats.device_seconds += now - flight.started
            return sampled, self._check_sampled(sampled, flight.rows), now
        except BaseException:
            self._scheduler.roll_back(flight.plan, ran=True)
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
