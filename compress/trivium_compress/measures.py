"""Perplexity, KL divergence and agreement of two distributions over the next token, and how sure one can be of them.

p is the measure, q is what is judged: KL(p ‖ q) = sum p ln(p / q), in nats (Kullback and Leibler, "On Information and Sufficiency",
1951). Perplexity: the exponential of the mean of -ln(probability of the token that came). Intervals are those of the bootstrap
(Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979) over windows, for what is near in a text is not independent: so
many windows as there are are drawn with replacement, `RESAMPLES` times; the middle 95 % of the figures make the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
RESAMPLES, LEVEL, SEED = 1000, 0.95, 20260101


def log_softmax(logits: Array) -> Array:
    """float64, over the last dimension."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def compare(measure: Array, other: Array) -> tuple[Array, Array]:
    """Of logits[rows, vocabulary], by row: the KL divergence in nats, float64, and whether the likeliest token is the same."""
    p, q = log_softmax(measure), log_softmax(other)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0), p.argmax(-1) == q.argmax(-1)


def surprise(logits: Array, tokens: Array) -> Array:
    """-ln(probability) of the token that came, by row: float64."""
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return np.asarray(total - np.take_along_axis(logits, tokens[:, None].astype(np.int64), -1)[:, 0])


class Figure(NamedTuple):
    """A figure and its interval; None: there is one window, which says nothing about others."""

    value: float
    interval: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": None if self.interval is None else list(self.interval)}


@dataclass
class Tally:
    """What was measured, by window: positions, sums of surprise under either, of divergence, and of agreement; and every
    divergence."""

    rows: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    divergences: list[Array] = field(default_factory=list)

    def add(self, judged: Array, measure: Array | None, divergence: Array | None, same: Array | None) -> None:
        """A window: by position, the surprise of what is judged and, with a measure, its surprise, the divergence, the
        agreement."""
        sums = [0.0 if a is None else float(a.sum()) for a in (judged, measure, divergence, same)]
        self.rows.append((float(len(judged)), sums[0], sums[1], sums[2], sums[3]))
        if divergence is not None:
            self.divergences.append(divergence.astype(np.float32))

    def figures(self) -> dict[str, Any]:
        """Those of what is judged alone, or, with a measure, of both."""
        found = {"positions": int(sum(row[0] for row in self.rows)), "windows": len(self.rows)}
        ways: dict[str, Callable[[Array], Array]] = {"perplexity": lambda s: np.exp(s[:, 1] / s[:, 0])}
        if self.divergences:
            ways |= {
                "perplexity_of_measure": lambda s: np.exp(s[:, 2] / s[:, 0]),
                "perplexity_ratio": lambda s: np.exp((s[:, 1] - s[:, 2]) / s[:, 0]),
                "kl_mean": lambda s: s[:, 3] / s[:, 0], "top1": lambda s: s[:, 4] / s[:, 0],
            }  # fmt: skip
        figures = {name: figure.to_json() for name, figure in bootstrap(self.rows, ways).items()}
        return {**found, **figures, **self._spread()}

    def _spread(self) -> dict[str, float]:
        if not self.divergences:
            return {}
        every = np.concatenate(self.divergences)
        return {"kl_median": float(np.median(every)), "kl_p99": float(np.percentile(every, 99)), "kl_max": float(every.max())}


def bootstrap(rows: Sequence[Sequence[float]], ways: dict[str, Callable[[Array], Array]]) -> dict[str, Figure]:
    """Figures of the sums over all windows, each with its interval. ways: by name, from sums[n, columns] to figures[n]."""
    table = np.array(rows, np.float64)
    whole = {name: float(way(table.sum(0, keepdims=True))[0]) for name, way in ways.items()}
    if len(table) < 2:
        return {name: Figure(value, None) for name, value in whole.items()}
    rng = np.random.default_rng(SEED)
    sums = np.stack([table[rng.integers(0, len(table), len(table))].sum(0) for _ in range(RESAMPLES)])
    edges = [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2]
    drawn = {name: np.percentile(way(sums), edges) for name, way in ways.items()}
    return {name: Figure(value, (float(drawn[name][0]), float(drawn[name][1]))) for name, value in whole.items()}
