"""Long listings made short enough to read: what repeats from layer to layer is shown once, and cells are cut to a width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SAVED = 4
"""Lines that a fold must save to be worth its own line."""
WIDTH = 120
"""Characters of a line."""
CUT = "(repeats folded, long lines cut; --json has everything in full)"
_LAYER = re.compile(r"(?:layers|blk|kv|state)\.(\d+)\b")


class Folded(NamedTuple):
    """A line (period 0), or the announcement that the `period` lines from `start` come `times` times, of which the first follow."""

    depth: int
    start: int
    period: int
    times: int


def fold(keys: Sequence[str], depth: int = 0, start: int = 0) -> Iterator[Folded]:
    """Repeated runs of equal keys, the run that covers most first, again folded inside."""
    at = 0
    while at < len(keys):
        period, times = _longest(keys, at)
        if times == 1:
            yield Folded(depth, start + at, 0, 1)
            at += 1
            continue
        yield Folded(depth, start + at, period, times)
        yield from fold(keys[at : at + period], depth + 1, start + at)
        at += period * times


def _longest(keys: Sequence[str], at: int) -> tuple[int, int]:
    """(period, times) of the repetition at `at` that covers most lines, the shortest such; (1, 1) if none is worth it."""
    best, covered = (1, 1), 1
    for period in range(1, (len(keys) - at) // 2 + 1):
        if keys[at] != keys[at + period]:
            continue
        times, run = 1, keys[at : at + period]
        while keys[at + times * period : at + (times + 1) * period] == run:
            times += 1
        if (times - 1) * period >= SAVED and times * period > covered:
            best, covered = (period, times), times * period
    return best


def key(line: str) -> str:
    """The line without what counts up from layer to layer: numbers in names, and values by their distance to the first one."""
    first = re.search(r"%y(\d+)", line)
    base = int(first[1]) if first else 0
    line = re.sub(r"%y(\d+)", lambda m: f"%{int(m[1]) - base}", line)
    return re.sub(r"(?<=[A-Za-z_])\.\d+\b", ".#", line)


def folded(lines: Sequence[str], keys: Sequence[str] | None = None, width: int = WIDTH) -> str:
    """The lines, folded by their keys (default: key(line)), each cut to `width`."""
    out = []
    for piece in fold([*map(key, lines)] if keys is None else keys):
        text = _announced(piece, lines) if piece.period else lines[piece.start]
        out.append(cut("  " * piece.depth + text, width))
    return "\n".join(out)


def _announced(piece: Folded, lines: Sequence[str]) -> str:
    run = lines[piece.start : piece.start + piece.period * piece.times]
    layers = [int(n) for line in run for n in _LAYER.findall(line)]
    which = f", layers {min(layers)} to {max(layers)}" if layers else ""
    return f"{piece.times} times{which}:"


def cut(text: str, width: int) -> str:
    """The text, its end replaced by an ellipsis where it is longer than `width`; floats without float32's tail of digits."""
    text = re.sub(r"\d+\.\d{7,}(?:e[+-]?\d+)?", lambda m: f"{float(m[0]):.6g}", text)
    return text if len(text) <= width else text[: width - 1] + "…"


def unnumbered(name: str) -> tuple[str, list[int]]:
    """A weight's name with * for its layer, and the layer, if it has one."""
    layer = re.search(r"(?<=layers\.)\d+", name)
    return (name, []) if layer is None else (f"{name[: layer.start()]}*{name[layer.end() :]}", [int(layer[0])])


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, neighbours joined: "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
