"""Runs a Program step by step through pages and returns its logits: a harness for tests of models and backends, with no engine.

Pages are handed out in a shuffled order from one pool, and those that a window has left behind are freed and used again, so a
read beyond what a layer declares shows up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from trivium.kv import plan_groups
from trivium.ops import Batch, Program, StateSpec, Weight
from trivium.ops.sample import plain_inputs
from trivium.ops.state import state_of

Spans = Sequence[tuple[int, int, int]]


class Paging:
    """Block tables of some groups, of which each has its window (None: keeps all), over one pool of pages."""

    def __init__(self, windows: Sequence[int | None], page_size: int, pages: int) -> None:
        self._windows, self._size = windows, page_size
        self._free = np.random.default_rng(7).permutation(pages).tolist()
        self._tables: list[dict[int, list[int]]] = [{} for _ in windows]

    def map(self, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Block tables int32[groups, seqs, blocks] and slots int64[groups, tokens] of [(sequence, first position, tokens)]."""
        slots = [[slot for span in spans for slot in self._slots(group, span)] for group in range(len(self._windows))]
        tables = [[self._tables[g][seq] for seq, _, _ in spans] for g in range(len(self._windows))]
        width = max(len(t) for rows in tables for t in rows)
        padded = [[t + [-1] * (width - len(t)) for t in rows] for rows in tables]
        return np.array(padded, np.int32), np.array(slots, np.int64)

    def _slots(self, group: int, span: tuple[int, int, int]) -> list[int]:
        seq, start, length = span
        table, window, size = self._tables[group].setdefault(seq, []), self._windows[group], self._size
        for block in range(0 if window is None else max(0, start - window + 1) // size):
            if table[block] >= 0:
                self._free.insert(0, table[block])
                table[block] = -1
        while len(table) * size < start + length:
            table.append(self._free.pop())
        return [table[p // size] * size + p % size for p in range(start, start + length)]


class Runner(ABC):
    """Feeds chunks of sequences; a subclass runs the Batch."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._lengths: dict[int, int] = {}

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
        """Runs the next tokens of some sequences, [(sequence id, token ids)], and returns logits[all tokens, vocab]."""
        spans = [(seq, self._lengths.get(seq, 0), len(ids)) for seq, ids in chunks]
        tables, slots = self._paging.map(spans)
        positions = np.concatenate([np.arange(start, start + n, dtype=np.int32) for _, start, n in spans])
        self._lengths |= {seq: start + n for seq, start, n in spans}
        return self.forward(Batch(
            token_ids=np.concatenate([np.asarray(ids, np.int32) for _, ids in chunks]),
            positions=positions,
            query_starts=np.cumsum([0, *(n for _, _, n in spans)], dtype=np.int32),
            context_lens=np.array([start + n for _, start, n in spans], np.int32),
            block_tables=tables,
            slot_mapping=slots,
            sample_rows=np.arange(len(positions), dtype=np.int32),
            sampling=plain_inputs(len(positions)),
        ))  # fmt: skip

    @abstractmethod
    def forward(self, batch: Batch) -> np.ndarray:
        """Logits of batch.sample_rows."""


class PagedRunner(Runner):
    """The operators' numpy references, call by call. `weights`: checkpoint tensors by name, float32. Unwritten pages hold NaN."""

    def __init__(self, program: Program, weights: Mapping[str, np.ndarray], *, page_size: int, pages: int = 1024) -> None:
        super().__init__(Paging([s.spec.window for s in program.states], page_size, pages))
        self._program = program
        self._constants = constant_arrays(program, weights)
        self._stores = [_nan_store(s.spec, pages, page_size) for s in program.states]

    def forward(self, batch: Batch) -> np.ndarray:
        values: dict[Any, Any] = {c.value: self._constants[c.value.name] for c in self._program.constants}
        values |= {v: getattr(batch, v.name) for v in self._program.inputs}
        for i, (state, store) in enumerate(zip(self._program.states, self._stores)):
            values[state.value] = state_of(state.spec, store, batch.block_tables[i], batch.slot_mapping[i])
        for call in self._program.calls:
            result = call.op(*(None if a is None else values[a] for a in call.args), **call.attrs)
            values |= dict(zip(call.results, result if isinstance(result, tuple) else (result,)))
        return values[self._program.outputs["logits"]]


class SessionRunner(Runner):
    """A backend's session and executable, by the backend contract alone, with float32 weights."""

    def __init__(
        self, program: Program, weights: Mapping[str, np.ndarray], session: Any, *, page_size: int, pages: int = 256
    ) -> None:  # fmt: skip
        spec = plan_groups(program.states, page_size, "float32")
        super().__init__(Paging([g.spec.window for g in spec.groups], page_size, pages))
        session.kv_store(spec, pages)
        loaded = {
            name: session.load(Weight(name, array.shape, "float32", array, lambda data: data), "float32")
            for name, array in constant_arrays(program, weights).items()
        }
        self._executable = session.compile(program, loaded)

    def forward(self, batch: Batch) -> np.ndarray:
        return self._executable.run(batch).output("logits")


def constant_arrays(program: Program, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every constant of the Program by name, from checkpoint tensors by name."""
    rows = {c.value.name: slice(*c.rows) if c.rows else slice(None) for c in program.constants}
    return {c.value.name: weights[c.source][rows[c.value.name]] if c.array is None else c.array for c in program.constants}


def _nan_store(spec: StateSpec, pages: int, page_size: int) -> list[np.ndarray]:
    return [np.full((pages, *shape), np.nan, np.float32) for shape in spec.page_shapes(page_size)]


def run_in_chunks(runner: Runner, prompts: Sequence[Sequence[int]], chunk: int, *, decode: int = 0) -> list[np.ndarray]:
    """Logits[tokens, vocab] of every prompt: all together, `chunk` tokens of each a step, the last `decode` one at a time."""
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(at < len(p) for at, p in zip(done, prompts)):
        takes = [min(chunk, max(len(p) - decode - at, 1), len(p) - at) for at, p in zip(done, prompts)]
        chunks = [(s, p[at : at + n]) for s, (p, at, n) in enumerate(zip(prompts, done, takes)) if n]
        logits = np.split(runner.step(chunks), np.cumsum([len(ids) for _, ids in chunks])[:-1])
        for (s, ids), rows in zip(chunks, logits):
            parts[s].append(rows)
            done[s] += len(ids)
    return [np.concatenate(p) for p in parts]
