"""Which of a Program's weights are projections that may be rounded, what each of them reads, and where a factor on its inputs could
come from instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trivium.ops import Call, Constant, Program, Value

from trivium_compress.walk import LAYER


class Projection(NamedTuple):
    """A weight of `linear`, by the checkpoint's name for it (several constants may be rows of one tensor), and what it reads."""

    source: str
    input: Value
    layer: int


class Scaling(NamedTuple):
    """Projections that read one value, and what makes it: its inputs can be divided by factors that the projections are multiplied
    with. norm: the norm's weight; or rows: those of the projection, (source, first row), whose outputs they are the products of.
    offset: what the norm adds to its weight. bias: that of the rows."""

    sources: tuple[str, ...]
    input: Value
    norm: Constant | None = None
    offset: float = 0.0
    rows: Constant | None = None
    bias: Constant | None = None


def projections(program: Program) -> dict[str, Projection]:
    """By source: weights of two dimensions that `linear` reads within a layer, but for routers of experts."""
    constants = {c.value: c for c in program.constants}
    routed = {v for call in program.calls if call.name == "moe_route" for v in call.args}
    found: dict[str, Projection] = {}
    for call in program.calls:
        weight = constants.get(call.args[1]) if call.name == "linear" and call.args[1] is not None else None
        layer = LAYER.search(weight.source) if weight is not None else None
        if weight is None or layer is None or call.args[0] is None or not routed.isdisjoint(call.results):
            continue
        found.setdefault(weight.source, Projection(weight.source, call.args[0], int(layer[1])))
    return found


def scalings(program: Program, known: Mapping[str, Projection]) -> list[Scaling]:
    """Where a factor on a projection's inputs is free: behind a norm that only projections read, and behind a gate whose other
    side is linear."""
    graph = _Graph(program)
    by_input: dict[Value, list[str]] = {}
    for projection in known.values():
        by_input.setdefault(projection.input, []).append(projection.source)
    found = (graph.scaling(value, tuple(sources)) for value, sources in by_input.items())
    return [s for s in found if s is not None]


class _Graph:
    """Who makes a value and who reads it."""

    def __init__(self, program: Program) -> None:
        self.constants = {c.value: c for c in program.constants}
        self.makers = {v: call for call in program.calls for v in call.results}
        self.readers: dict[Value, list[Call]] = {}
        for call in program.calls:
            for value in {v for v in call.args if v is not None}:
                self.readers.setdefault(value, []).append(call)
        self.outputs = set(program.outputs.values())

    def scaling(self, value: Value, sources: tuple[str, ...]) -> Scaling | None:
        maker = self.makers.get(value)
        if maker is None or value in self.outputs or not self._all_linear(value, sources):
            return None
        if maker.name == "rms_norm":
            norm = self._own(maker.args[1])
            return None if norm is None else Scaling(sources, value, norm=norm, offset=float(maker.attrs["offset"]))
        if maker.name == "gated" and maker.attrs["limit"] is None and maker.attrs["up_offset"] == 0.0:
            return self._behind_gate(maker, value, sources)
        return None

    def _behind_gate(self, gate: Call, value: Value, sources: tuple[str, ...]) -> Scaling | None:
        up = gate.args[1]
        maker = None if up is None else self.makers.get(up)
        if maker is None or maker.name != "linear" or len(self.readers[maker.results[0]]) > 1:
            return None
        rows, bias = self._own(maker.args[1]), self._own(maker.args[2])
        if rows is None or (maker.args[2] is not None and bias is None):
            return None
        return Scaling(sources, value, rows=rows, bias=bias)

    def _all_linear(self, value: Value, sources: Sequence[str]) -> bool:
        return all(source in sources for source in self._sources_that_read(value))

    def _sources_that_read(self, value: Value) -> Iterator[str]:
        for call in self.readers[value]:
            weight = self.constants.get(call.args[1]) if call.name == "linear" and call.args[1] is not None else None
            yield "" if weight is None else weight.source

    def _own(self, value: Value | None) -> Constant | None:
        """The constant, if nothing else reads it."""
        return self.constants.get(value) if value is not None and len(self.readers.get(value, ())) == 1 else None
