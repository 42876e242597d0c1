"""Beam search as a textbook has it, over a function of tokens, and the search of everything: for comparison with the engine's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import numpy as np

Next = Callable[[list[int]], np.ndarray]
"""float64[vocab]: log probabilities of what follows these generated tokens."""
Ranked = list[tuple[float, float, list[int]]]
"""(score, sum of log probabilities, tokens), best first."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def every_sequence(next_of: Next, vocab: int, ends: Collection[int], longest: int, penalty: float) -> Ranked:
    """All sequences that end, by an end token or by their length."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    found = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if any(t in ends for t in tokens[:-1]) or (length < longest and tokens[-1] not in ends):
                continue
            total = 0.0
            for i, token in enumerate(tokens):
                if tokens[:i] not in rows:
                    rows[tokens[:i]] = next_of(list(tokens[:i]))
                total += float(rows[tokens[:i]][token])
            found.append((total / length**penalty, total, list(tokens)))
    return sorted(found, key=lambda f: -f[0])


def plain_search(
    next_of: Next, width: int, ends: Collection[int], longest: int, penalty: float, early: bool | str = False
) -> Ranked:
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    pool: Ranked = []
    for length in range(1, longest + 1):
        options = []
        for total, tokens in live:
            row = next_of(tokens)
            options += [(total + float(row[t]), [*tokens, t]) for t in range(len(row))]
        options.sort(key=lambda o: -o[0])
        options = options[: max(2, 1 + len(ends)) * width]
        ended = [length == longest or tokens[-1] in ends for _, tokens in options]
        pool += [(t / length**penalty, t, tokens) for (t, tokens), end in list(zip(options, ended))[:width] if end]
        pool = sorted(pool, key=lambda f: -f[0])[:width]
        live = [option for option, end in zip(options, ended) if not end][:width]
        if not live or (len(pool) == width and _done(live, pool, length, longest, penalty, early)):
            break
    return pool


def _done(
    live: Sequence[tuple[float, list[int]]], pool: Ranked, length: int, longest: int, penalty: float, early: bool | str
) -> bool:
    reach = longest if early == "never" and penalty > 0 else length
    return early is True or max(total for total, _ in live) / reach**penalty <= pool[-1][0]
