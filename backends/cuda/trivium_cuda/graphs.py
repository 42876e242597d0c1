"""Decode steps as CUDA graphs: one for each number of tokens, replayed with the step's arrays at the addresses of its capture.

A step of fewer tokens is padded: sequences behind the last one have no tokens, and tokens behind the last one belong to no
sequence and are stored nowhere, so that nothing of them reaches the pages or the rows of others. So a graph of as many sequences
as tokens serves fewer sequences of several tokens, too, by which drafts are verified. What may differ between a capture and its
replays is on the device; what a kernel is told by the host is an upper bound (max_context) or the size itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trivium.errors import BackendError
from trivium.ops import Batch
from trivium.ops.batch import COLUMNS
from trivium.ops.sample import plain_inputs
from trivium.plugin import Executable, Step
from trivium_cuda.device import Graph
from trivium_cuda.executor import QueuedExecutable
from trivium_cuda.session import CudaSession
from trivium_cuda.staging import SAMPLING, Array, Layout

I32, I64 = np.dtype("int32"), np.dtype("int64")


@dataclass(frozen=True)
class Captured:
    """A graph for `size` tokens of at most as many sequences. memory: where its arrays lie on the device, as `layout` says; arrays:
    they."""

    size: int
    layout: Layout
    memory: Tensor
    arrays: Mapping[str, Tensor]
    graph: Graph
    outputs: Mapping[str, Tensor]


def layout_of(size: int, groups: int, blocks: int, *, adapters: bool) -> Layout:
    """The arrays of a step of `size` tokens and sequences, all of which are sampled and pooled."""
    rows = dict.fromkeys(("token_ids", "positions", "context_lens", "sample_rows", "pool_rows"), ((size,), I32))
    return Layout(
        {
            **rows, "query_starts": ((size + 1,), I32), "adapters": ((size if adapters else 0,), I32),
            "block_tables": ((groups, size, blocks), I32), "slot_mapping": ((groups, size), I64),
            **{f"sampling.{name}": ((size,), np.dtype(COLUMNS[name])) for name in SAMPLING},
        }
    )  # fmt: skip


_PADDING = {"block_tables": -1, "slot_mapping": -1, "adapters": -1}


def fill(places: Mapping[str, Array], batch: Batch) -> None:
    """Writes a step of at most as many tokens, padded."""
    for name, place in places.items():
        if not place.size:  # adapters of a Program that has none
            continue
        column = name.removeprefix("sampling.")
        array: Array = getattr(batch if column == name else batch.sampling, column)
        place[...] = array[-1] if name == "query_starts" else _PADDING.get(name, 0)
        place[tuple(slice(n) for n in array.shape)] = array


def empty_step(size: int, groups: int, adapters: bool) -> Batch:
    """Sequences of one token that are stored nowhere: what kernels that plan on the host get to see of a capture."""
    ones = np.ones(size, np.int32)
    return Batch(
        ones * 0, ones * 0, np.arange(size + 1, dtype=np.int32), ones, np.zeros((groups, size, 1), np.int32),
        np.full((groups, size), -1, np.int64), np.arange(size, dtype=np.int32), plain_inputs(size),
        np.arange(size, dtype=np.int32), -ones if adapters else ones[:0],
    )  # fmt: skip


class GraphExecutable(Executable):
    """Replays a graph where one fits the step, and is `eager` elsewhere."""

    def __init__(self, session: CudaSession, eager: QueuedExecutable, *, adapters: bool) -> None:
        self._session, self._eager, self._adapters = session, eager, adapters
        self._blocks = -(-int(session.options["max_model_len"]) // session.spec.page_size)
        self.captured: dict[int, Captured] = {}
        """By number of tokens, ascending."""
        self._capture_all(session.graph_sizes)

    def run(self, batch: Batch) -> Step:
        found = self._graph_for(batch)
        if found is None:
            return self._eager.run(batch)
        session = self._session
        with session.faults(batch.tokens, batch.seqs), session.api.active(), torch.inference_mode():
            self._send(found.layout, found.memory, batch)
            found.graph.replay()
            rows = {"logits": len(batch.sample_rows), "hidden": len(batch.pool_rows)}
            outputs = {name: y[: rows.get(name, batch.tokens)] for name, y in found.outputs.items()}
            return self._eager.finish(outputs, batch, found.arrays)

    def _graph_for(self, batch: Batch) -> Captured | None:
        queries = np.diff(batch.query_starts)
        several = queries.max(initial=0) > self._session.graph_queries or queries.min(initial=1) < 1
        if several or not self._fits(batch):
            return None
        return next((c for size, c in self.captured.items() if size >= batch.tokens), None)

    def _fits(self, batch: Batch) -> bool:
        """Whether the arrays that are no longer than a step has tokens are so, and tables are those of a graph."""
        rows = max(len(batch.sample_rows), len(batch.pool_rows), len(batch.sampling.seed))
        return rows <= batch.tokens and batch.block_tables.shape[2] <= self._blocks

    def _send(self, layout: Layout, memory: Tensor, batch: Batch) -> None:
        """The step's arrays, by one copy to where the graph reads them."""
        session = self._session
        block = session.pinned.take(layout.nbytes)
        fill(layout.on_host(block), batch)
        session.api.copy(memory, block[: layout.nbytes])
        session.pinned.give_after(session.api.record(), block)

    # Captures.

    def _capture_all(self, sizes: Sequence[int]) -> None:
        """The largest first: the others then find most of their memory in the pool that they share."""
        left, why = list(sizes), ""
        made = []
        for captured in self._captures(sorted(sizes, reverse=True)):
            if isinstance(captured, str):
                why = captured
            else:
                made.append(captured)
                left.remove(captured.size)
        self.captured = {c.size: c for c in reversed(made)}
        self._session.graphs_are_captured()
        if left:
            sizes_left = ", ".join(map(str, left))
            warnings.warn(f"batch sizes {sizes_left} could not be captured and run eagerly: {why}", RuntimeWarning, stacklevel=4)

    def _captures(self, sizes: Sequence[int]) -> Iterator[Captured | str]:
        """A graph, or why there is none, for each size; nothing more after a reason that holds for all."""
        session = self._session
        free, budget = session.api.memory_info()[0], session.graph_memory
        for size in sizes:
            try:
                captured = self._capture(size)
            except torch.OutOfMemoryError:
                session.api.release()
                yield f"there is no memory for a graph of {size}"
                continue
            except (BackendError, RuntimeError) as e:
                yield str(e)
                return
            used = free - session.api.memory_info()[0]
            yield captured if used <= budget else f"graphs up to {size} take {used} bytes; graph_memory allows {budget}"

    def _capture(self, size: int) -> Captured:
        session = self._session
        groups = len(session.spec.groups)
        layout = layout_of(size, groups, self._blocks, adapters=self._adapters)
        batch = empty_step(size, groups, self._adapters)
        with session.api.active(), torch.inference_mode():
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=session.device)
            arrays = layout.on_device(memory)
            self._send(layout, memory, _unused(batch))
            self._queue(arrays, batch)  # compiles kernels and lets libraries take their workspaces, neither of which a capture may
            graph, outputs = session.api.capture(lambda: self._queue(arrays, batch))
        return Captured(size, layout, memory, arrays, graph, outputs)

    def _queue(self, arrays: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
        session = self._session
        session.begin(arrays, session.graph_queries, int(session.options["max_model_len"]))
        session.capturing = True
        try:
            return self._eager.tape.run(arrays, batch)
        finally:
            session.capturing = False


def _unused(batch: Batch) -> Batch:
    """The step with none of its sequences: all of it is padding."""
    none = np.zeros(0, np.int32)
    return Batch(
        none, none, np.zeros(1, np.int32), none, batch.block_tables[:, :0], batch.slot_mapping[:, :0], none, plain_inputs(0), none,
        none,
    )  # fmt: skip
