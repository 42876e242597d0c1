"""Drafters of a chosen quality, for tests of speculation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from fake_model import VOCAB
from trivium.engine.speculation.drafter import Ask, Drafter


class Knowing(Drafter):
    """Knows whole token streams (prompt and output) and proposes what follows, each token right with probability `quality`.
    `asks`: what it was asked for."""

    def __init__(self, streams: Iterable[Sequence[int]] = (), quality: float = 1.0, seed: int = 0) -> None:
        self.streams = [list(s) for s in streams]
        self.quality = quality
        self.asks: list[int] = []
        self.ended = 0
        self._rng = random.Random(seed)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asks.append(sum(ask.limit for ask in asks))
        return [self._one(ask.seq.tokens().tolist(), ask.limit) for ask in asks]

    def forget(self, seq: object) -> None:
        self.ended += 1

    def _one(self, tokens: list[int], limit: int) -> list[int]:
        right = next((s[len(tokens) :] for s in self.streams if s[: len(tokens)] == tokens), [])
        right = [*right, *(self._rng.randrange(3, VOCAB) for _ in range(limit))][:limit]
        return [t if self._rng.random() < self.quality else (t + 1) % VOCAB for t in right]
