"""The scheduler alone: order, budgets, progress, and plans that can always be carried out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_model import spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trivium.errors import CapacityError
from trivium.kv import Copy, KVCache, root_key
from trivium.sched import Scheduler, Sequence, StepPlan, sampled_rows

PAGE = 4
KINDS = {"full": (None,), "window": (None, 7), "state": (None, "recurrent"), "window only": (6,)}


@dataclass
class Simulation:
    """Runs plans as the engine would; every computed end makes one token until `total` are there."""

    scheduler: Scheduler
    totals: dict[Sequence, int] = field(default_factory=dict)
    preempted: dict[Sequence, int] = field(default_factory=dict)
    finished: list[Sequence] = field(default_factory=list)

    def add(self, prompt: list[int], new: int, order: tuple[int, int, int], score_end: int = 0) -> Sequence:
        self.scheduler.check_fits(len(prompt) + new - 1)
        seq = Sequence(prompt, root_key("m"), order, score_end=score_end)
        self.totals[seq] = len(prompt) + new
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        before = self.snapshot()
        plan = self.scheduler.plan()
        assert self.snapshot() == before, "planning changes nothing"
        assert plan.entries, "no step without progress"
        self.check_plan(plan)
        for seq in plan.preempted:
            self.preempted[seq] = self.preempted.get(seq, 0) + 1
            self.scheduler.preempt(seq)
        self.scheduler.reserve(plan)
        self.scheduler.check()
        for entry in plan.entries:
            row = sampled_rows(entry)
            entry.seq.scored += row.scores
            self.scheduler.kv.advance(entry.seq, entry.tokens)
            if row.sample:
                entry.seq.append(entry.seq.length % 3)
            if entry.seq.length == self.totals[entry.seq]:
                self.scheduler.remove(entry.seq)
                self.finished.append(entry.seq)
        self.scheduler.check()
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        s = self.scheduler
        assert sum(e.tokens for e in plan.entries) <= s.max_tokens and all(e.tokens > 0 for e in plan.entries)
        rows = [sampled_rows(e) for e in plan.entries]
        assert sum(r.scores + r.sample for r in rows) <= s.max_seqs
        first = min(self.scheduler.running + self.scheduler.waiting, key=lambda seq: seq.order)
        assert any(e.seq is first for e in plan.entries) or s.waiting[0] is first, "the first in order moves"
        assert not {e.seq for e in plan.entries} & set(plan.preempted)
        admitted = [e.seq for e in plan.entries if e.hit is not None]
        assert admitted == s.waiting[: len(admitted)], "admitted in order, nobody is passed over"
        assert all(e.start == e.seq.computed for e in plan.entries if e.hit is None)
        decodes = [e.seq for e in plan.entries if e.hit is None and e.seq.pending == 1]
        chunks = -(-s.max_tokens // PAGE)  # pages that earlier prompts may take first
        found = sum(len(pages) for e in plan.entries if e.hit is not None for pages in e.hit.pages)  # or have again
        if not plan.preempted and s.kv.pool.available - found >= (len(s.running) + chunks) * len(s.kv.paged):
            assert decodes == [seq for seq in s.running if seq.pending == 1], "every decode runs while there are pages"

    def snapshot(self) -> tuple[object, ...]:
        s = self.scheduler
        state = [(id(q), q.computed, q.row, q.blocks, tuple(q.first), q.running) for q in s.running + s.waiting]
        pool = s.kv.pool
        return state, tuple(pool.refs), tuple(pool._free), tuple(pool._idle), tuple(pool._pages.items()), s.kv._tables.tobytes()


def make(windows: tuple[object, ...], pages: int, max_seqs: int, max_tokens: int) -> Simulation:
    kv = KVCache(spec_of(windows, PAGE), pages, min(max_seqs, max_tokens))  # type: ignore[arg-type]
    return Simulation(Scheduler(kv, max_seqs, max_tokens))


requests = st.lists(
    st.tuples(
        st.integers(1, 25), st.integers(1, 15), st.integers(0, 2), st.integers(0, 30), st.booleans()
    ),  # prompt, new tokens, priority, step of arrival, scored
    min_size=1, max_size=14,
)  # fmt: skip


@given(st.sampled_from(sorted(KINDS)), requests, st.integers(22, 60), st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**32))
@example(  # an earlier prompt finds pages that nobody owned, and takes them from a decode
    "window",
    [*[(1, 1, 0, 0, False)] * 4, (10, 12, 0, 10, True), (11, 1, 0, 0, False), (13, 1, 0, 24, False), (19, 3, 0, 21, False),
     (19, 10, 0, 0, False)],
    24, 4, 11, 0,
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_arrivals_all_finish_within_every_limit(
    kind: str, arrivals: list[tuple[int, int, int, int, bool]], pages: int, max_seqs: int, max_tokens: int, seed: int
) -> None:
    sim, rng = make(KINDS[kind], pages, max_seqs, max_tokens), random.Random(seed)
    todo = sorted(((step, n) for n, (*_, step, _) in enumerate(arrivals)), key=lambda x: x[0])
    steps = 0
    while todo or sim.scheduler.running or sim.scheduler.waiting:
        while todo and (todo[0][0] <= steps or not (sim.scheduler.running or sim.scheduler.waiting)):
            _, n = todo.pop(0)
            length, new, priority, _, scored = arrivals[n]
            prompt = [rng.randrange(2) for _ in range(length)]
            sim.add(prompt, new, (priority, n, 0), length - 1 if scored else 0)
        sim.step()
        steps += 1
        assert steps < 3000
    assert len(sim.finished) == len(arrivals)
    assert all(seq.scored == seq.score_end for seq in sim.finished)
    sim.scheduler.kv.check_idle()


@pytest.mark.faults
def test_o19_preempted_requests_keep_their_place_and_low_priority_gets_on() -> None:
    sim, rng = make((None,), 40, 12, 48), random.Random(19)
    arrivals = sorted((rng.randrange(900), rng.randrange(2)) for _ in range(200))
    seqs, step, high_ended = [], 0, 0
    while len(sim.finished) < 200:
        while len(seqs) < 200 and arrivals[len(seqs)][0] <= step:
            prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 60))]
            seqs.append(sim.add(prompt, rng.randrange(1, 40), (arrivals[len(seqs)][1], len(seqs), 0)))
        if sim.scheduler.running or sim.scheduler.waiting:
            plan = sim.step()
            waiting = sim.scheduler.waiting
            for seq in plan.preempted:
                behind = waiting[waiting.index(seq) + 1 :] if seq in waiting else []
                assert all(other.order > seq.order for other in behind), "first among equals, before whoever came later"
            high_ended = step if any(s.order[0] == 0 for s in sim.scheduler.running + waiting) else high_ended
        step += 1
    assert sim.preempted and max(sim.preempted.values()) <= 20
    assert {seq.order[0] for seq in sim.finished} == {0, 1}
    assert sim.finished[-1].order[0] == 1
    assert all(not s.running for s in seqs)


def test_among_equals_the_first_to_arrive_is_never_preempted() -> None:
    sim = make((None,), 12, 8, 64)
    seqs = [sim.add([n] * 10, 30, (0, n, 0)) for n in range(6)]
    while len(sim.finished) < 6:
        sim.step()
    assert seqs[0] not in sim.preempted and sim.preempted
    assert sim.finished[0] is seqs[0]


def test_a_more_urgent_request_takes_seat_and_pages_of_a_less_urgent_one() -> None:
    sim = make((None,), 12, 2, 64)
    slow = [sim.add([n] * 12, 20, (1, n, 0)) for n in range(2)]
    sim.step()
    urgent = sim.add([7] * 20, 5, (0, 9, 0))
    plan = sim.step()
    assert plan.preempted == [slow[1]] and [e.seq for e in plan.entries] == [urgent, slow[0]]
    equal = sim.add([8] * 4, 5, (0, 10, 0))
    assert sim.step().preempted == [slow[0]] and equal.running


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    sim = make((None,), 100, 8, 10)
    short, long = sim.add([1], 50, (0, 0, 0)), sim.add([2] * 30, 5, (0, 1, 0))
    assert [(e.seq, e.tokens) for e in sim.step().entries] == [(short, 1), (long, 9)]
    assert [(e.seq, e.tokens) for e in sim.step().entries] == [(short, 1), (long, 9)]
    late = sim.add([3] * 9, 5, (0, 2, 0))
    assert [(e.seq, e.tokens) for e in sim.step().entries] == [(short, 1), (long, 9)]
    assert [(e.seq, e.tokens) for e in sim.step().entries] == [(short, 1), (long, 3), (late, 6)]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make((None, 7), 10, 4, 16).scheduler
    scheduler.check_fits(28)
    with pytest.raises(CapacityError, match="29 tokens need 11 pages of the KV cache, which has 10 of 4 tokens each"):
        scheduler.check_fits(29)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ran", [False, True])
def test_a_rolled_back_step_leaves_everything_as_it_was(kind: str, ran: bool) -> None:
    sim = make(KINDS[kind], 60, 4, 12)
    for n in range(4):
        sim.add([n] * 9, 20, (0, n, 0))
    for _ in range(6):
        sim.step()
        s = sim.scheduler
        held = {q: s.kv.held(q) for q in s.running}
        computed = {q: q.computed for q in s.running}
        running, waiting = list(s.running), list(s.waiting)
        plan = s.plan()
        s.reserve(plan)
        s.roll_back(plan, ran=ran)
        s.check()
        assert (s.running, s.waiting) == (running, waiting)
        for q in running:
            kept = 0 if kind == "state" else computed[q] - computed[q] % PAGE
            touched = ran and any(e.seq is q for e in plan.entries)
            assert q.computed == (kept if touched else computed[q])
            assert s.kv.held(q) == ([] if touched and kind == "state" else held[q])
    while sim.scheduler.running:
        sim.step()
    sim.scheduler.kv.check_idle()


def test_a_reservation_that_fails_halfway_is_undone() -> None:
    sim = make((None,), 40, 4, 40)
    sim.add([1] * 8, 9, (0, 0, 0))
    sim.step()
    sim.add([2] * 9, 9, (0, 1, 0))
    before = sim.snapshot()
    plan = sim.scheduler.plan()
    grow, calls = sim.scheduler.kv.grow, []

    def failing(seq: Sequence, tokens: int) -> list[Copy]:
        calls.append(seq)
        if len(calls) == 2:
            raise RuntimeError("no")
        return grow(seq, tokens)

    sim.scheduler.kv.grow = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError):
        sim.scheduler.reserve(plan)
    sim.scheduler.roll_back(plan, ran=False)
    sim.scheduler.kv.grow = grow  # type: ignore[method-assign]
    assert sim.snapshot()[0] == before[0]
    sim.scheduler.check()
    assert np.count_nonzero(sim.scheduler.kv.pool.refs) == 2


def simulate(seed: int, count: int, urgent: float, gap: float) -> tuple[Simulation, list[Sequence], dict[Sequence, float]]:
    """`count` arrivals, `gap` seconds apart on the mean; `urgent`: share of priority 0, the rest has 1. A step takes a second and a
    tenth of one for every token. Returns also when each ended."""
    sim, rng = make((None,), 24, 6, 24), random.Random(seed)
    due = sorted((rng.uniform(0, count * gap), 0 if rng.random() < urgent else 1) for _ in range(count))
    now, seqs, ends = 0.0, list[Sequence](), dict[Sequence, float]()
    while len(ends) < count:
        while len(seqs) < count and (due[len(seqs)][0] <= now or not (sim.scheduler.running or sim.scheduler.waiting)):
            now = max(now, due[len(seqs)][0])
            prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 40))]
            seqs.append(sim.add(prompt, rng.randrange(1, 30), (due[len(seqs)][1], len(seqs), 0)))
        plan = sim.step()
        now += 1 + sum(entry.tokens for entry in plan.entries) / 10
        ends.update((seq, now) for seq in sim.finished if seq not in ends)
        for seq in plan.preempted:
            waiting = sim.scheduler.waiting
            later = [other for other in waiting if other.order > seq.order]
            assert seq not in waiting or waiting.index(seq) < len(waiting) - len(later), "before whoever came later"
    return sim, seqs, ends


@pytest.mark.faults
@given(st.integers(0, 2**32), st.integers(2, 60), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.1, 2.0, 10.0]))
@settings(max_examples=40, deadline=None)
def test_o19_everybody_ends_and_preemption_is_bounded(seed: int, count: int, urgent: float, gap: float) -> None:
    sim, seqs, _ = simulate(seed, count, urgent, gap)
    for seq in seqs:
        earlier = [other for other in seqs if other.order < seq.order]
        growth = sum(-(-other.length // 4) for other in earlier)
        assert sim.preempted.get(seq, 0) <= min(growth, 2 * len(earlier)), (
            "one who comes first takes pages a bounded number of times"
        )
    assert sum(sim.preempted.values()) <= 3 * count, "no thrashing"


@pytest.mark.faults
@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_o19_equals_begin_in_the_order_of_arrival_and_low_priority_gets_on_when_the_load_ends(seed: int) -> None:
    _, seqs, ends = simulate(seed, 40, 0.7, 0.1)
    for priority in (0, 1):
        alike = [seq for seq in seqs if seq.order[0] == priority]
        if alike:
            assert ends[alike[0]] <= min(ends[seq] for seq in alike) + 60, "the first to come is among the first to go"
    last_urgent = max((ends[seq] for seq in seqs if seq.order[0] == 0), default=0.0)
    low = [ends[seq] for seq in seqs if seq.order[0] == 1]
    assert all(end - last_urgent < 40 * len(low) for end in low), "they share the device among themselves afterwards"
