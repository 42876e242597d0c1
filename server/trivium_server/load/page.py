"""The report as a page of its own: tables and plots (SVG made here), no script, nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from trivium_server.load.generator import Run
from trivium_server.load.summary import gaps, times
from trivium_server.load.table import facts, latencies

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 62, 14, 14, 44
_POINTS = 400
"""Of a curve; clouds have at most four times as many."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6778; --line: #d9dee7; --back: #fff; --s0: #1769c2; --s1: #c25317;
  --s2: #2b8a3e; --bad: #c92a2a }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8f0; --soft: #9aa5b8; --line: #343c4b; --back: #14181f; --s0: #6cb2ff;
  --s1: #ffa066; --s2: #69db7c; --bad: #ff8787 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto; max-width: 1340px;
  padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 0 0 .3rem }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); font-weight: normal }
th { color: var(--soft) } td:first-child, th:first-child, table.facts td { text-align: left; vertical-align: top }
table.facts td:first-child { color: var(--soft); white-space: nowrap }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.5rem }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: var(--soft) } dt { color: var(--soft) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem } dd { margin: 0 }
.grid { stroke: var(--line); stroke-width: 1 } .curve { fill: none; stroke-width: 2 }
""".strip()


class Series(NamedTuple):
    """Points of a plot. kind: curve, steps or cloud; colour: a name of the style."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    kind: str = "curve"


class _Axis(NamedTuple):
    """Values from low to high along `start` to `stop` of the picture."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = self.low, self.high, max(value, self.low)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = (1, 2, 5) if len(powers) < 5 else (1,)
            found = [mark * 10.0**power for power in powers for mark in marks]
        if not self.log or self.high < 10 * self.low:
            step = _step((self.high - self.low) / 5)
            found = [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low <= tick <= self.high * (1 + 1e-9)]


def _step(rough: float) -> float:
    """The next of 1, 2, 5, 10 ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(mark * power for mark in (1, 2, 5, 10) if mark * power >= rough * (1 - 1e-9))


def plot(title: str, across: str, up: str, series: Sequence[Series], *, log: bool = False, top: float | None = None) -> str:
    """A section with an SVG; across, up: what the axes are. log: the one across; top: of the one up."""
    xs = [value for one in series for value in one.x if value > 0 or not log]
    ys = [value for one in series for value in one.y]
    if not xs:
        return ""
    low, high = (min(xs), max(xs)) if log else (min(0.0, *xs), max(xs))
    if log and high < low * 1.5:
        low, high = low / 1.3, high * 1.3
    x = _Axis(low, high if high > low else low + 1.0, _LEFT, _WIDTH - _RIGHT, log)
    y = _Axis(0.0, top or max(ys) * 1.05 or 1.0, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x, y, across, up), *(_drawn(one, x, y) for one in series)]
    parts += _legend([one for one in series if one.label])
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<section><h2>{escape(title)}</h2>{picture}</section>"


def _grid(x: _Axis, y: _Axis, across: str, up: str) -> Iterable[str]:
    for tick in x.ticks():
        at = x.at(tick)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.stop}" y2="{y.start}"/>'
        yield f'<text x="{at:.1f}" y="{y.start + 16}" text-anchor="middle">{tick:g}</text>'
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<line class="grid" x1="{x.start}" x2="{x.stop}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield f'<text x="{(x.start + x.stop) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>'
    yield f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'


def _legend(series: Sequence[Series]) -> Iterable[str]:
    """Where curves of shares leave room: below on the right; clouds leave it above."""
    x = _WIDTH - _RIGHT - 4
    for index, one in enumerate(series):
        y = _TOP + 12 + 16 * index if one.kind == "cloud" else _HEIGHT - _BOTTOM - 10 - 16 * index
        yield f'<text x="{x}" y="{y}" text-anchor="end" style="fill: var(--{one.colour})">{escape(one.label)}</text>'


def _drawn(one: Series, x: _Axis, y: _Axis) -> str:
    points = [(x.at(a), y.at(b)) for a, b in zip(one.x, one.y, strict=True)]
    if one.kind == "cloud":
        return "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.2" style="fill: var(--{one.colour})"/>' for a, b in points)
    steps = "".join(f"H{a:.1f}V{b:.1f}" if one.kind == "steps" else f"L{a:.1f} {b:.1f}" for a, b in points[1:])
    return f'<path class="curve" style="stroke: var(--{one.colour})" d="M{points[0][0]:.1f} {points[0][1]:.1f}{steps}"/>'


def curve(label: str, seconds: Iterable[float], colour: str) -> list[Series]:
    """The share of observations (percent) within so many milliseconds; nothing of none."""
    found = np.sort(np.fromiter(seconds, np.float64)) * 1e3
    if not found.size:
        return []
    picked = np.unique(np.linspace(0, found.size - 1, min(found.size, _POINTS)).round().astype(int))
    x, y = found[picked], (picked + 1) / found.size * 100
    return [Series(label, [float(x[0]), *x.tolist()], [0.0, *y.tolist()], colour, "steps")]


def _timeline(run: Run) -> list[Series]:
    """Pieces of output a second, and requests under way, by the time since the start."""
    seconds = max(run.end - run.start, 1e-9)
    width = _step(seconds / 60)
    edges = np.arange(0.0, seconds + width, width)
    news = np.concatenate([np.asarray(o.times) for o in run.outcomes] or [np.zeros(0)]) - run.start
    counts, _ = np.histogram(news, edges)
    return [Series("", edges[:-1].tolist(), (counts / width).tolist(), "s0", "steps")]


def _under_way(run: Run) -> list[Series]:
    changes = sorted([(o.sent - run.start, 1) for o in run.outcomes] + [(o.end - run.start, -1) for o in run.outcomes])
    height = np.cumsum([change for _, change in changes])
    picked = np.unique(np.linspace(0, len(changes) - 1, min(len(changes), 2 * _POINTS)).round().astype(int))
    return [Series("", [changes[i][0] for i in picked], height[picked].astype(float).tolist(), "s2", "steps")]


def _cloud(run: Run) -> list[Series]:
    """Time to first token of each request by when it was to be sent, and the failures."""
    every = run.outcomes[:: max(1, math.ceil(len(run.outcomes) / (4 * _POINTS)))]
    whole = [(o.scheduled - run.start, (o.times[0] - o.scheduled) * 1e3) for o in every if not o.failure and o.times]
    failed = [(o.scheduled - run.start, (o.end - o.scheduled) * 1e3) for o in every if o.failure]
    named = (("TTFT", whole, "s0"), ("failed, after", failed, "bad"))
    return [Series(label, [a for a, _ in found], [b for _, b in found], colour, "cloud") for label, found, colour in named if found]


def _rows(rows: Sequence[Sequence[str]], *, head: bool) -> str:
    def cells(row: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>"

    return "".join(cells(row, "th" if head and not index else "td") for index, row in enumerate(rows))


def page(report: Mapping[str, Any], run: Run) -> str:
    """The whole page."""
    whole = [o for o in run.outcomes if not o.failure]
    each = [times(o) for o in whole]
    seen = {name: [one[name] for one in each if name in one] for name in ("ttft", "e2e", "tpot")}
    latency = [*curve("TTFT", seen["ttft"], "s0"), *curve("E2E", seen["e2e"], "s1")]
    token = [*curve("ITL", gaps(whole), "s0"), *curve("TPOT", seen["tpot"], "s1")]
    plots = [
        plot("Time to first token, and to the end", "milliseconds", "% within", latency, log=True, top=100.0),
        plot("Between tokens", "milliseconds", "% within", token, log=True, top=100.0),
        plot("Pieces of output a second", "seconds since the start", "a second", _timeline(run)),
        plot("Requests under way", "seconds since the start", "requests", _under_way(run)),
        plot("Time to first token of each request", "scheduled, seconds since the start", "milliseconds", _cloud(run)),
    ]
    meanings = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report["definitions"].items())
    title = f"{report['target']['model']} under load"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<table class="facts">{_rows(facts(report), head=False)}</table><table>{_rows(latencies(report), head=True)}</table>'
        f'<div class="plots">{"".join(plots)}</div><h2>What the words mean</h2><dl>{meanings}</dl></body></html>\n'
    )
