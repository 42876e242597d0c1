"""Beam search inside the engine: live hypotheses are sequences under the scheduler that move on together."""

from __future__ import annotations

from itertools import islice

from trivium.engine.outputs import TokenLogprobs
from trivium.engine.request import Completion, Request, Text
from trivium.sampling import BeamSearch, SamplerState
from trivium.sched import Scheduler, Sequence
from trivium.text import Tokenizer
from trivium.text.reader import Reader


class Beam(Completion):
    """A live hypothesis. It takes no token by itself: `row`, what can follow and when that was known, is kept until the rows of
    all its siblings are in."""

    def __init__(self, request: Request, seq: Sequence, sampler: SamplerState, text: Text) -> None:
        super().__init__(request, seq, sampler, text)
        self.row: tuple[TokenLogprobs, float] | None = None
        self.reader: Reader | None = None
        seq.lockstep = True

    @property
    def resting(self) -> bool:
        return self.finish_reason is not None or (self.row is not None and not self.seq.running)

    def read_with(self, reader: Reader) -> None:
        self.reader = reader

    def grow(self, drawn: object, draft: object) -> int:
        return 0

    def unseen(self) -> tuple[int]:
        """One row, whose token is chosen later."""
        return (-1,)

    def accept(self, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        assert logprobs is not None, "the backend returned no logprobs"
        self.row = logprobs, now

    def finish(self, reason: str) -> None:
        self.finish_reason, self.over = reason, True


class Beams:
    """The beams of one request, parallel to what lives in `search`."""

    def __init__(self, first: Beam, search: BeamSearch, tokenizer: Tokenizer) -> None:
        self._first = first
        self._live = [first]
        self._made = 1
        self._search = search
        self._tokenizer = tokenizer

    def branch(self, scheduler: Scheduler, owners: dict[Sequence, Completion]) -> None:
        """Once the rows of all beams are in: the first child of a beam goes on in its sequence, further ones fork from it, and
        beams without children are removed. `owners` follows suit. In the end the request gets its outputs."""
        old, request = self._live, self._first.request
        rows = [beam.row for beam in old if beam.row is not None]
        if len(rows) < len(old):
            return
        logprobs = [{i: p.logprob for i, p in islice(row.items(), self._search.candidates)} for row, _ in rows]
        parents = self._search.advance(list(zip(logprobs, rows)))
        outputs = [] if parents else self.results("length")
        for i, beam in enumerate(old):
            if i not in parents:
                scheduler.remove(beam.seq)
                del owners[beam.seq]
        self._live = [old[i] if i not in parents[:n] else self._child(old[i]) for n, i in enumerate(parents)]
        for i, beam, hypothesis in zip(parents, self._live, self._search.live):
            beam.seq.append(hypothesis.token)
            owners[beam.seq] = beam
            if beam is not old[i]:
                scheduler.fork(old[i].seq, beam.seq)
            elif not beam.seq.running:
                scheduler.add(beam.seq)
            beam.row = None
        request.started = len(self._live)
        request.completions = outputs or [*self._live]

    def results(self, reason: str) -> list[Completion]:
        """The best n outputs, or fewer if there are no more; `reason`: why those have ended that still live."""
        request, found = self._first.request, list[Completion]()
        shown = None if request.params.logprobs == -1 else request.params.logprobs or 0
        for index, hypothesis in enumerate(self._search.best(request.params.n)):
            seq, text = Sequence((), b"", (0, 0, index)), Text(self._tokenizer, request.params)
            output = Completion(request, seq, self._first.sampler, text)
            if self._first.reader is not None:
                output.read_with(self._first.reader)
            for step in hypothesis.path():
                row, now = step.note
                output.accept(step.token, {step.token: row[step.token], **dict(islice(row.items(), shown))}, now)
            if output.finish_reason is None:
                output.finish(reason)
            found.append(output)
        return found

    def _child(self, parent: Beam) -> Beam:
        seq = Sequence(parent.seq.tokens(), parent.seq.root, (*parent.seq.order[:2], self._made), limit=parent.seq.limit)
        seq.adapter, seq.media = parent.seq.adapter, parent.seq.media
        self._made += 1
        return Beam(parent.request, seq, parent.sampler, Text(self._tokenizer, parent.request.params))
