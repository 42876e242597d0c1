"""One call of an operator or pattern as a whole Program with its inputs, weights and pages: the only thing a backend can run.

Activations come out of an `embedding` whose table holds exactly the wanted rows; what a mixture of experts is told to use
comes out of a router whose logits force it. So every kernel is judged through the same compile() and run() that serve users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from trivium.conformance.numbers import Array, round_to
from trivium.ops import (
    INPUTS, Arg, Case, LatentKV, Operator, PagedKV, PagedState, Pattern, Program, Recurrent, RecurrentState, StateSpec, Value,
    new_builder, rewrite,
)  # fmt: skip
from trivium.ops.examples import STALE
from trivium.ops.patterns import trace

State = PagedState | RecurrentState
_CERTAIN = 30.0
"""A logit whose sigmoid is 0 or 1 in float32."""


@dataclass(frozen=True)
class Example:
    """A Program (not fused), the results of the call that it is about, all five step inputs, its constants (float32 by name)
    and a state for each of program.states."""

    program: Program
    results: tuple[Value, ...]
    inputs: Mapping[str, Array]
    constants: Mapping[str, Array]
    states: tuple[State, ...]

    def fused(self, pattern: Pattern) -> Program:
        """The Program with the one pattern replaced."""
        return rewrite(self.program, [pattern])


def roles(op: Operator | Pattern) -> tuple[Arg, ...]:
    """What each argument is: the operator's signature; for a pattern's parameter, the first place where it is used inside."""
    if isinstance(op, Operator):
        return op.signature.args
    graph = trace(op)
    places = {v: arg for call in graph.calls[::-1] for v, arg in zip(call.args, call.op.signature.args) if v is not None}  # type: ignore[union-attr]
    return tuple(places[p] for p in graph.params)


def make_example(op: Operator | Pattern, case: Case, *, dtype: str, page_size: int) -> Example:
    """The case as a Program. Float arguments are rounded to what `dtype` holds; paged states move to pages of `page_size`."""
    feeder = _Feeder(roles(op), case, dtype, page_size)
    values = feeder.values()
    if isinstance(op, Pattern):
        made = op.fn(feeder.b, *values, **case.attrs)
    else:
        made = feeder.b.call(op.name, *values, **case.attrs)
    results = made if isinstance(made, tuple) else (made,)
    outputs = feeder.outputs(results)
    width = outputs["logits"].shape[-1]
    program = feeder.b.finish(outputs, vocab_size=int(width))
    return Example(program, results, feeder.inputs, feeder.constants, tuple(feeder.states))


class _Feeder:
    """Gives each argument of a case its place in a Program."""

    def __init__(self, args: Sequence[Arg], case: Case, dtype: str, page_size: int) -> None:
        self.b = new_builder()
        self.constants: dict[str, Array] = {}
        self.states: list[State] = []
        self._args = args
        self._case = case
        self._dtype = dtype
        self._page_size = page_size
        self.inputs = self._inputs()

    def _inputs(self) -> dict[str, Array]:
        given = {
            "sample_rows" if arg.name == "rows" else arg.name: np.asarray(value, np.int32)
            for arg, value in zip(self._args, self._case.args) if arg.dtype == "int32" and arg.name not in ("ids", "chosen")
        }  # fmt: skip
        tokens = self._tokens(given)
        starts, contexts = self._sequences(given, tokens)
        first = contexts - np.diff(starts)
        positions = np.concatenate([np.arange(f, c, dtype=np.int32) for f, c in zip(first, contexts)])
        rows = np.arange(tokens, dtype=np.int32)
        defaults = {
            "token_ids": rows,
            "positions": positions,
            "query_starts": starts,
            "context_lens": contexts,
            "sample_rows": rows,
            "pool_rows": rows[:0],
            "adapters": np.full(tokens, -1, np.int32),
        }
        return {**defaults, **{name: a for name, a in given.items() if name in INPUTS}}

    def _tokens(self, given: Mapping[str, Array]) -> int:
        for arg, value in zip(self._args, self._case.args):
            if arg.dims and arg.dims[0] in ("tokens", "...") and arg.dtype != "weight":
                return len(value)
        raise ValueError("no argument of the case has a row for each token")

    def _sequences(self, given: Mapping[str, Array], tokens: int) -> tuple[Array, Array]:
        """query_starts and context_lens: given (without lengths: all start here), or read off the slots of a paged state, else
        one sequence that starts here."""
        if "query_starts" in given:
            starts = given["query_starts"]
            return starts, given.get("context_lens", np.diff(starts))
        state = next((s for s in self._case.args if isinstance(s, PagedState)), None)
        if state is None:
            return np.array([0, tokens], np.int32), np.array([tokens], np.int32)
        return _sequences_of(state)

    def values(self) -> list[Value | None]:
        """The argument values, in order."""
        routed = self._routed()
        return [self._value(i, arg, value, routed) for i, (arg, value) in enumerate(zip(self._args, self._case.args))]

    def _routed(self) -> Mapping[str, Value]:
        """`weights` and `ids` of a mixture of experts, out of a router."""
        named = {arg.name: value for arg, value in zip(self._args, self._case.args)}
        if "ids" not in named:
            return {}
        weights, ids = np.asarray(named["weights"], np.float64), named["ids"]
        experts = next(len(v) for arg, v in zip(self._args, self._case.args) if arg.dims and arg.dims[0] == "experts")
        logits = np.full((len(ids), experts), -_CERTAIN, np.float32)
        np.put_along_axis(logits, ids.astype(np.int64), np.log(weights / (1 - weights)).astype(np.float32), axis=-1)
        route = self.b.moe_route(self._rows("router", logits), None, top_k=ids.shape[1], scoring="sigmoid", normalize=False)
        return dict(zip(("weights", "ids"), route))

    def _chosen(self, chosen: Array) -> Value:
        """chosen[tokens, n] out of an indexer: position j has the key that is 1 at j, and a token's query is n at what it wants
        most, then n - 1 and so on. All these numbers are exact in any dtype."""
        starts, contexts = self.inputs["query_starts"], self.inputs["context_lens"]
        tokens, n = chosen.shape
        size, longest = self._page_size, int(contexts.max())
        q = np.zeros((tokens, longest), np.float32)
        for row, wanted in zip(q, chosen):
            row[wanted[wanted >= 0]] = n - np.arange(int((wanted >= 0).sum()))
        blocks = -(-longest // size)
        table = np.arange(len(contexts) * blocks, dtype=np.int32).reshape(len(contexts), blocks)
        k, v = (np.zeros((table.size, size, 1, width), np.float32) for width in (longest, 1))
        own = np.concatenate([np.arange(c - e + b, c) for c, b, e in zip(contexts, starts, starts[1:])])
        at = np.arange(longest)
        k[table[:, at // size], at % size, 0, at] = 1
        seqs = np.repeat(np.arange(len(contexts)), np.diff(starts))
        slots = table[seqs, own // size].astype(np.int64) * size + own % size
        self.states.append(PagedState(k, v, table, slots))
        keys = self.b.state("index", LatentKV(longest, 1))
        heads = self._rows("index.q", np.concatenate([q, np.zeros((tokens, 1), np.float32)], axis=1))
        return cast(Value, self.b.top_positions(
            self.b.reshape(heads, shape=("tokens", 1, longest + 1)), self._rows("index.weights", np.ones((tokens, 1), np.float32)),
            keys, self.b.input("query_starts"), self.b.input("context_lens"), top_k=n,
        ))  # fmt: skip

    def _value(self, i: int, arg: Arg, value: Any, routed: Mapping[str, Value]) -> Value | None:
        if value is None:
            return None
        if arg.name in routed:
            return routed[arg.name]
        if arg.is_state:
            return self._state(i, value)
        if arg.name == "chosen":
            return self._chosen(value)
        if arg.dtype == "int32":
            return self.b.input("sample_rows" if arg.name == "rows" else arg.name)
        if arg.dtype == "weight":
            self.constants[f"{arg.name}.{i}"] = value
            return self.b.weight(f"{arg.name}.{i}", value.shape)
        if len(arg.dims or ()) == 1:
            return self.b.array(f"{arg.name}.{i}", value)
        return self._rows(f"{arg.name}.{i}", value)

    def _rows(self, name: str, rows: Array) -> Value:
        """rows[tokens, ...] as an activation: the table has row t at the id of token t."""
        ids = self.inputs["token_ids"]
        table = np.zeros((int(ids.max()) + 1, rows[0].size), np.float32)
        table[ids] = round_to(rows.reshape(len(rows), -1), self._dtype)
        assert len(np.unique(ids)) == len(ids), "token ids that repeat can't carry different rows"
        self.constants[name] = table
        x: Value = self.b.embedding(self.b.input("token_ids"), self.b.weight(name, table.shape))
        return x if rows.ndim == 2 else self.b.reshape(x, shape=("tokens", *rows.shape[1:]))

    def _state(self, i: int, state: State) -> Value:
        if isinstance(state, PagedState):
            state = repage(state, self.inputs["query_starts"], self.inputs["context_lens"], self._page_size)
        self.states.append(replace(state))
        return self.b.state(f"state.{i}", spec_of(state, self._args[i], self._case.attrs.get("window")))

    def outputs(self, results: Sequence[Value]) -> dict[str, Value]:
        """The results, floats as rows of the sampled tokens; the first float result is the logits."""
        floats = [self._as_rows(r) for r in results if r.kind != "state" and r.dtype == "float"]
        integers = [r for r in results if r.kind != "state" and r.dtype != "float"]
        if not floats:
            floats = [self._as_rows(self._rows("unused", np.zeros((len(self.inputs["token_ids"]), 4), np.float32)))]
        named = {f"out{i}": value for i, value in enumerate([*floats[1:], *integers], 1)}
        return {"logits": floats[0], **named}

    def _as_rows(self, y: Value) -> Value:
        if len(y.shape) > 2:
            width = int(np.prod([int(n) for n in y.shape[1:]]))
            y = self.b.reshape(y, shape=(y.shape[0], width))
        return self.b.gather_rows(y, self.b.input("sample_rows")) if y.shape[0] == "tokens" else y


def _sequences_of(state: PagedState) -> tuple[Array, Array]:
    """query_starts and context_lens of the sequences whose tokens a state's slots are; a token without a slot goes with the one
    before it."""
    size = state.k.shape[1]
    counts, contexts = np.zeros(len(state.block_table), np.int32), np.zeros(len(state.block_table), np.int32)
    seq = 0
    for slot in state.slots.tolist():
        if slot >= 0:
            seq, block = (int(n[0]) for n in np.nonzero(state.block_table == slot // size))
            contexts[seq] = max(contexts[seq], block * size + slot % size + 1)
        counts[seq] += 1
    return np.cumsum([0, *counts], dtype=np.int32), contexts


def spec_of(state: State, arg: Arg, window: int | None) -> StateSpec:
    """The declaration that fits a reference state."""
    if isinstance(state, RecurrentState):
        return Recurrent(state.data.shape[1:])
    if arg.dtype == "LatentKV":
        return LatentKV(state.k.shape[3], state.v.shape[3])
    return PagedKV(state.k.shape[2], state.k.shape[3], window)


def repage(state: PagedState, query_starts: Array, context_lens: Array, size: int) -> PagedState:
    """The same tokens on pages of another size. Positions whose page was freed stay unreadable."""
    old = state.k.shape[1]
    seqs, blocks = len(context_lens), -(-int(context_lens.max()) // size)
    table = np.full((seqs, blocks + 1), -1, np.int32)
    pages = seqs * blocks + 1
    k, v = (np.full((pages, size, *a.shape[2:]), STALE, np.float32) for a in (state.k, state.v))
    slots, unused = np.full(len(state.slots), -1, np.int64), iter(np.random.default_rng(pages).permutation(pages).tolist())
    for s, context in enumerate(context_lens.tolist()):
        at = np.arange(context)
        source = state.block_table[s, at // old]
        for block in np.unique(at[source >= 0] // size):
            table[s, block] = next(unused)
        kept = at[source >= 0]
        where = table[s, kept // size], kept % size
        k[where], v[where] = state.k[source[kept], kept % old], state.v[source[kept], kept % old]
        begin, end = int(query_starts[s]), int(query_starts[s + 1])
        new = np.arange(context - (end - begin), context)
        slots[begin:end] = np.where(state.slots[begin:end] < 0, -1, table[s, new // size].astype(np.int64) * size + new % size)
    return PagedState(k, v, table, slots)
