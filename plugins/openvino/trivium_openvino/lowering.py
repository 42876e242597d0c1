"""Lowering: a fused Program becomes OpenVINO models, one if every call has a kernel, and host calls between them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset15 as ops

from trivium.ops import Batch, Call, KVSpec, Program, Value
from trivium.plugin import Choice
from trivium_openvino.weights import Resident, join

Array = npt.NDArray[Any]
Make = Callable[[Batch], Array]
"""One input of a step; it is copied before run() returns."""
_INTEGERS = {np.dtype(np.int32): ov.Type.i32, np.dtype(np.float32): ov.Type.f32}


class Feed(NamedTuple):
    """An input that changes from step to step."""

    parameter: Any
    make: Make


class Fixed(NamedTuple):
    """An input that is set once: memory of the session that the model reads, and for pages writes."""

    parameter: Any
    array: Array
    type: Any


@dataclass
class Part:
    """One OpenVINO model in the making. taken, given: values that cross from and to other parts. env: what is known of values."""

    env: dict[Value, Any] = field(default_factory=dict)
    feeds: dict[Any, Feed] = field(default_factory=dict)
    fixed: list[Fixed] = field(default_factory=list)
    taken: dict[Value, Any] = field(default_factory=dict)
    given: list[Value] = field(default_factory=list)

    def model(self) -> ov.Model:
        parameters = [f.parameter for f in (*self.feeds.values(), *self.fixed)] + list(self.taken.values())
        results = [ops.result(self.env[v]) for v in self.given]
        return ov.Model(results, parameters, "trivium")


class Lowering:
    """Builds the parts. Kernels' lowering functions call `node`, `set`, `feed`, `fix` and the rest."""

    def __init__(
        self, program: Program, weights: Mapping[str, Resident], spec: KVSpec, pool: Callable[[int], tuple[Array, ...]]
    ) -> None:  # fmt: skip
        self.program, self.spec, self.pool = program, spec, pool
        self.weights = {c.value: weights[c.value.name] for c in program.constants}
        self.parts: list[Part | Call] = []
        self.kept: list[Resident] = []
        self.state_of = _state_indices(program)
        self._siblings = _siblings(program, self.weights)

    def run(self, choices: Sequence[Choice]) -> list[Part | Call]:
        """Every part, in order: models and calls that run on the host."""
        for choice in choices:
            if choice.kernel is None:
                self.parts.append(choice.call)
                continue
            if not self.parts or isinstance(self.parts[-1], Call):
                self.parts.append(Part())
            choice.kernel.run(self, choice.call)
        self._connect()
        return self.parts

    @property
    def part(self) -> Part:
        part = self.parts[-1]
        assert isinstance(part, Part)
        return part

    def node(self, value: Value | None) -> Any:
        """The output of the graph that stands for an argument."""
        assert value is not None
        env = self.part.env
        if value not in env:
            if value.kind == "constant":
                env[value] = self.weights[value].node(self.fix)
            elif value.kind == "input":
                env[value] = self.feed(value.name, (-1,), lambda batch: getattr(batch, value.name))
            else:
                shape = [d if isinstance(d, int) else -1 for d in value.shape]
                env[value] = ops.parameter(shape, np.float32 if value.dtype == "float" else np.int32)
                self.part.taken[value] = env[value]
        return env[value]

    def set(self, value: Value, node: Any) -> None:
        """What a result is."""
        self.part.env[value] = node

    def array(self, value: Value | None) -> npt.NDArray[np.float32]:
        """A constant's numbers."""
        assert value is not None
        return self.weights[value].numbers()

    def siblings(self, call: Call) -> list[Call]:
        """The projections that are one product with this one, itself among them, in order."""
        return self._siblings.get(call, [call])

    def joined(self, calls: Sequence[Call]) -> Any:
        """The weights of several projections, one below the other. The graph reads them where they are, so they are kept."""
        self.kept.append(join([self.weights[c.args[1]] for c in calls if c.args[1] is not None]))
        return self.kept[-1].node(self.fix)

    def feed(self, key: Any, shape: Sequence[int], make: Make, dtype: Any = np.int32) -> Any:
        """An input that is made of each step's batch; one for equal keys."""
        feeds = self.part.feeds
        if key not in feeds:
            feeds[key] = Feed(ops.parameter(list(shape), dtype), make)
        return feeds[key].parameter

    def fix(self, array: Array, type: Any = None) -> Any:
        """An input whose memory is `array`, now and in all steps."""
        dynamic = type is not None
        node = ops.parameter([-1] * array.ndim if dynamic else list(array.shape), ov.Type.dynamic if dynamic else array.dtype)
        self.part.fixed.append(Fixed(node, array, type or _INTEGERS[array.dtype]))
        return node

    def _connect(self) -> None:
        """Tells every part what others read of it."""
        wanted = set(self.program.outputs.values())
        for part in self.parts:
            wanted.update(part.taken if isinstance(part, Part) else (v for v in part.args if v is not None))
        for part in self.parts:
            if isinstance(part, Part):
                part.given = [v for v in part.env if v in wanted and v.kind == "call" and v not in part.taken]


def _siblings(program: Program, weights: Mapping[Value, Resident]) -> dict[Call, list[Call]]:
    """Projections of the same value with weights that can be joined, and either all with a bias or all without."""
    found: dict[Any, list[Call]] = {}
    for call in program.calls:
        if call.name == "linear" and (kind := weights[call.args[1]].kind if call.args[1] in weights else None):
            found.setdefault((call.args[0], call.args[2] is None, kind), []).append(call)
    return {call: calls for calls in found.values() for call in calls}


def _state_indices(program: Program) -> dict[Value, int]:
    """The index of the state that each state value is a version of."""
    index = {s.value: i for i, s in enumerate(program.states)}
    for call in program.calls:
        arguments = [v for v in call.args if v is not None and v.kind == "state"]
        results = [v for v in call.results if v.kind == "state"]
        index.update((r, index[a]) for r, a in zip(results, arguments, strict=False))
    return index
