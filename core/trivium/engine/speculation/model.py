"""Drafters that are models, with their own pages, on any backend: a smaller model, or a head of the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from trivium.engine.executor import Model
from trivium.engine.speculation.drafter import Ask, Drafter, Seen
from trivium.errors import CapacityError
from trivium.kv import KVCache, root_key
from trivium.models.decoder import DRAFT_ROWS
from trivium.ops.batch import F32
from trivium.plugin.contract import Step
from trivium.sampling import build_inputs
from trivium.sched import Entry, RowMap, Sequence, make_batch


_KEPT_ROWS = 16
"""Hidden states of a sequence that wait for the next proposal, which then needs no step of its own for them."""


class _Lane:
    """One of the target's sequences as the draft model knows it. seq: its tokens from `shift` on, and behind `agreed` of them the
    last drafts. fed: leading tokens that are in the cache; seq.computed counts those that are no drafts."""

    def __init__(self, tokens: Seq[int], root: bytes, shift: int = 0) -> None:
        self.seq = Sequence(tokens, root, (0, 0, 0))
        self.shift = shift
        self.agreed = self.seq.length
        self.fed = 0

    def follow(self, target: Sequence, kv: KVCache) -> None:
        """Takes over what became of the last drafts, and all that is new."""
        told = target.tokens(self.agreed, self.seq.length)
        drafts = self.seq.tokens(self.agreed)
        right = next((i for i, (a, b) in enumerate(zip(told, drafts)) if a != b), min(len(told), len(drafts)))
        self.seq.truncate(self.agreed + right)
        take = kv.advance if self.fed <= self.seq.length else kv.take_back
        take(self.seq, min(self.fed, self.seq.length) - self.seq.computed)
        self.fed = self.seq.computed
        for token in target.tokens(self.seq.length):
            self.seq.append(token)
        self.agreed = self.seq.length


class ModelDrafter(Drafter):
    """Draws drafts with the target's own parameters, seeds and positions: so the same random numbers choose from what the two
    models think, and agree at any temperature wherever these do. Sequences for which it has no pages get no drafts.
    """

    def __init__(self, model: Model, max_seqs: int, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._kv = KVCache(model.kv_spec, model.num_pages, max_seqs)
        self._lanes: dict[Sequence, _Lane] = {}

    def propose(self, asks: Seq[Ask]) -> list[list[int]]:
        for seq in [seq for seq in self._lanes if not seq.running]:
            self.forget(seq)
        drafts: list[list[int]] = [[] for _ in asks]
        lanes = [self._lane(ask) for ask in asks]
        try:
            while self._round(asks, lanes, drafts):
                pass
        except BaseException:
            for ask in asks:
                self.forget(ask.seq)
            raise
        return drafts

    def forget(self, seq: Sequence) -> None:
        lane = self._lanes.pop(seq, None)
        if lane is not None:
            self._kv.release(lane.seq)

    def _lane(self, ask: Ask) -> _Lane | None:
        """The sequence's lane with room for what is known, or None: the model can't do what is asked, or has no pages left."""
        supported = self._model.capabilities.sampling
        end = ask.seq.length + ask.limit
        if end > self._model.max_model_len or (supported is not None and not ask.sampler.params.used() <= supported):
            return None
        lane = self._lanes.get(ask.seq) or self._open(ask.seq)
        lane.follow(ask.seq, self._kv)
        return lane if self._grow(lane.seq, lane.seq.length) else None

    def _grow(self, seq: Sequence, tokens: int) -> bool:
        """Whether there are pages for `tokens` tokens; states that are to be kept are copied."""
        try:
            copies = self._kv.grow(seq, tokens)
        except CapacityError:
            return False
        if copies:
            self._model.session.copy_pages([copy.src for copy in copies], [copy.dst for copy in copies])
        return True

    def _open(self, target: Sequence) -> _Lane:
        lane = self._lanes[target] = _Lane(target.tokens(), root_key(self._model.fingerprint, target.root.hex()))
        hit = self._kv.match(lane.seq, lane.seq.length - 1)
        if hit.blocks:
            self._kv.adopt(lane.seq, hit)
        lane.fed = lane.seq.computed
        return lane

    def _round(self, asks: Seq[Ask], lanes: list[_Lane | None], drafts: Seq[list[int]]) -> bool:
        """One step of the model: every lane's tokens that it has not seen, as far as the step's budget goes; lanes that have seen
        all draw one more. False: all have their drafts, or no pages for more."""
        left, work, rows, states, drawing = self._max_tokens, list[tuple[_Lane, Entry]](), list[RowMap](), [], []
        for i, (ask, lane) in enumerate(zip(asks, lanes)):
            count = 0 if lane is None or len(drafts[i]) == ask.limit else min(lane.seq.length - lane.fed, left)
            if lane is None or count == 0:
                continue
            if lane.fed == lane.agreed:  # what comes now may be wrong
                self._kv.advance(lane.seq, lane.fed - lane.seq.computed)
                if not self._grow(lane.seq, lane.agreed + ask.limit):
                    lanes[i] = None
                    continue
            ahead = ask.sampler.ahead(drafts[i])
            draws = lane.fed + count == lane.seq.length and len(ahead) > len(drafts[i])
            work.append((lane, Entry(lane.seq, lane.fed, count)))
            rows.append(RowMap(0, 0, int(draws)))
            if draws:
                states.append((ahead[-1], lane.shift + lane.seq.length, -1))
                drawing.append((lane, drafts[i]))
            lane.fed += count
            left -= count
        if work:
            for (lane, draft), token in zip(drawing, self._run(work, rows, states).tokens().ids.tolist(), strict=True):
                draft.append(token)
                lane.seq.append(token)
        return bool(work)

    def _run(self, work: Seq[tuple[_Lane, Entry]], rows: Seq[RowMap], states: Seq[Any]) -> Step:
        """A step of the model; `states` draw."""
        batch = make_batch([entry for _, entry in work], rows, self._kv, build_inputs(states, self._model.vocab_size))
        return self._model.executable.run(batch)


class _HeadLane(_Lane):
    """A Lane whose tokens go with hidden states, each with that of the token before. rows: those of tokens that are not in the
    cache. due: the target's token whose hidden state is to come next."""

    def __init__(self, due: int) -> None:
        super().__init__((), b"", due + 1)
        self.due, self.rows = due, list[F32]()

    def follow(self, target: Sequence, kv: KVCache) -> None:
        """Forgets drafts, and what the head itself has made of them."""
        self.fed = min(self.fed, self.agreed)
        self.rows = self.rows[: self.agreed - self.fed]
        self.seq.truncate(self.agreed)

    def take(self, target: Sequence, hidden: F32) -> None:
        """The target's hidden states that were due, with the tokens that follow."""
        self.rows += [*hidden]
        self.due += len(hidden)
        self.agreed += len(hidden)
        for token in target.tokens(self.shift + self.seq.length, self.due + 1):
            self.seq.append(token)


class HeadDrafter(ModelDrafter):
    """A ModelDrafter that is fed each token with the hidden state of the token before: the target's, and behind those its own. What
    the target found in its prefix cache has none: the head knows a sequence from the second token on that was computed. inlet: the
    loaded constant that hidden states are put in (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2)."""

    watches = True
    _lanes: dict[Sequence, Any]

    def __init__(self, model: Model, inlet: Any, max_seqs: int, max_tokens: int) -> None:
        super().__init__(model, max_seqs, min(max_tokens, DRAFT_ROWS))
        self._inlet = inlet
        self._kv.private = True  # the same tokens behind others have other hidden states

    def watch(self, seen: Seq[Seen]) -> None:
        for seq in [seq for seq in self._lanes if not seq.running]:
            self.forget(seq)
        for seq, start, hidden in seen:
            lane = self._lanes.get(seq)
            if lane is None or start > lane.due:
                self.forget(seq)
                lane = self._lanes[seq] = _HeadLane(start)
            lane.follow(seq, self._kv)
            lane.take(seq, hidden[lane.due - start :])
            while len(lane.rows) > _KEPT_ROWS:
                if not self._grow(lane.seq, lane.agreed):
                    self.forget(seq)
                    break
                count = min(len(lane.rows) - 1, self._max_tokens)
                self._run([(lane, Entry(lane.seq, lane.fed, count))], [RowMap(0, 0, 0)], []).tokens()
                lane.fed += count
                self._kv.advance(lane.seq, lane.fed - lane.seq.computed)

    def _open(self, target: Sequence) -> _Lane:
        """One that knows nothing yet."""
        lane = self._lanes[target] = _HeadLane(target.length)
        return lane

    def _run(self, work: Seq[tuple[Any, Entry]], rows: Seq[RowMap], states: Seq[Any]) -> Step:
        rows = [row._replace(pooled=row.sample) for row in rows]
        batch = make_batch([entry for _, entry in work], rows, self._kv, build_inputs(states, self._model.vocab_size))
        batch.adapters = np.arange(batch.tokens, dtype=np.int32)
        for i, row in enumerate(row for lane, entry in work for row in lane.rows[: entry.tokens]):
            self._model.session.assign(self._inlet, i, row[None])
        step = self._model.executable.run(batch)
        hidden = iter(step.output("hidden") if states else ())
        for (lane, entry), row in zip(work, rows):
            lane.rows = [*lane.rows[entry.tokens :], *([next(hidden)] if row.pooled else ())]
        return step
