"""Beam search over the tokens of one request: which hypotheses live on, which have ended, and when none can do better.

The standard algorithm (Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, with a pool of ended hypotheses):
a step looks at the best `candidates` continuations of all live hypotheses. Those that end go into the pool if they are among the
best `width`; the best `width` of the others live on. The pool keeps its best `width`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from trivium.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """Tokens generated so far: `token` behind those of `parent`. total: sum of their natural log probabilities; length: how many;
    note: what came with the row that the token was chosen from."""

    parent: Hypothesis | None = None
    token: int = -1
    total: float = 0.0
    length: int = 0
    note: Any = None

    def path(self) -> list[Hypothesis]:
        """All that it grew from, from the first token on, and itself."""
        found, at = list[Hypothesis](), self
        while at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


class BeamSearch:
    """Score = total / length ** length_penalty, over generated tokens only, the end token included. Equal totals: the better
    parent first, then the lower token id; equal scores: whoever ended first.

    The search is over when `max_tokens` are made (what lives then has ended too), when nothing lives, or when the pool is full and
    early_stopping says so: True: at once; False: if the best live total, scored at its present length, is no better than the worst
    of the pool (with a positive length_penalty a longer one might be); "never": if no continuation can be better.
    """

    def __init__(self, params: SamplingParams, ends: Collection[int], max_tokens: int) -> None:
        self.width = params.beam_width or 1
        self.candidates = max(2, 1 + len(ends)) * self.width  # so that `width` of them don't end
        self.live = [Hypothesis()]
        self._pool: list[Hypothesis] = []
        self._ends, self._max_tokens = ends, max_tokens
        self._penalty, self._early = params.length_penalty, params.early_stopping

    def score(self, hypothesis: Hypothesis) -> float:
        """What hypotheses are ranked by in the end."""
        return self._scored(hypothesis.total, hypothesis.length)

    def advance(self, rows: Sequence[tuple[Mapping[int, float], Any]]) -> list[int]:
        """One token more. rows[i]: log probabilities of the likeliest `candidates` tokens behind live[i], and a note. Returns the
        old index of the parent of each hypothesis that lives now; none: the search is over."""
        totals = ((self.live[i].total + p, i, token) for i, (row, _) in enumerate(rows) for token, p in row.items() if p > -inf)
        ranked = sorted(totals, key=lambda c: (-c[0], c[1], c[2]))[: self.candidates]
        length = self.live[0].length + 1
        chosen: list[tuple[int, Hypothesis]] = []
        for rank, (total, i, token) in enumerate(ranked):
            hypothesis = Hypothesis(self.live[i], token, total, length, rows[i][1])
            if token not in self._ends and length < self._max_tokens:
                chosen.append((i, hypothesis))
            elif rank < self.width:
                self._pool.append(hypothesis)
        self._pool = self.best(self.width, live=False)
        self.live = [hypothesis for _, hypothesis in chosen[: self.width]]
        if self._over():
            self.live = []
        return [i for i, _ in chosen[: len(self.live)]]

    def best(self, count: int, *, live: bool = True) -> list[Hypothesis]:
        """The best of the pool and, if so asked, of what lives."""
        return sorted([*self._pool, *(self.live if live else ())], key=self.score, reverse=True)[:count]

    def _over(self) -> bool:
        if not self.live or len(self._pool) < self.width:
            return not self.live
        longest = self._max_tokens if self._early == "never" and self._penalty > 0 else self.live[0].length
        return self._early is True or self._scored(self.live[0].total, longest) <= self.score(self._pool[-1])

    def _scored(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self._penalty)
