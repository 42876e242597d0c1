"""What is done to weights once the fused Program is known: pairs that one product can read are joined, 8-bit numbers are tiled.

Each weight is replaced as soon as its new form is there, so that beside the model there is never more than one pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trivium.ops import Program
from trivium_ascend.weights import Part, joined, tiled

PLACES: Mapping[str, tuple[int, int]] = {"gate_up": (1, 3), "moe_experts": (3, 4)}
"""Which arguments of a call are the weights of gate and up."""


def arrange(
    program: Program, weights: Mapping[str, Any], forget: Any, nz: bool
) -> tuple[dict[str, Any], dict[tuple[int, int], Any]]:
    """(weights by name, joined ones by the ids of their parts). `forget(old, new)` is told of every weight that was replaced."""
    found, pairs = dict(weights), dict[tuple[int, int], Any]()
    for first, second in gate_and_up(program):
        whole = joined(found[first], found[second])
        if whole is None:
            continue
        whole = tiled(whole) if nz else whole
        rows = found[first].shape[-2]
        parts = Part(whole, 0, rows), Part(whole, rows, whole.shape[-2])
        for name, part in zip((first, second), parts, strict=True):
            forget(found[name], part)
            found[name] = part
        pairs[id(parts[0]), id(parts[1])] = whole
    if nz:
        _tile(found, forget)
    return found, pairs


def gate_and_up(program: Program) -> Iterator[tuple[str, str]]:
    """Names of the weights of gated blocks, and of experts, that nothing else reads."""
    readers: dict[Any, int] = {}
    for value in (v for call in program.calls for v in call.args if v is not None):
        readers[value] = readers.get(value, 0) + 1
    for call in program.calls:
        if call.name in PLACES:
            gate, up = (call.args[at] for at in PLACES[call.name])
            assert gate is not None and up is not None
            if readers[gate] == readers[up] == 1:
                yield gate.name, up.name


def _tile(found: dict[str, Any], forget: Any) -> None:
    made: dict[int, tuple[Any, Any]] = {}
    for name, weight in found.items():
        if id(weight) not in made:
            made[id(weight)] = weight, tiled(weight)
        new = made[id(weight)][1]
        if new is not weight:
            forget(weight, new)
            found[name] = new
