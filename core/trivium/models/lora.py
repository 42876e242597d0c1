"""Low-rank adapters in a traced Program: each projection of a layer gets two more constants, which have a slot for each adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trivium.ops import OPERATORS, INPUTS, Call, Constant, Program, Value


class Target(NamedTuple):
    """A projection that adapters can change. module: its name in the checkpoint, without ".weight". rows: which of the module's
    outputs it makes (None: all). a, b: its constants, float32[slots, rank, in] and [slots, rank, out], see the operator `lora`."""

    module: str
    rows: tuple[int, int] | None
    a: Value
    b: Value


def with_lora(program: Program, slots: int, rank: int) -> tuple[Program, Sequence[Target]]:
    """The Program with a `lora` behind each projection whose weight stands in the checkpoint under a layer (so not the output
    projection), and those projections. The new constants hold zeros until somebody assigns to them."""
    adapters = Value("adapters", *INPUTS["adapters"], "input")
    weights = {c.value: c for c in program.constants}
    targets, constants, calls = list[Target](), list(program.constants), list[Call]()
    instead: dict[Value, Value] = {}
    for call in program.calls:
        call = replace(call, args=tuple(None if v is None else instead.get(v, v) for v in call.args))
        calls.append(call)
        source = weights.get(call.args[1]) if call.name == "linear" and call.args[1] is not None else None
        if source is None or ".layers." not in source.source:
            continue
        (y,), (x, weight) = call.results, call.args[:2]
        assert x is not None and weight is not None
        name = weight.name.removesuffix(".weight")
        a, b = (_zeros(f"{name}.lora_{part}", slots, rank, int(n)) for part, n in (("a", x.shape[-1]), ("b", y.shape[-1])))
        instead[y] = Value(f"{y.name}.lora", y.shape, y.dtype, "call")
        calls.append(Call(OPERATORS["lora"], (y, x, a.value, b.value, adapters), {}, (instead[y],)))
        constants += [a, b]
        targets.append(Target(source.source.removesuffix(".weight"), source.rows, a.value, b.value))
    outputs = {name: instead.get(v, v) for name, v in program.outputs.items()}
    whole = replace(program, inputs=(*program.inputs, adapters), constants=tuple(constants), calls=tuple(calls), outputs=outputs)
    return whole, targets


def _zeros(name: str, *shape: int) -> Constant:
    return Constant(Value(name, shape, "weight", "constant"), name, None, np.zeros(shape, np.float32))
