"""Gives drafts to the entries of a plan, and only as many as pay for themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trivium.engine.request import Completion
from trivium.engine.runner import Flight, Stats
from trivium.engine.speculation.drafter import Ask, Drafter, Seen, Speculative
from trivium.sched import Entry, Scheduler, Sequence, StepPlan

MAX_FAILURES = 3
"""Proposals in a row that may raise before there are none any more."""
MEMORY = 0.95
"""What an older verification of a sequence counts against the next newer one."""
RECOVERY = 0.98
"""The same, for each step that the sequence got no drafts in."""
AGE = 32
"""Steps after which a new measurement of a time takes the place of the older ones."""
AGING = 0.998
"""What is left, after each step, of a time that is not measured any more."""


class _Measured:
    """A time that is measured over and over. Disturbances only add to it, so less counts more than more; and the longer ago the
    last measurement is, the less is believed to be left of it: so it is measured again."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at = -AGE

    def add(self, seconds: float, now: int) -> None:
        if now - self._at >= AGE:
            self._seconds = seconds
        self._seconds += (seconds - self._seconds) * (0.5 if seconds < self._seconds else 0.1)
        self._at = now

    def at(self, now: int) -> float:
        """What is believed at step `now`."""
        return self._seconds * AGING ** (now - self._at)


class Costs:
    """What steps take, by measurement: seconds of a step by its number of tokens, and seconds of drafting one place further."""

    def __init__(self) -> None:
        self._steps: dict[int, _Measured] = {}
        self._place = _Measured()
        self._now = 0

    def step(self, tokens: int, seconds: float) -> None:
        """A step of decodes with `tokens` tokens took that long."""
        self._now += 1
        self._steps.setdefault(tokens, _Measured()).add(seconds, self._now)

    def proposal(self, places: int, seconds: float) -> None:
        """Drafts of at most `places` tokens took that long, for sequences that the drafter knew."""
        self._place.add(seconds / places, self._now)

    def knows(self, tokens: int) -> bool:
        """Whether a step as small as this was measured."""
        return min(self._steps, default=tokens + 1) <= tokens

    def best(self, tokens: int, chances: Seq[float], places: Seq[int]) -> int:
        """How many drafts make the most tokens a second in a step of `tokens` known ones, if draft i, at place places[i] of its
        sequence, comes true with chances[i]. Sizes between measured ones are interpolated, no size costs more than a larger one,
        and those above all measured ones are taken to cost what the largest did: so they are tried."""
        sizes, counts = sorted(self._steps), np.arange(len(chances) + 1)
        measured = np.array([self._steps[size].at(self._now) for size in sizes])
        seconds = np.interp(tokens + counts, sizes, np.minimum.accumulate(measured[::-1])[::-1])
        seconds += self._place.at(self._now) * np.maximum.accumulate([0, *places])
        gained = tokens + np.cumsum([0.0, *chances])
        return int(np.argmax(gained / np.maximum(seconds, 1e-9)))


class _Record:
    """How the drafts of one sequence have done, the recent ones counting most. Where nothing is known it is one half; the longer
    no draft was tried the more is hoped for, so that one is tried again."""

    def __init__(self) -> None:
        self._right = 0.0
        self._tried = 0.0
        self._hope = 0.5
        self.fresh = True
        """No draft was asked for yet: the drafter will have to take in the whole sequence first."""

    @property
    def rate(self) -> float:
        """The chance that a draft comes true if those before it have."""
        return (self._right + self._hope) / (self._tried + 1.0)

    def note(self, drafted: int, accepted: int) -> None:
        self._right = self._right * MEMORY + accepted
        self._tried = self._tried * MEMORY + min(accepted + 1, drafted)
        self._hope = 0.5

    def rest(self) -> None:
        self._right *= RECOVERY
        self._tried *= RECOVERY
        self._hope = 1.0 - (1.0 - self._hope) * RECOVERY


@dataclass(eq=False, repr=False)
class Speculator:
    """Between the plan and the step. `completions` is the engine's own mapping."""

    _config: Speculative
    _drafter: Drafter
    _scheduler: Scheduler
    _completions: Mapping[Sequence, Completion]
    _stats: Stats
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._stats.accepted_by_position = [0] * self._config.num_speculative_tokens
        self._costs = Costs()
        self._records: defaultdict[Sequence, _Record] = defaultdict(_Record)
        self._in_a_row = 0
        self._last: Flight | None = None

    def extend(self, plan: StepPlan) -> None:
        """Puts drafts behind decoding entries, out of tokens and pages that nobody needs in this step."""
        seen, self._last = self._seen(self._last), None
        if plan.preempted or self._in_a_row >= MAX_FAILURES:
            return
        wanted = self._wanted(plan)
        asks, places = list[Ask](), list[int]()
        for at, count in zip(wanted, self._limits(plan, wanted)):
            entry = plan.entries[at]
            allowed = self._scheduler.allow_drafts(plan, entry, count)
            if allowed > 0:
                asks.append(Ask(entry.seq, allowed, self._completions[entry.seq].sampler))
                places.append(at)
        for at, ask, draft in zip(places, asks, self._propose(asks, seen)):
            states = ask.sampler.ahead(draft)[1:]  # fewer than drafts if not all of them are possible
            plan.entries[at] = plan.entries[at]._replace(draft=tuple(draft[: len(states)]), states=tuple(states))

    def _seen(self, flight: Flight | None) -> list[Seen]:
        """What the drafter is to see of the last step, which has been settled: of all that has not ended."""
        if flight is None or flight.hidden is None or not self._drafter.watches:
            return []
        live = [p for p in flight.parts if p.entry.seq in self._completions and p.completion.request.pool is None]
        spans = [(p.entry.seq, p.entry.start, p.pooled) for p in live]
        return [(seq, n, flight.hidden[at : at + seq.computed - n]) for seq, n, at in spans if seq.computed > n]

    def measure(self, flight: Flight) -> None:
        """A step has landed."""
        entries, self._last = flight.plan.entries, flight
        if all(entry.tokens == 1 for entry in entries):
            self._costs.step(sum(1 + len(entry.draft) for entry in entries), flight.seconds)

    def verified(self, entry: Entry, accepted: int) -> None:
        """The target has made `accepted` of the entry's drafts its own."""
        drafted, clock = len(entry.draft), self._completions[entry.seq].request.clock
        clock.drafted += drafted
        clock.accepted += accepted
        self._stats.draft_tokens += drafted
        self._stats.accepted_tokens += accepted
        for place in range(accepted):
            self._stats.accepted_by_position[place] += 1
        self._records[entry.seq].note(drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._records.pop(seq, None)
        self._drafter.forget(seq)

    def _wanted(self, plan: StepPlan) -> dict[int, int]:
        """Index in the plan of each entry that may have drafts: its last known token is computed, more than one is to come."""
        wanted = {}
        for at, entry in enumerate(plan.entries):
            seq = entry.seq
            left = seq.limit - seq.length - 1
            if entry.hit is None and entry.tokens == 1 == seq.pending and left > 0 and not seq.lockstep:
                wanted[at] = min(left, self._config.num_speculative_tokens)
        return wanted

    def _limits(self, plan: StepPlan, wanted: Mapping[int, int]) -> list[int]:
        """How many drafts each of the `wanted` is worth."""
        if not self._config.adaptive:
            return list(wanted.values())
        known = sum(entry.tokens for entry in plan.entries)
        if not wanted or not self._costs.knows(known):
            return [0] * len(wanted)
        records = [self._records[plan.entries[at].seq] for at in wanted]
        places = ((i, place) for i, most in enumerate(wanted.values()) for place in range(1, most + 1))
        ranked = sorted((-(records[i].rate ** place), place, i) for i, place in places)
        limits = [0] * len(records)
        for _, place, i in ranked[: self._costs.best(known, [-chance for chance, _, _ in ranked], [p for _, p, _ in ranked])]:
            limits[i] = place
        for record, limit in zip(records, limits):
            if limit == 0:
                record.rest()
        return limits

    def _propose(self, asks: Seq[Ask], seen: Seq[Seen]) -> Seq[Seq[int]]:
        if not asks and not seen:
            return []
        began = self._clock()
        try:
            self._drafter.watch(seen)
            drafts = self._drafter.propose(asks) if asks else ()
            self._in_a_row = 0
        except Exception as fault:
            import logging

            self._in_a_row += 1
            self._stats.failed_drafts += 1
            drafts = [()] * len(asks)
            last = "" if self._in_a_row < MAX_FAILURES else "; there will be no more"
            message = "no drafts for this step, as proposing them failed%s: %s"
            logging.getLogger(__name__).warning(message, last, fault, exc_info=fault)
        seconds = self._clock() - began
        self._stats.draft_seconds += seconds
        records = [self._records[ask.seq] for ask in asks]
        if asks and not any(record.fresh for record in records):
            self._costs.proposal(max(ask.limit for ask in asks), seconds)
        for record in records:
            record.fresh = False
        return drafts
