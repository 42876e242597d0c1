"""A drafter that is a model of its own, with its own pages, on any backend."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from trivium.engine.executor import Model
from trivium.engine.speculation.drafter import Ask, Drafter
from trivium.errors import CapacityError
from trivium.kv import KVCache, root_key
from trivium.sampling import build_inputs
from trivium.sched import Entry, RowMap, Sequence, make_batch


class _Lane:
    """One of the target's sequences as the draft model knows it. seq: its tokens, and behind `agreed` of them the last drafts.
    fed: leading tokens that are in the cache; seq.computed counts those that are no drafts."""

    def __init__(self, tokens: Seq[int], root: bytes) -> None:
        self.seq = Sequence(tokens, root, (0, 0, 0))
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
        left, entries, rows, states, drawing = self._max_tokens, list[Entry](), list[RowMap](), [], []
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
            entries.append(Entry(lane.seq, lane.fed, count))
            rows.append(RowMap(0, 0, int(draws)))
            if draws:
                states.append((ahead[-1], lane.seq.length, -1))
                drawing.append((lane, drafts[i]))
            lane.fed += count
            left -= count
        if entries:
            batch = make_batch(entries, rows, self._kv, build_inputs(states, self._model.vocab_size))
            for (lane, draft), token in zip(drawing, self._model.executable.run(batch).tokens().ids.tolist(), strict=True):
                draft.append(token)
                lane.seq.append(token)
        return bool(entries)
