"""From figures of single runs to rows: medians, the best peer of each axis, the ratio to it, the share of the floor; the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.entrants import AXES

OURS = "trivium"
FOUR_BITS = 5.0
"""Peak memory is compared among those whose weights have less."""


@dataclass
class Runs:
    """What one entrant gave on one model: its figures by axis, one a run. `bits` of its weights."""

    label: str
    bits: float
    version: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Any], axes: Iterable[str]) -> None:
        """Takes the figures of one run, those of the axes that it was for."""
        self.version = str(found.get("version", self.version))
        for axis in axes:
            value = found.get(AXES[axis].key)
            if value is not None:
                self.samples.setdefault(axis, []).append(float(value["median"] if isinstance(value, Mapping) else value))

    def figure(self, axis: str) -> float | None:
        """The median over the runs."""
        return statistics.median(self.samples[axis]) if self.samples.get(axis) else None

    def spread(self, axis: str) -> dict[str, Any]:
        values = self.samples[axis]
        name = f"{self.label} ({self.version})" if self.version else self.label
        return {"peer": name, "median": self.figure(axis), "min": min(values), "max": max(values), "runs": len(values)}


def best(axis: str, rivals: Sequence[Runs]) -> Runs | None:
    """The peer to beat; of the peak memory, among those of the same precision: weights of 4 bits."""
    able = [r for r in rivals if r.samples.get(axis) and (axis != "peak_memory" or r.bits < FOUR_BITS)]
    if not able:
        return None
    return (max if AXES[axis].more else min)(able, key=lambda r: r.figure(axis) or 0.0)


def row(model: str, axis: str, ours: Runs, rivals: Sequence[Runs], floors: Mapping[str, float]) -> dict[str, Any] | None:
    """One line of the comparison: ratio = ours / the best peer's, whatever is better; None: a side has no figure."""
    mine, rival = ours.figure(axis), best(axis, rivals)
    if mine is None or rival is None:
        return None
    theirs = rival.figure(axis)
    assert theirs is not None
    unit, more = AXES[axis].unit, AXES[axis].more
    found: dict[str, Any] = {
        "model": model, "axis": axis, "ours": mine, "best_peer": theirs, "peer": rival.spread(axis)["peer"],
        "ratio": mine / theirs, "unit": unit, "more_is_better": more,
    }  # fmt: skip
    if axis in floors:
        found |= {"floor": floors[axis], "share_of_floor": mine / floors[axis] if more else floors[axis] / mine}
    spreads = [r.spread(axis) for r in rivals if r.samples.get(axis)]
    return found | {"ours_runs": ours.spread(axis), "peers": sorted(spreads, key=lambda s: s["median"], reverse=more)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'model':<14}{'axis':<14}{'ours':>9}{'best peer':>11}{'ratio':>7}{'of floor':>10}  peer"]
    for r in rows:
        share = f"{r['share_of_floor']:.0%}" if "share_of_floor" in r else ""
        figures = f"{_short(r['ours']):>9}{_short(r['best_peer']):>11}{r['ratio']:>7.2f}{share:>10}"
        lines.append(f"{r['model']:<14}{r['axis']:<14}{figures}  {r['peer']}")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
