"""Norms that hand on 8 bits where every reader of theirs would round them to 8 bits (W8A8).

A kernel is chosen by its call, which doesn't say how weights are kept; here a tape's lines and its resident weights are seen
together. Of a layer's six roundings (q, k, v, output, gate and up, down) four fall away, each a pass over the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trivium.ops import InputScale
from trivium.plugin import Choice
from trivium_ascend.kernels import activations, norms, products
from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.session import HALVES, AscendSession
from trivium_ascend.weights import TOKENS, rounding


class Line(NamedTuple):
    """One call: which registers it reads (None: an absent argument) and writes, and those whose content nobody reads after it."""

    choice: Choice
    args: tuple[int | None, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]
    state: int


def round_norms(session: AscendSession, lines: Sequence[Line], weights: Mapping[int | None, Any]) -> list[Line]:
    """The lines of a tape, with the kernel of every such norm changed. weights: quantised ones by their registers."""
    if session.dtype not in HALVES:
        return list(lines)
    readers: dict[int | None, list[Line]] = {}
    for line in lines:
        for at in set(line.args):
            readers.setdefault(at, []).append(line)
    return [_rounding_norm(session, line, readers, weights) for line in lines]


def _rounding_norm(
    session: AscendSession, line: Line, readers: Mapping[int | None, list[Line]], weights: Mapping[int | None, Any]
) -> Line:
    kernel = line.choice.kernel
    if kernel is None or kernel.run is not norms.add_norm:
        return line
    normed = line.results[1]
    found = readers.get(normed, ())
    if not any(normed in reader.dead for reader in found):  # it is an output of the Program
        return line
    rules = {rule for reader in found for rule in _rules(session, reader, normed, weights)}
    chosen = norm_of(session, rules)
    return line if chosen is None else line._replace(choice=line.choice._replace(kernel=chosen))


def norm_of(session: AscendSession, rules: set[InputScale | str | None]) -> NpuKernel | None:
    """The norm that rounds as all its readers do; None if they don't agree, or the chip has none."""
    if len(rules) != 1:
        return None
    [rule] = rules
    if isinstance(rule, InputScale):
        kernel = norms.rounding_alike(rule) if norms.takes_rule(rule, session.dtype) else None
    else:
        kernel = norms.ROUNDED if rule == TOKENS else None
    return kernel if kernel is not None and session.chip.lacks(*kernel.needs) is None else None


def _rules(session: AscendSession, line: Line, at: int, weights: Mapping[int | None, Any]) -> Iterator[InputScale | str | None]:
    """How the products round that a line makes of a register; None where it reads it in another way."""
    kernel = line.choice.kernel
    if kernel is None or line.args[0] != at or at in line.args[1:]:
        yield None
    elif kernel.run is products.linear:
        yield rounding(weights.get(line.args[1]))
    elif kernel.run is activations.gate_up:
        gate, up = (weights.get(line.args[i]) for i in (1, 3))
        joined = session.joined(gate, up)
        yield from map(rounding, (gate, up) if joined is None else (joined,))
    else:
        yield None
