"""Lowering a fused Program to the native tape: places for values, operations in order, host calls where a kernel is missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import ProgramError
from trivium.ops import Call, KVSpec, Program, Recurrent, Value
from trivium.plugin import Choice
from trivium_cpu import _native
from trivium_cpu.places import Arena, Barriers, Place
from trivium_cpu.profile import Cost

_INPUTS = ("token_ids", "positions", "query_starts", "context_lens", "sample_rows", "pool_rows", "adapters")
ABSENT = Place("constant", 0, 0, _native.Ref())
NO_NORM = _native.NormSpec("none", ABSENT.ref, ABSENT.ref, 0.0, 0.0)
_SYMBOLS = ("tokens", "rows", "pooled")
_OPTIONAL = ("rows", "pooled")
"""Of which a step may have none."""


@dataclass
class Resident:
    """A loaded constant. shape: the checkpoint's. Two or more dimensions are a packed `matrix` [product of all but the last, last];
    one dimension (or none), and float32 with more than two, is an `array`, which the tape reads where it is."""

    shape: tuple[int, ...]
    matrix: Any = None
    array: npt.NDArray[np.float32] | None = None

    def pack(self, runtime: Any) -> None:
        """An array becomes a packed matrix, for operators that multiply with it."""
        assert self.array is not None
        rows = np.ascontiguousarray(self.array).reshape(math.prod(self.shape[:-1]), -1).view(np.uint8)
        self.matrix, self.array = runtime.pack("float32", "float32", self.shape[-1], rows), None

    @property
    def nbytes(self) -> int:
        return int(self.matrix.nbytes if self.array is None else self.array.nbytes)


class Segment(NamedTuple):
    """A stretch of the tape [first, last), or one call that runs on the host."""

    first: int
    last: int
    call: Call | None = None


class Extent(NamedTuple):
    """A size: `factor` times the symbol's (one of _SYMBOLS; "fixed": 1)."""

    symbol: str
    factor: int

    @property
    def native(self) -> Any:
        return getattr(_native.Extent, self.symbol)(self.factor)


class Storage:
    """A place with its number of readers to come."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.readers = 0


def extent_of(shape: Sequence[int | str]) -> Extent:
    """Numbers in a value of `shape`."""
    symbols = [d for d in shape if isinstance(d, str)]
    if len(symbols) > 1 or any(s not in _SYMBOLS for s in symbols):
        raise ProgramError(f"this backend can't lay out a value of shape {list(shape)}")
    return Extent(symbols[0] if symbols else "fixed", math.prod(d for d in shape if isinstance(d, int)))


class Lowering:
    """Builds one tape. Kernels' lowering functions call `place`, `result`, `temporary`, `emit` and the rest."""

    def __init__(
        self, runtime: Any, program: Program, weights: Mapping[str, Resident], *, spec: KVSpec, layers: Mapping[int, Any],
        pool: Any, unpack: Callable[[Any], npt.NDArray[np.float32]], threads: int, max_model_len: int,
    ) -> None:  # fmt: skip
        self.runtime, self.program, self.spec, self.layers = runtime, program, spec, layers
        self.unpack, self.threads, self.max_model_len = unpack, threads, max_model_len
        self.tape = _native.Tape(runtime, pool)
        self.weights = {c.value: weights[c.value.name] for c in program.constants}
        self.kept: list[Any] = []
        self.segments: list[Segment] = []
        self.shared: dict[Any, Place] = {}
        self.costs: list[Cost] = []
        self.barriers = 0
        self._arenas = {name: Arena() for name in (*_SYMBOLS, "fixed")}
        self._barriers = Barriers()
        self._storage: dict[Value, Storage] = {}
        self._state_of = _state_indices(program)
        read = (value for call in program.calls for value in call.args if value is not None)
        self._readers = Counter([*read, *program.outputs.values()])

    def run(self, choices: Sequence[Choice]) -> None:
        """Lowers every call."""
        for choice in choices:
            if choice.kernel is None:
                self.on_host(choice.call)
            else:
                choice.kernel.run(self, choice.call)
            self._finish(choice.call)
        self._close_segment()

    def set_arenas(self, max_tokens: int, max_rows: int) -> None:
        sizes = {name: arena.size for name, arena in self._arenas.items()}
        self.tape.set_arenas(**sizes, max_tokens=max_tokens, max_rows=max_rows)

    def place(self, value: Value | None) -> Place:
        """Where an argument lies; ABSENT for None."""
        if value is None:
            return ABSENT
        if value.kind == "input":
            index = _INPUTS.index(value.name)
            return Place("input", index, 0, _native.Ref.input(index))
        if value.kind == "state":
            return Place("kv", self._state_of[value], 1, None)
        if value.kind == "constant":
            return self._constant(value)
        return self._storage[value].place

    def matrix(self, value: Value) -> Any:
        """The packed matrix of a weight argument."""
        weight = self.weights[value]
        if weight.matrix is None:
            weight.pack(self.runtime)
        self.kept.append(weight.matrix)
        return weight.matrix

    def layer(self, value: Value) -> Any:
        """The native KvLayer of a state argument."""
        return self.layers[self._state_of[value]]

    def state_shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a recurrent state."""
        spec = self.program.states[self._state_of[value]].spec
        assert isinstance(spec, Recurrent)
        return spec.shape

    def transposed(self, value: Value) -> Place:
        """A constant matrix as plain numbers, its columns as rows."""
        key = ("transposed", value)
        if key not in self.shared:
            weight = self.weights[value]
            plain = weight.array if weight.array is not None else self.unpack(weight.matrix)
            columns = np.ascontiguousarray(np.asarray(plain).T)
            self.kept.append(columns)
            self.shared[key] = Place("constant", 0, 0, _native.Ref.floats(columns))
        return self.shared[key]

    def result(self, value: Value) -> Place:
        """A new place for a result."""
        extent = extent_of(value.shape)
        return self._store(value, self._allocate(extent.symbol, extent.factor))

    def result_in(self, value: Value, source: Value) -> Place:
        """The result lies where `source` does (reshape)."""
        if source.kind == "call":
            self._storage[value] = self._storage[source]
            self._storage[value].readers += self._readers.get(value, 0)
            return self.place(source)
        return self._store(value, self.place(source))

    def result_over(self, value: Value, source: Value) -> Place:
        """A place for a result that starts as a copy of `source`: its own place if nobody reads it later."""
        if source.kind == "call" and self._storage[source].readers == 1:
            return self.result_in(value, source)
        place = self.result(value)
        extent = extent_of(value.shape)
        self.elementwise("copy", self.place(source), ABSENT, place, extent)
        return place

    def temporary(self, symbol: str, width: int) -> Place:
        """`width` numbers per unit of `symbol`, to be given back with `release`."""
        return self._allocate(symbol, width)

    def release(self, place: Place) -> None:
        if place.space in self._arenas:
            self._arenas[place.space].release(place.offset, place.width)

    def emit(
        self, name: str, *args: Any, reads: Iterable[Place], writes: Iterable[Place], cost: Cost | None = None, **named: Any
    ) -> None:  # fmt: skip
        """Appends an operation to the tape; `reads` and `writes` say where threads must meet first. cost: by default, that of
        moving them."""
        reads, writes = tuple(reads), tuple(writes)
        barrier = self._barriers.needed(reads, writes)
        self.barriers += barrier
        self.costs.append(cost or Cost(reads, writes))
        getattr(self.tape, name)(*args, **named, barrier=barrier)
        made = [place for place in writes if place.space != "constant"]
        if len({place.space for place in made}) == 1 and made[0].space in _OPTIONAL:
            self.tape.makes_rows(made[0].ref)

    def elementwise(self, kind: str, a: Place, b: Place, y: Place, count: Extent, *, factor: float = 1.0, gate: Any = None) -> None:
        gate = gate or _native.Gate("silu")
        self.emit("elementwise", kind, a.ref, b.ref, y.ref, count.native, factor, gate, reads=[a, b], writes=[y])

    def _constant(self, value: Value) -> Place:
        """A constant as plain numbers."""
        if value not in self.shared:
            array = self.weights[value].array
            if array is None:
                array = self.unpack(self.weights[value].matrix)
            self.kept.append(array)
            self.shared[value] = Place("constant", 0, 0, _native.Ref.floats(array))
        return self.shared[value]

    def _allocate(self, symbol: str, width: int) -> Place:
        offset = self._arenas[symbol].allocate(width)
        return Place(symbol, offset, width, getattr(_native.Ref, symbol)(offset))

    def _store(self, value: Value, place: Place) -> Place:
        storage = self._storage[value] = Storage(place)
        storage.readers = self._readers.get(value, 0)
        return place

    def _finish(self, call: Call) -> None:
        """Gives back the places that nobody reads any more."""
        for value in {v for v in call.args if v is not None and v.kind == "call"}:
            storage = self._storage[value]
            storage.readers -= call.args.count(value)
            self._drop(storage)
        for value in call.results:
            if value.kind == "call":
                self._drop(self._storage[value])

    def _drop(self, storage: Storage) -> None:
        if storage.readers == 0:
            self.release(storage.place)
            storage.readers = -1

    def on_host(self, call: Call) -> None:
        """The call runs between two stretches of the tape, as its reference."""
        for value in call.results:
            if value.kind != "state":
                self.result(value)
        self._close_segment()
        self.segments.append(Segment(0, 0, call))

    def _close_segment(self) -> None:
        first = max((s.last for s in self.segments), default=0)
        if len(self.tape) > first:
            self.segments.append(Segment(first, len(self.tape)))
        self._barriers.reset()

    def state_index(self, call: Call) -> int:
        """The state that a call touches; -1: none."""
        return next((self._state_of[v] for v in call.args if v is not None and v.kind == "state"), -1)


def _state_indices(program: Program) -> dict[Value, int]:
    """The index of the state that each state value is a version of."""
    index = {s.value: i for i, s in enumerate(program.states)}
    for call in program.calls:
        arguments = [v for v in call.args if v is not None and v.kind == "state"]
        results = [v for v in call.results if v.kind == "state"]
        index.update((r, index[a]) for r, a in zip(results, arguments, strict=False))
    return index
