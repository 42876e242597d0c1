"""Norms that hand on 8 bits where every reader of theirs would round them to 8 bits (W8A8).

A kernel is chosen by its call, which doesn't say how weights are kept; here a tape's lines and its resident weights are seen
together. Of a layer's six roundings (q, k, v, output, gate and up, down) four fall away, each a pass over the activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trivium.plugin import Choice
from trivium_ascend.kernels import activations, norms, products
from trivium_ascend.session import HALVES, AscendSession
from trivium_ascend.weights import takes_rounded


class Line(NamedTuple):
    """One call: which registers it reads (None: an absent argument) and writes, and those whose content nobody reads after it."""

    choice: Choice
    args: tuple[int | None, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]
    state: int


def round_norms(session: AscendSession, lines: Sequence[Line], weights: Mapping[int | None, Any]) -> list[Line]:
    """The lines of a tape, with the kernel of every such norm changed. weights: quantised ones by their registers."""
    if session.dtype not in HALVES or session.chip.lacks(*norms.ROUNDED.needs) is not None:
        return list(lines)
    readers: dict[int | None, list[Line]] = {}
    for line in lines:
        for at in set(line.args):
            readers.setdefault(at, []).append(line)

    def rounds(line: Line) -> bool:
        kernel = line.choice.kernel
        if kernel is None or kernel.run is not norms.add_norm:
            return False
        normed = line.results[1]
        forgotten = any(normed in reader.dead for reader in readers.get(normed, ()))  # or else it is an output of the Program
        return forgotten and all(_takes_rounded(session, reader, normed, weights) for reader in readers[normed])

    return [line._replace(choice=line.choice._replace(kernel=norms.ROUNDED)) if rounds(line) else line for line in lines]


def _takes_rounded(session: AscendSession, line: Line, at: int, weights: Mapping[int | None, Any]) -> bool:
    """Whether a line reads a register only as the activations of products that take 8 bits."""
    kernel = line.choice.kernel
    if kernel is None or line.args[0] != at or at in line.args[1:]:
        return False
    if kernel.run is products.linear:
        return takes_rounded(weights.get(line.args[1]))
    if kernel.run is not activations.gate_up:
        return False
    gate, up = (weights.get(line.args[i]) for i in (1, 3))
    joined = session.joined(gate, up)
    return takes_rounded(joined) if joined is not None else takes_rounded(gate) and takes_rounded(up)
