"""One rank's stretch of a Program: its layers in a row, what comes from the ranks before it, and what those after it need.

A Program is cut between two layers where the fewest numbers cross (GPipe's partition, Huang et al., 2019, without its
micro-batches: a step goes through the ranks one after the other). Each rank stores the states of its own layers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trivium.errors import UnsupportedError
from trivium.ops import Builder, Call, KVSpec, Pattern, Program, Value, new_builder
from trivium_torch.ranks.shard import Part


class Stage(NamedTuple):
    """A rank's Program, the constant of the whole one that each of its constants is, and its states, by their index there."""

    program: Program
    parts: Mapping[str, Part]
    states: tuple[int, ...]


def cut(program: Program, count: int) -> list[Stage]:
    """A Program, fused or not, as `count` stages. Raises UnsupportedError where it has no such cuts."""
    whole = expanded(program)
    if count > len(whole.states):
        raise UnsupportedError(f"{len(whole.states)} layers can't be shared by {count} ranks", param="pipeline_parallel")
    places = _places(whole)
    bounds = _bounds(places, len(whole.states), count)
    ends = [0, *(min(places[first], key=lambda at: _crossing_width(whole, at)) for first in bounds[1:-1]), len(whole.calls)]
    home = {v: k for k in range(count) for c in whole.calls[ends[k] : ends[k + 1]] for v in c.results}
    crossing = list(_crossing(whole, ends, home))
    return [
        _stage(whole, whole.calls[ends[k] : ends[k + 1]], range(bounds[k], bounds[k + 1]), crossing, k, count) for k in range(count)
    ]


def all_of(program: Program) -> Stage:
    """The one stage of a Program that is not cut."""
    parts = {c.value.name: Part(c.value.name) for c in program.constants}
    return Stage(program, parts, tuple(range(len(program.states))))


def stage_spec(spec: KVSpec, states: Sequence[int]) -> KVSpec:
    """What a rank stores that has these states, in this order."""
    own = {state: i for i, state in enumerate(states)}
    groups = (g._replace(states=tuple(own[s] for s in g.states if s in own)) for g in spec.groups)
    return spec._replace(groups=tuple(groups))


def expanded(program: Program) -> Program:
    """The Program with what fused calls stand for."""
    b = new_builder()
    env: dict[Value, Any] = {v: b.input(v.name) for v in program.inputs}
    for c in program.constants:
        name = c.value.name
        env[c.value] = b.weight(name, c.value.shape, source=c.source) if c.array is None else b.array(name, c.array)
    env.update((s.value, b.state(s.value.name, s.spec)) for s in program.states)
    for call in program.calls:
        _replay(b, call, env)
    return b.finish({name: env[v] for name, v in program.outputs.items()}, vocab_size=program.vocab_size)


def _replay(b: Builder, call: Call, env: dict[Value, Any]) -> None:
    args = [None if v is None else env[v] for v in call.args]
    got = call.op.fn(b, *args, **call.attrs) if isinstance(call.op, Pattern) else b.call(call.name, *args, **call.attrs)
    env.update(zip(call.results, got if isinstance(got, tuple) else (got,), strict=True))


def _places(program: Program) -> Mapping[int, range]:
    """Where a cut in front of each state can be, as numbers of calls before it: none where a layer uses states of both sides."""
    versions = _versions(program)
    uses = [(at, versions[v]) for at, c in enumerate(program.calls) for v in c.args if v in versions]
    found = dict[int, range]()
    for first in range(1, len(program.states)):
        low = max((at for at, state in uses if state < first), default=-1) + 1
        found[first] = range(low, min((at for at, state in uses if state >= first), default=len(program.calls)) + 1)
    return found


def _bounds(places: Mapping[int, range], states: int, count: int) -> Sequence[int]:
    """The first state of each rank, and the number of all: as even as layers that have several states allow."""
    bounds = [0]
    for k in range(1, count):
        possible = [first for first, places in places.items() if first > bounds[-1] and places]
        if not possible:
            message = f"layers that share states can't be cut, and no {count} stretches are left: give fewer ranks"
            raise UnsupportedError(message, param="pipeline_parallel")
        bounds.append(min(possible, key=lambda first: abs(first - states * k // count)))
    return [*bounds, states]


def _versions(program: Program) -> dict[Value, int]:
    """The state that each state value is a version of."""
    found = {s.value: i for i, s in enumerate(program.states)}
    for call in program.calls:
        before = [v for v in call.args if v is not None and v.kind == "state"]
        found.update(zip((v for v in call.results if v.kind == "state"), (found[v] for v in before), strict=False))
    return found


def _crossing_width(program: Program, at: int) -> int:
    made = {v for c in program.calls[:at] for v in c.results if v.kind == "call"}
    later = {v for c in program.calls[at:] for v in c.args if v is not None} | set(program.outputs.values())
    return sum(_width(v) for v in made & later)


def _width(value: Value) -> int:
    return int(np.prod([d for d in value.shape if isinstance(d, int)]))


def _crossing(program: Program, ends: Sequence[int], home: Mapping[Value, int]) -> Iterator[tuple[Value, int, int]]:
    """(value, rank that makes it, a later rank that reads it), in one order for all."""
    seen = set()
    for k in range(len(ends) - 1):
        for value in (v for c in program.calls[ends[k] : ends[k + 1]] for v in c.args if v is not None and v.kind == "call"):
            if home[value] < k and (value, k) not in seen:
                seen.add((value, k))
                yield value, home[value], k


def _stage(
    program: Program, calls: Sequence[Call], states: range, crossing: Sequence[tuple[Value, int, int]], rank: int, count: int
) -> Stage:
    b, parts = new_builder(), dict[str, Part]()
    env: dict[Value, Any] = {v: b.input(v.name) for v in program.inputs}
    read = {v for c in calls for v in c.args}
    for c in program.constants:
        if c.value in read:
            parts[c.value.name] = Part(c.value.name)
            env[c.value] = (
                b.weight(c.value.name, c.value.shape, source=c.source) if c.array is None else b.array(c.value.name, c.array)
            )
    env.update((program.states[i].value, b.state(program.states[i].value.name, program.states[i].spec)) for i in states)
    for value, maker, _ in (c for c in crossing if c[2] == rank):
        env[value] = _received(b, value, maker, program)
    for call in calls:
        _replay(b, call, env)
    for value, _, reader in (c for c in crossing if c[1] == rank):
        b.send(_flat(b, env[value]), rank=reader)
    if rank == count - 1:
        outputs = {name: env[v] for name, v in program.outputs.items()}
        return Stage(b.finish(outputs, vocab_size=program.vocab_size), parts, tuple(states))
    blank = b.gather_rows(_blank(b, 1, program), b.input("sample_rows"))  # every Program has logits; nobody asks for these
    return Stage(b.finish({"logits": blank}, vocab_size=1), parts, tuple(states))


def _blank(b: Builder, width: int, program: Program) -> Value:
    """Zeros[tokens, width]: what says how much is to be received."""
    tables = [c.value.shape[0] for c in program.constants if len(c.value.shape) == 2]
    ids = max(program.vocab_size, *(n for n in tables if isinstance(n, int)))
    narrow = b.embedding(b.input("token_ids"), b.array("stage.zero", np.zeros((ids, 1), np.float32)))
    wide: Value = b.linear(narrow, b.array(f"stage.zeros.{width}", np.zeros((width, 1), np.float32)), None)
    return wide


def _received(b: Builder, value: Value, maker: int, program: Program) -> Value:
    if value.dtype != "float" or value.shape[0] != "tokens":
        raise UnsupportedError(f"{value!r} crosses a cut, and only activations of tokens can", param="pipeline_parallel")
    got: Value = b.recv(_blank(b, _width(value), program), rank=maker)
    return got if len(value.shape) == 2 else b.reshape(got, shape=value.shape)


def _flat(b: Builder, value: Value) -> Value:
    return value if len(value.shape) == 2 else b.reshape(value, shape=(value.shape[0], _width(value)))
