"""A Program over pages: ONNX models, each run once a step, whose keys and values stay on the device.

The step is one row of tokens (B = 1). PagedAttention takes trivium's own query starts, block tables and slots, so there are no rows
to keep and no rectangles to cut. What comes back to the host are the outputs only: logits of the sampled rows.
Nothing here was run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import BackendError
from trivium.ops import Batch, Call, Value
from trivium.plugin import Choice, Executable, Session
from trivium_onnxruntime.device_pages import DevicePool
from trivium_onnxruntime.executable import HostStep, inner, on_host, sample, shape_in, stretches
from trivium_onnxruntime.graph import Common, Graph

Array = npt.NDArray[Any]
_BOUND = 256
"""What PagedAttention is told of the longest context is rounded up to this: it sizes launches and workspaces by it."""


class PagedModel:
    """One ONNX model and its session."""

    def __init__(self, graph: Graph, pool: DevicePool | None, open_session: Callable[[bytes, Mapping[str, Array]], Any]) -> None:
        self.graph, self._pool = graph, pool
        self._session = open_session(graph.model(), graph.external())
        graph.initializers.clear()
        self._results = {name: graph.values[name] for name in graph.outputs if not name.startswith(("keys.", "values."))}

    def run(self, batch: Batch, env: dict[Value, Array]) -> None:
        """One step; what it makes goes into `env`, float32 in host memory."""
        import onnxruntime

        binding = self._session.io_binding()
        for name, array in (self._feeds(batch, env) | self.graph.variables).items():
            binding.bind_cpu_input(name, array)
        for state in self.graph.states:
            self._bind_pages(binding, state)
        made = {name: np.empty(_in_a_row(value, batch), np.float32) for name, value in self._results.items()}
        for name, array in made.items():
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self._session.run_with_iobinding(binding)
        env.update((value, made[name].reshape(shape_in(value, batch))) for name, value in self._results.items())

    def _bind_pages(self, binding: Any, state: int) -> None:
        """A state's pages where they lie, for what is read and for what is written."""
        assert self._pool is not None
        for part, value in zip(("keys", "values"), self._pool.values[state]):
            binding.bind_ortvalue_input(f"{part}.{state}", value)
            for name in self.graph.outputs:
                if name.startswith(f"{part}.{state}.new"):
                    binding.bind_ortvalue_output(name, value)

    def _feeds(self, batch: Batch, env: Mapping[Value, Array]) -> dict[str, Array]:
        known = _step(batch)
        feeds = {name: known[name] for name in self.graph.inputs if name in known}
        for name, value in self.graph.values.items():
            if name in self.graph.inputs:
                feeds[name] = self._input(value, getattr(batch, value.name) if value.kind == "input" else env[value], batch)
        for state in self.graph.from_pages:
            for part in ("key", "value"):
                width = int(self.graph.inputs[f"{part}.{state}"][1][-1])
                feeds[f"{part}.{state}"] = np.zeros((1, batch.tokens, width), self.graph.common.dtype)
        return feeds

    def _input(self, value: Value, source: Array, batch: Batch) -> Array:
        dtype = self.graph.common.dtype if value.dtype == "float" else "int32"
        return np.ascontiguousarray(source.reshape(_in_a_row(value, batch)), dtype)


class PagedExecutable(Executable):
    """Runs the models and host calls of a Program in order. A Program whose calls all have a lowering is one model."""

    def __init__(
        self, session: Session, common: Common, choices: Sequence[Choice], pool: DevicePool | None,
        open_session: Callable[[bytes, Mapping[str, Array]], Any],
    ) -> None:  # fmt: skip
        self._session, self._common = session, common
        self._parts = [p if isinstance(p, Call) else PagedModel(p, pool, open_session) for p in stretches(common, choices)]

    def run(self, batch: Batch) -> HostStep:
        env: dict[Value, Array] = {}
        for part in self._parts:
            if isinstance(part, Call):
                on_host(self._session, self._common, part, env, batch)
            else:
                self._run_model(part, batch, env)
        outputs = {name: env[value] for name, value in self._common.program.outputs.items()}
        return HostStep(outputs, sample(self._common.program, outputs, batch))

    def _run_model(self, model: PagedModel, batch: Batch, env: dict[Value, Array]) -> None:
        try:
            model.run(batch, env)
        except Exception as e:
            raise BackendError(f"onnxruntime failed in a step of {batch.tokens} tokens of {batch.seqs} sequences: {e}") from e


def _in_a_row(value: Value, batch: Batch) -> tuple[int, ...]:
    """The shape of a model's input or output: all tokens of the step in one row."""
    lead = (1, batch.tokens) if value.shape[0] == "tokens" else shape_in(value, batch)[:1]
    return (*lead, *inner(value))


def _step(batch: Batch) -> dict[str, Array]:
    """Inputs of PagedAttention by the names that the lowering gives them, all int32."""
    queries = np.diff(batch.query_starts)
    bounds = int(queries.max(initial=0)), math.ceil(int(batch.context_lens.max(initial=0)) / _BOUND) * _BOUND
    made = {
        "step.starts": batch.query_starts, "step.past": batch.context_lens - queries, "step.bounds": np.array(bounds),
        "step.nowhere": np.full(batch.tokens, -1),
    }  # fmt: skip
    made |= {f"step.tables.{g}": table for g, table in enumerate(batch.block_tables)}
    made |= {f"step.slots.{g}": slots for g, slots in enumerate(batch.slot_mapping)}
    return {name: np.ascontiguousarray(array, np.int32) for name, array in made.items()}
