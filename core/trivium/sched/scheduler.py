"""Continuous batching with chunked prefill: decides, then applies, undoes or ends what one step does.

All unfinished sequences stand in one total order: priority (lower first), then arrival. Whoever is earlier gets pages first and may
take those of a later one, so the first always advances, nobody starves among equals, and a preempted sequence is again before
everything that arrived after it.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from trivium.errors import CapacityError
from trivium.kv import Copy, Hit, KVCache, Ledger, Stream

Order = tuple[int, int, int]
_order = attrgetter("order")


class Sequence(Stream):
    """One token stream under the scheduler. order: (priority, arrival, index within the request), unique.

    score_end: rows 0..score_end-1 are wanted for the logprobs of the next prompt token; scored: how many of them are done.
    limit: length at which it ends at the latest; up to it, a token is drawn once all known ones are computed. due: its last token
    stands for one that the device has still to give (see Scheduler.landed). fork_at: prefill stops there, so that others can begin
    with what is computed by then; 0: it doesn't. lockstep: its next token is chosen together with those of its siblings. pooled:
    the hidden states of the rows from here on are still wanted. adapter: what its tokens run with, compared by identity.
    """

    def __init__(self, tokens: Seq[int], root: bytes, order: Order, *, score_end: int = 0, limit: int = sys.maxsize) -> None:
        super().__init__(tokens, root)
        self.order = order
        self.score_end = score_end
        self.scored = 0
        self.limit = limit
        self.fork_at = 0
        self.lockstep = False
        self.pooled = sys.maxsize
        self.adapter: Any = None
        self.running = False
        self.due = False

    @property
    def reusable(self) -> int:
        """Leading tokens that needn't be computed if their pages are found: the last one is, and whatever is still to be scored or
        pooled."""
        return min(self.length - 1 if self.scored >= self.score_end else self.scored, self.pooled)

    @property
    def parked(self) -> bool:
        """It waits for its siblings (equal order up to the index), and makes way for them."""
        return self.lockstep and not self.pending


class Entry(NamedTuple):
    """`tokens` tokens of `seq` from position `start` on; `hit`: the cached prefix it begins with if it is admitted in this step;
    `draft`: guesses of what follows its last known token, computed along with it; `states`: what draws the token behind each."""

    seq: Sequence
    start: int
    tokens: int
    hit: Hit | None = None
    draft: tuple[int, ...] = ()
    states: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class StepPlan:
    """What one step does. Making it changes nothing; `copies` (to be made before it runs) and `undo` (entry, blocks it had, copies)
    are filled while Scheduler.reserve() applies it, undo with what it changes. spare_tokens, spare_pages: what nobody in this step
    uses or waits for."""

    entries: list[Entry] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    undo: list[tuple[Entry, int, list[Copy]]] = field(default_factory=list)
    spare_tokens: int = 0
    spare_pages: int = 0


class Scheduler:
    """Holds the running and the waiting sequences, both in order. `max_seqs` run at once; a step has at most `max_tokens` tokens
    and `max_seqs` sampled or scored rows. Those that run have at most `max_adapters` different adapters."""

    def __init__(self, kv: KVCache, max_seqs: int, max_tokens: int, max_adapters: int = 0) -> None:
        self.kv = kv
        self.max_seqs = min(max_seqs, max_tokens)
        self.max_tokens = max_tokens
        self.max_adapters = max_adapters
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.waiting_tokens = 0

    @property
    def queued(self) -> int:
        """Waiting sequences beyond those that find a free seat."""
        return max(len(self.waiting) - max(self.max_seqs - len(self.running), 0), 0)

    def check_fits(self, tokens: int) -> None:
        """Raises CapacityError if a sequence of `tokens` computed tokens could not run even alone."""
        need, have = self.kv.peak_pages(tokens), self.kv.pool.pages
        if need > have:
            lack = f"{tokens} tokens need {need} pages of the KV cache, which has {have} of {self.kv.page_size} tokens each"
            raise CapacityError(f"{lack}; shorten the prompt, lower max_tokens, or start with a larger cache")

    def add(self, seq: Sequence) -> None:
        """Puts a sequence in its place among the waiting ones."""
        insort(self.waiting, seq, key=_order)
        self.waiting_tokens += seq.length

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Adds a sequence that begins with what `parent` has computed: it runs on from there, unless that takes another's turn."""
        turn = len(self.running) < self.max_seqs and not (self.waiting and self.waiting[0].order < child.order)
        if not turn or not parent.running or not 0 < parent.computed < child.length:
            self.add(child)
        else:
            self.kv.fork(parent, child)
            child.running = True
            insort(self.running, child, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Takes out a sequence that has ended, for whatever reason, and gives its pages back."""
        self.kv.release(seq, ended=True)
        if _discard(self.running if seq.running else self.waiting, seq) and not seq.running:
            self.waiting_tokens -= seq.length
        seq.running = False

    def plan(self, only: Sequence | None = None) -> StepPlan:
        """The next step; `only`: one for this sequence alone, which takes nothing from outside the pool."""
        if only is None:
            return _Planner(self).plan(self.running, self.waiting)
        return _Planner(self, restore=False).plan([only] if only.running else [], [] if only.running else [only])

    @contextmanager
    def landed(self, plan: StepPlan) -> Iterator[None]:
        """Inside, the sequences of a step that is under way look as they will when it has been computed; tokens that it will give
        are 0 as yet."""
        flying = [entry for entry in plan.entries if entry.seq.running]
        for seq, start, tokens, *_ in flying:
            seq.computed += tokens
            if start + tokens == seq.length and seq.length + 1 < seq.limit and not seq.lockstep:
                seq.append(0)
                seq.due = True
        try:
            yield
        finally:
            for seq, _, tokens, *_ in flying:
                seq.computed -= tokens
                if seq.due:
                    seq.truncate(seq.length - 1)
                    seq.due = False

    def allow_drafts(self, plan: StepPlan, entry: Entry, count: int) -> int:
        """How many of `count` drafts may follow the entry; what they take is no longer spare."""
        seq, end = entry.seq, entry.start + entry.tokens
        blocks = max(seq.blocks, self.kv.blocks(end))
        kept = len(self.kv.recurrent) if self.kv.keeps(seq, end + 1) and not self.kv.keeps(seq, end) else 0
        count = max(min(count, plan.spare_tokens, self.kv.reach(seq, blocks, plan.spare_pages - kept) - end), 0)
        if count > 0:
            plan.spare_tokens -= count
            plan.spare_pages -= self.kv.pages_to_grow(seq, end + count, blocks) + kept
            seq.forked |= kept > 0
        return count

    def reserve(self, plan: StepPlan) -> None:
        """Admits and reserves what the plan needs, once its preempted sequences are: see preempt(). What it did is undone by
        roll_back()."""
        for entry in plan.entries:
            if entry.hit is not None or not self.kv.holds(entry.seq, entry.start + entry.tokens + len(entry.draft)):
                plan.undo.append((entry, entry.seq.blocks, []))
                if entry.hit is not None:
                    self._admit(entry.seq, entry.hit)
        for entry, _, copies in plan.undo:
            if entry.hit is not None:
                self.kv.fill(entry.seq, entry.hit)
            copies += self.kv.grow(entry.seq, entry.start + entry.tokens + len(entry.draft))
            plan.copies += copies

    def roll_back(self, plan: StepPlan, *, ran: bool) -> None:
        """Undoes reserve(), also one that failed halfway, for all that have not ended. `ran`: the pages written in this step may
        hold anything by now, or a later step was reserved upon it."""
        for entry, blocks, copies in reversed([undo for undo in plan.undo if undo[0].seq.running]):
            if entry.hit is not None:
                self.preempt(entry.seq)
            elif not ran or not self.kv.recurrent:
                self.kv.shrink(entry.seq, blocks, copies)
        for entry in plan.entries if ran else ():  # once all copies are undone: this may give pages away
            if entry.seq.running:
                self.kv.rewind(entry.seq)
        plan.undo.clear()

    def preempt(self, seq: Sequence) -> None:
        """Back to the waiting ones; its tokens are computed again, as far as its pages are not found in the cache. A parked one has
        nothing to compute: it comes back by add()."""
        parked = seq.parked
        self.kv.release(seq)
        if seq.running:
            seq.running = False
            _discard(self.running, seq)
            if not parked:
                self.add(seq)

    def check(self) -> None:
        """Raises AssertionError unless both lists are in order and hold exactly the owners of all pages."""
        for seqs, running in ((self.running, True), (self.waiting, False)):
            assert all(a.order < b.order for a, b in pairwise(seqs)), "sequences are out of order"
            assert all(s.running is running for s in seqs), "a sequence is in the wrong list"
        assert all(s.row < 0 for s in self.waiting), "a waiting sequence holds pages"
        assert len(self.running) <= self.max_seqs
        assert self.waiting_tokens == sum(s.length for s in self.waiting), "tokens that wait are miscounted"
        self.kv.check(self.running)

    def _admit(self, seq: Sequence, hit: Hit) -> None:
        _discard(self.waiting, seq)
        self.waiting_tokens -= seq.length
        insort(self.running, seq, key=_order)
        seq.running = True
        if hit.blocks:
            self.kv.adopt(seq, hit)


class _Planner:
    """One planning pass. Candidates come in order; who needs pages may take them from the last of the running ones behind it.

    tokens: left for prefill, once every running decode has its one. rows: left beyond the one that every running sequence may use.
    promised: pages that admitted prompts will need in later steps. adapters: those of admitted sequences.
    """

    def __init__(self, scheduler: Scheduler, *, restore: bool = True) -> None:
        self.kv = scheduler.kv
        self.restore = restore
        self.ledger = Ledger(self.kv.pool)
        self.alive = scheduler.running.copy()
        self.tokens = scheduler.max_tokens - [seq.length - seq.computed for seq in self.alive].count(1)
        self.rows = self.seats = scheduler.max_seqs - len(self.alive)
        self.promised = 0
        self.slots = scheduler.max_adapters
        self.adapters: set[Any] = set()
        self.open = True
        self.draft = StepPlan()

    def plan(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> StepPlan:
        candidates = takewhile(lambda _: self.open, waiting)  # once one was not admitted, the others needn't be looked at
        for seq in merge(running, candidates, key=_order) if waiting else running:
            if not seq.running:
                self.open = self.open and self._admit(seq)
            elif seq not in self.draft.preempted:
                self._continue(seq)
        self.draft.spare_tokens, self.draft.spare_pages = self.tokens, self.ledger.free - self.promised
        return self.draft

    def _continue(self, seq: Sequence) -> None:
        pending = seq.length - seq.computed
        if not pending or seq.computed == seq.fork_at > 0:
            return  # its end is under way, or it waits for its siblings
        decode = pending == 1
        if decode and self.kv.holds(seq, seq.length):
            self.draft.entries.append(Entry(seq, seq.computed, 1))
            return
        count = 1 if decode else self._chunk(seq, seq.computed, self.rows + 1)
        room = self._room(seq)
        while room <= 0 and self._evict(seq.order, seq):
            self.open = False
            room = self._room(seq)
        count = min(count, room)
        if count <= 0:
            self.open &= room > 0
            return
        self._schedule(Entry(seq, seq.computed, count), seq.blocks, decode)

    def _admit(self, seq: Sequence) -> bool:
        hit = self.kv.match(seq, seq.reusable, restore=self.restore)
        start = hit.tokens
        count = self._chunk(seq, start, max(self.rows, 1))
        if count <= 0 or self.rows <= 0 < self.seats or not self._make_way(seq, hit):
            return False
        for pages in hit.pages:
            self.ledger.take(pages)
        self.ledger.free -= hit.fresh
        self.seats -= 1
        self.rows -= 1
        self.adapters.add(seq.adapter)
        count = min(count, self.kv.reach(seq, hit.blocks, self.ledger.free) - start)
        self._schedule(Entry(seq, start, count, hit), hit.blocks, False)
        return True

    def _chunk(self, seq: Sequence, start: int, rows: int) -> int:
        """Tokens of `seq` that the token budget and `rows` rows allow; all or none where nothing is stored between steps."""
        count = min((seq.fork_at if start < seq.fork_at else seq.length) - start, self.tokens)
        if seq.scored < seq.score_end:
            count = min(count, max(seq.scored - start, 0) + rows)
        if not self.kv.spec.groups and count < seq.length:
            return 0
        return self.kv.chunk(seq, start, count)

    def _room(self, seq: Sequence) -> int:
        copies = sum(self.ledger.owners(page) > 1 for page in self.kv.written(seq)) if seq.forked else 0
        if self.kv.keeps(seq, seq.length):
            copies += len(self.kv.recurrent) - sum(self.ledger.owners(page) == 1 for page in seq.kept)
        return self.kv.reach(seq, seq.blocks, self.ledger.free - copies) - seq.computed

    def _make_way(self, seq: Sequence, hit: Hit) -> bool:
        """Whether a seat, a slot for its adapter and pages for all known tokens are there; sequences of a worse priority are
        preempted for them."""
        while self.seats <= 0 or self._lacks_pages(seq, hit) or self._lacks_slot(seq):
            if not self._evict((seq.order[0] + 1, -1, -1), seq):
                return False
        return True

    def _lacks_pages(self, seq: Sequence, hit: Hit) -> bool:
        owned = sum(self.ledger.owners(page) > 0 for pages in hit.pages for page in pages)
        return self.kv.peak_pages(seq.length) - owned > self.ledger.free - self.promised

    def _lacks_slot(self, seq: Sequence) -> bool:
        """Whether the running sequences and those that are admitted have other adapters in every slot."""
        if seq.adapter is None:
            return False
        used = {other.adapter for other in self.alive} | self.adapters
        return seq.adapter not in used and len(used - {None}) >= self.slots

    def _evict(self, order: Order, seq: Sequence) -> bool:
        """Plans to preempt the last of the running sequences if it stands after `order`; else one that is parked, a sibling of
        `seq` or later: it may wait for what is behind `seq`, and would for ever."""
        if self.alive and self.alive[-1].order > order:
            victim = self.alive.pop()
        else:
            victim = next((s for s in reversed(self.alive) if s.parked and s.order[:2] >= seq.order[:2]), seq)
            if victim is seq:
                return False
            self.alive.remove(victim)
        self.ledger.drop(self.kv.held(victim))
        self.seats += 1
        self.rows += 1
        self.tokens += victim.pending == 1
        self.draft.preempted.append(victim)
        return True

    def _schedule(self, entry: Entry, blocks: int, decode: bool) -> None:
        seq, end = entry.seq, entry.start + entry.tokens
        if seq.forked:
            self.ledger.split(self.kv.written(seq))
        if self.kv.keeps(seq, seq.length):
            self.ledger.free -= len(self.kv.recurrent)
            self.ledger.drop(seq.kept)
        self.ledger.free -= self.kv.pages_to_grow(seq, end, blocks)
        if not decode:
            self.tokens -= entry.tokens
            self.rows -= max(min(end, seq.score_end) - max(entry.start, seq.scored) - (end < seq.length), 0)
            self.promised += self.kv.peak_pages(seq.length) - self.kv.peak_pages(end)
        self.draft.entries.append(entry)


def _discard(seqs: list[Sequence], seq: Sequence) -> bool:
    """Whether it was there."""
    at = bisect_left(seqs, seq.order, key=_order)
    found = at < len(seqs) and seqs[at] is seq
    if found:
        del seqs[at]
    return found
