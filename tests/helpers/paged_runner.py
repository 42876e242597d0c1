"""Runs a Program on the operators' numpy references through pages: a harness for tests of models, with no engine.

Pages are handed out in a shuffled order, unused ones hold NaN, and those that a window has left behind are freed, so a read
beyond what a layer declares shows up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from trivium.ops import PagedKV, PagedState, Program


class PagedRunner:
    """`weights`: checkpoint tensors by name, float32. One block table per state and sequence."""

    def __init__(self, program: Program, weights: Mapping[str, np.ndarray], *, page_size: int, pages: int = 256) -> None:
        self._program, self._page_size = program, page_size
        self._constants = {c.value: c.array if c.array is not None else _rows(weights[c.source], c.rows) for c in program.constants}
        self._stores = [_new_store(s.spec, pages, page_size) for s in program.states]
        self._free = [list(np.random.default_rng(7).permutation(pages)) for _ in program.states]
        self._tables: list[dict[int, list[int]]] = [{} for _ in program.states]
        self._lengths: dict[int, int] = {}

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
        """Runs the next tokens of some sequences, [(sequence id, token ids)], and returns logits[all tokens, vocab]."""
        lengths = {s: self._lengths.get(s, 0) for s, _ in chunks}
        positions = np.concatenate([np.arange(lengths[s], lengths[s] + len(ids), dtype=np.int32) for s, ids in chunks])
        values = {
            "token_ids": np.concatenate([np.asarray(ids, np.int32) for _, ids in chunks]),
            "positions": positions,
            "query_starts": np.cumsum([0, *(len(ids) for _, ids in chunks)], dtype=np.int32),
            "context_lens": np.array([lengths[s] + len(ids) for s, ids in chunks], np.int32),
            "sample_rows": np.arange(len(positions), dtype=np.int32),
        }
        states = [self._map(i, [(s, lengths[s], len(ids)) for s, ids in chunks]) for i in range(len(self._stores))]
        self._lengths |= {s: lengths[s] + len(ids) for s, ids in chunks}
        return self._run(values, states)

    def _map(self, index: int, spans: Sequence[tuple[int, int, int]]) -> PagedState:
        size, window = self._page_size, self._program.states[index].spec.window
        slots = []
        for seq, start, length in spans:
            table = self._tables[index].setdefault(seq, [])
            dead = 0 if window is None else max(0, start - window + 1) // size
            for block in range(min(dead, len(table))):
                if table[block] >= 0:
                    self._release(index, table[block])
                    table[block] = -1
            while len(table) * size < start + length:
                table.append(int(self._free[index].pop()))
            slots += [table[p // size] * size + p % size for p in range(start, start + length)]
        tables = [self._tables[index][seq] for seq, _, _ in spans]
        width = max(map(len, tables))
        block_table = np.array([t + [-1] * (width - len(t)) for t in tables], np.int32)
        k, v = self._stores[index]
        return PagedState(k, v, block_table, np.array(slots, np.int64))

    def _release(self, index: int, page: int) -> None:
        for store in self._stores[index]:
            store[page] = np.nan
        self._free[index].insert(0, page)

    def _run(self, inputs: Mapping[str, np.ndarray], states: Sequence[PagedState]) -> np.ndarray:
        values = dict(self._constants)
        values |= {v: inputs[v.name] for v in self._program.inputs}
        values |= {decl.value: state for decl, state in zip(self._program.states, states)}
        for call in self._program.calls:
            result = call.op(*(None if a is None else values[a] for a in call.args), **call.attrs)
            values |= dict(zip(call.results, result if isinstance(result, tuple) else (result,)))
        return values[self._program.outputs["logits"]]


def _rows(weight: np.ndarray, rows: tuple[int, int] | None) -> np.ndarray:
    return weight if rows is None else weight[rows[0] : rows[1]]


def _new_store(spec: PagedKV, pages: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (pages, page_size, spec.kv_heads, spec.head_dim)
    return np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)


def run_in_chunks(runner: PagedRunner, prompts: Sequence[Sequence[int]], chunk: int, *, decode: int = 0) -> list[np.ndarray]:
    """Logits[tokens, vocab] of every prompt: all together, `chunk` tokens of each a step, the last `decode` one at a time."""
    done = [0] * len(prompts)
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    while any(at < len(p) for at, p in zip(done, prompts)):
        spans = []
        for s, prompt in enumerate(prompts):
            ahead = len(prompt) - decode - done[s]
            take = min(chunk, ahead) if ahead > 0 else 1
            if done[s] < len(prompt):
                spans.append((s, prompt[done[s] : done[s] + take]))
        logits = runner.step(spans)
        for (s, ids), part in zip(spans, np.split(logits, np.cumsum([len(ids) for _, ids in spans])[:-1])):
            parts[s].append(part)
            done[s] += len(ids)
    return [np.concatenate(p) for p in parts]
