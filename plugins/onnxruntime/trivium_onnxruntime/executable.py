"""A compiled Program: ONNX models, and the calls between them that run on the host as their references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trivium.errors import BackendError, UnsupportedError
from trivium.ops import OPERATORS, Batch, Call, Program, Sampled, Value
from trivium.plugin import Choice, Executable, Session, Step, run_on_host
from trivium_onnxruntime.graph import Common, Graph
from trivium_onnxruntime.lower_ops import store_pending
from trivium_onnxruntime.pages import Pool
from trivium_onnxruntime.rectangles import Rectangle, cut, rectangle
from trivium_onnxruntime.rows import Rows

if TYPE_CHECKING:
    import onnxruntime

Array = npt.NDArray[Any]
_KEPT_BINDINGS = 16
"""Bindings of rows to a model that are kept: one for each rectangle that steps are usually made of."""


class HostStep(Step):
    """A step that ran to its end inside run()."""

    def __init__(self, outputs: Mapping[str, Array], sampled: Sampled) -> None:
        self._outputs = outputs
        self._sampled = sampled

    def tokens(self) -> Sampled:
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(self._outputs)}")
        return self._outputs[name]


class Model:
    """One ONNX model, its session, and its weights bound to it."""

    def __init__(self, graph: Graph, open_session: Callable[[bytes, Mapping[str, Array]], onnxruntime.InferenceSession]) -> None:
        self.graph = graph
        self._session = open_session(graph.model(), graph.external())
        graph.initializers.clear()
        self._bindings: dict[tuple[int, ...], Any] = {}
        self.results = [name for name in graph.outputs if not name.startswith(("keys.", "values."))]

    def run(
        self, rect: Rectangle, rows: Rows, feeds: Mapping[str, Array], widths: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Array]:
        """Runs on the rectangle's rows. widths: shapes of the outputs, which land in new arrays without a copy."""
        binding = self._binding(rect, rows)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        made = {name: np.empty(widths[name], np.float32) for name in self.results}
        for name, array in made.items():
            binding.bind_ortvalue_output(name, _ort_value(array))
        self._session.run_with_iobinding(binding)
        return made

    def _binding(self, rect: Rectangle, rows: Rows) -> Any:
        """A binding whose keys and values are the rectangle's rows, in place of which the new ones are appended."""
        key = rows.generation, rect.base, len(rect.seqs)
        if key not in self._bindings:
            if len(self._bindings) >= _KEPT_BINDINGS or any(k[0] != rows.generation for k in self._bindings):
                self._bindings.clear()
            self._bindings[key] = self._bind(rect, rows)
        return self._bindings[key]

    def _bind(self, rect: Rectangle, rows: Rows) -> Any:
        binding = self._session.io_binding()
        for name, array in self.graph.variables.items():
            binding.bind_ortvalue_input(name, _ort_value(array))
        spec = self.graph.common.spec
        for state in self.graph.states:
            group, layer = spec.group_of(state)
            held = rows.groups[group].data[layer][:, rect.base : rect.base + len(rect.seqs)]
            for part, array in zip(("keys", "values"), held):
                value = _ort_value(array)
                binding.bind_ortvalue_input(f"{part}.{state}", value)
                for name in self.graph.outputs:
                    if name.startswith(f"{part}.{state}.new"):
                        binding.bind_ortvalue_output(name, value)
        return binding


def _ort_value(array: Array) -> Any:
    """The array's memory as onnxruntime sees it; nothing is copied."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def sample(program: Program, outputs: Mapping[str, Array], batch: Batch) -> Sampled:
    """The step's ids, drawn by the reference on the host."""
    if "logits" not in outputs:
        return Sampled(np.zeros(0, np.int32))
    logits = outputs["logits"]
    return OPERATORS["sample"](logits, batch.sampling, vocab_size=program.vocab_size or logits.shape[-1])  # type: ignore[no-any-return]


class OnnxExecutable(Executable):
    """Runs the models and host calls of a Program in order, each model once for every rectangle of the step."""

    def __init__(
        self, session: Session, common: Common, choices: Sequence[Choice], pool: Pool | None, budget: int,
        open_session: Callable[[bytes, Mapping[str, Array]], onnxruntime.InferenceSession],
    ) -> None:  # fmt: skip
        self._session, self._common, self._program, self._pool = session, common, common.program, pool
        self.rows = Rows(pool or Pool(common.spec, 0), budget)
        self._parts = [p if isinstance(p, Call) else Model(p, open_session) for p in stretches(common, choices)]

    def run(self, batch: Batch) -> HostStep:
        env: dict[Value, Array] = {}
        rects = self._rectangles(batch)
        for part in self._parts:
            if isinstance(part, Call):
                on_host(self._session, self._common, part, env, batch)
            else:
                self._run_model(part, env, batch, rects)
        outputs = {name: env[value] for name, value in self._program.outputs.items()}
        return HostStep(outputs, sample(self._program, outputs, batch))

    def _rectangles(self, batch: Batch) -> list[Rectangle]:
        """The step's rectangles, each on rows of its own as far as the rows' budget goes."""
        found = [rectangle(batch, seqs, 0) for seqs in cut(batch)]
        if not self.rows.budgeted or not found:
            return found
        positions = max(int(r.past.max()) + r.grid.shape[1] for r in found)
        most = self.rows.at_most(max(positions, self.rows.positions))
        placed, base = [], 0
        for part in (seqs for r in found for seqs in np.array_split(r.seqs, -(-len(r.seqs) // most))):
            base = 0 if base + len(part) > most else base
            placed.append(rectangle(batch, part, base))
            base += len(part)
        self.rows.reserve(max(r.base + len(r.seqs) for r in placed), positions)
        return [self._ordered(batch, r) for r in placed]

    def _ordered(self, batch: Batch, rect: Rectangle) -> Rectangle:
        """The rectangle with its sequences where their rows are."""
        group = next(iter(self.rows.groups))
        order = self.rows.groups[group].order(rect.base, batch.block_tables[group][rect.seqs], self._blocks(rect))
        return rect if order is None else rectangle(batch, rect.seqs[order], rect.base)

    def _blocks(self, rect: Rectangle) -> npt.NDArray[np.int64]:
        return -(-rect.past // self._common.spec.page_size)

    def _run_model(self, model: Model, env: dict[Value, Array], batch: Batch, rects: Sequence[Rectangle]) -> None:
        results = {name: self._empty(model, name, batch) for name in model.results}
        for rect in rects:
            self._run_rectangle(model, env, batch, rect, results)
        for name, array in results.items():
            env[model.graph.values[name]] = array

    def _empty(self, model: Model, name: str, batch: Batch) -> Array:
        return np.empty(shape_in(model.graph.values[name], batch), np.float32)

    def _run_rectangle(
        self, model: Model, env: dict[Value, Array], batch: Batch, rect: Rectangle, results: Mapping[str, Array]
    ) -> None:  # fmt: skip
        groups = {self._common.spec.group_of(s)[0] for s in model.graph.states}
        for group in groups:
            self.rows.groups[group].fill(rect.base, batch.block_tables[group][rect.seqs], self._blocks(rect))
        rows = _RowsOfInputs(batch, rect)
        feeds = self._feeds(model, env, batch, rect, rows)
        values = model.graph.values
        shapes = {name: (*rows.lead(values[name]), *inner(values[name])) for name in model.results}
        try:
            made = model.run(rect, self.rows, feeds, shapes)
        except Exception as e:
            raise BackendError(f"onnxruntime failed in a step of {batch.tokens} tokens of {batch.seqs} sequences: {e}") from e
        for name, array in made.items():
            rows.put(values[name], array, results[name])
        row, position = rect.places()
        for group in groups if row is not None else ():
            self.rows.groups[group].keep(row, position, batch.slot_mapping[group][rect.tokens])

    def _feeds(
        self, model: Model, env: Mapping[Value, Array], batch: Batch, rect: Rectangle, rows: _RowsOfInputs
    ) -> dict[str, Array]:  # fmt: skip
        feeds: dict[str, Array] = {}
        for name, value in model.graph.values.items():
            if name in model.graph.inputs:
                source = getattr(batch, name) if value.kind == "input" else env[value]
                feeds[name] = rows.take(value, source)
        if model.graph.states:
            feeds["queries"] = rect.queries.astype(np.int32)
            feeds["last_position"] = (rect.past + rect.queries - 1).astype(np.int32)
            feeds["longest"] = np.array(int(rect.past.max()) + rect.grid.shape[1], np.int32)
        for state in model.graph.from_pages:
            group, layer = self._common.spec.group_of(state)
            tables = batch.block_tables[group][rect.seqs]
            self.rows.groups[group].fill(rect.base, tables, -(-(rect.past + rect.queries) // self._common.spec.page_size))
            made = self.rows.groups[group].newest(layer, *rect.cells())
            feeds |= {
                f"{part}.{state}": np.ascontiguousarray(x.reshape(*rect.grid.shape, -1)) for part, x in zip(("key", "value"), made)
            }
        return feeds


def on_host(session: Session, common: Common, call: Call, env: dict[Value, Array], batch: Batch) -> None:
    """Runs a call as its reference; its results go into `env`."""
    args = [None if v is None or v.kind == "state" else _argument(common, v, env, batch) for v in call.args]
    state = next((common.state_of[v] for v in call.args if v is not None and v.kind == "state"), -1)
    for value, result in zip(call.results, run_on_host(session, common.spec, call, args, batch, state), strict=True):
        if result is not None:
            env[value] = np.asarray(result)


def _argument(common: Common, value: Value, env: Mapping[Value, Array], batch: Batch) -> Any:
    if value.kind == "constant":
        return common.weights[value]
    return getattr(batch, value.name) if value.kind == "input" else env[value].reshape(shape_in(value, batch))


class _RowsOfInputs:
    """Takes a rectangle's part of the step's arrays, and puts its results where they belong in the step's."""

    def __init__(self, batch: Batch, rect: Rectangle) -> None:
        self._rect = rect
        self._cell = np.full(batch.tokens, -1, np.int64)
        self._cell[rect.tokens] = np.flatnonzero(rect.real)
        self._chosen = {
            "rows": self._own(batch.sample_rows), "pooled": self._own(batch.pool_rows),
        }  # fmt: skip

    def _own(self, rows: npt.NDArray[np.int32]) -> tuple[Array, Array]:
        """Which of the chosen rows lie in the rectangle, and in which cells."""
        cells = self._cell[rows]
        which = np.flatnonzero(cells >= 0)
        return which, cells[which]

    def take(self, value: Value, source: Array) -> Array:
        """A model's input: the cells of an array of tokens, padding repeated; the cells of chosen rows; or their own rows."""
        dtype = np.float32 if value.dtype == "float" else np.int32
        if value.shape[0] == "tokens":
            found = source[self._rect.grid]
            return np.ascontiguousarray(found.reshape(*self._rect.grid.shape, *inner(value)), dtype)
        which, cells = self._chosen[str(value.shape[0])]
        return (
            cells.astype(np.int32) if value.kind == "input" else np.ascontiguousarray(source[which].reshape(len(which), -1), dtype)
        )

    def lead(self, value: Value) -> tuple[int, ...]:
        """The leading dimensions of a model's output."""
        return self._rect.grid.shape if value.shape[0] == "tokens" else (len(self._chosen[str(value.shape[0])][0]),)

    def put(self, value: Value, made: Array, result: Array) -> None:
        if value.shape[0] == "tokens":
            result[self._rect.tokens] = made[self._rect.real].reshape(-1, *result.shape[1:])
        else:
            result[self._chosen[str(value.shape[0])][0]] = made.reshape(-1, *result.shape[1:])


def inner(value: Value) -> tuple[int, ...]:
    """() for the step's integers, else the one inner dimension of a flat tensor."""
    return () if value.kind == "input" else (int(np.prod(value.shape[1:], dtype=np.int64)),)  # type: ignore[arg-type]


def shape_in(value: Value, batch: Batch) -> tuple[int, ...]:
    """A value's shape in a step."""
    sizes = {"tokens": batch.tokens, "rows": len(batch.sample_rows), "pooled": len(batch.pool_rows), "seqs": batch.seqs}
    return tuple(sizes[d] if isinstance(d, str) else d for d in value.shape)


def stretches(common: Common, choices: Sequence[Choice]) -> Iterable[Graph | Call]:
    """The Program as models and host calls; what one makes and a later one reads becomes an output of it."""
    parts: list[list[Choice]] = []
    for choice in choices:
        if choice.kernel is None or not parts or parts[-1][0].kernel is None:
            parts.append([])
        parts[-1].append(choice)
    wanted = set(common.program.outputs.values())
    made: list[Graph | Call] = []
    for part in reversed(parts):
        made.append(part[0].call if part[0].kernel is None else _graph(common, part, wanted))
        wanted |= {v for choice in part for v in choice.call.args if v is not None}
    return reversed(made)


def _graph(common: Common, part: Sequence[Choice], wanted: set[Value]) -> Graph:
    graph = Graph(common)
    for choice in part:
        assert choice.kernel is not None
        choice.kernel.run(graph, choice.call)
    store_pending(graph)
    for value in (v for choice in part for v in choice.call.results if v in wanted and v.kind == "call"):
        graph.values[f"out.{value.name}"] = value
        lead = ("B", "S") if value.shape[0] == "tokens" else (str(value.shape[0]),)
        graph.output(f"out.{value.name}", graph.tensor(value), (*lead, *inner(value)))
    return graph
