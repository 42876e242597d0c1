"""How operators of experts, recurrences, compressed attention and encoders become operations of the tape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


from trivium.ops import Batch, Call, Value
from trivium.plugin import Kernel
from trivium_cpu import _native
from trivium_cpu.lower_ops import Lower, attend, copy_columns, gate_of, last, rows_of, span_capacity, token_bytes
from trivium_cpu.lowering import ABSENT, Lowering
from trivium_cpu.places import Place
from trivium_cpu.profile import Cost, Sizes, Work, WorkOf, attention, both_ways, sparse, store


def _given(call: Call) -> list[Any]:
    """The arguments of a call, to be unpacked; absent ones are None."""
    return list(call.args)


def _moe_route(low: Lowering, call: Call) -> None:
    logits, bias = _given(call)
    places = [low.place(logits), low.place(bias)]
    weights, ids = (low.result(v) for v in call.results)
    refs = [p.ref for p in (*places, weights, ids)]
    low.emit("moe_route", *refs, last(logits), **call.attrs, reads=places, writes=[weights, ids])


def _sparse_mixer_route(low: Lowering, call: Call) -> None:
    (logits,) = _given(call)
    weights, ids = (low.result(v) for v in call.results)
    at = low.place(logits)
    low.emit("sparse_mixer_route", at.ref, weights.ref, ids.ref, last(logits), **call.attrs, reads=[at], writes=[weights, ids])


def _moe_experts(low: Lowering, call: Call) -> None:
    x, weights, ids, gate, up, down, *biases = _given(call)
    count, top_k = int(gate.shape[0]), last(ids)
    matrices = [low.matrix(m) for m in (gate, up, down)]
    experts = _native.Tape.ExpertWeights(*matrices, *(low.place(b).ref for b in biases), count)
    reads = [low.place(v) for v in (x, weights, ids)]
    y = low.result(call.results[0])
    sizes = (2 * top_k, experts.wide_numbers(top_k), experts.inner_numbers(top_k))
    memory = [*(low.temporary("tokens", n) for n in sizes), low.temporary("fixed", 2 * (count + 1))]
    low.emit(
        "experts", *(p.ref for p in (*reads, y)), experts, [m.ref for m in memory], gate_of(call.attrs), count, top_k,
        reads=reads, writes=[y, *memory], cost=Cost(tuple(reads), (y,), _experts_work(matrices, count, top_k), _unit(matrices)),
    )  # fmt: skip
    for place in memory:
        low.release(place)


def _unit(matrices: list[Any]) -> str:
    return "int8" if any(_native.linear.needs_quantised(m) for m in matrices) else "float32"


def _experts_work(matrices: list[Any], experts: int, top_k: int) -> WorkOf:
    """Weights of the experts that tokens are expected to choose, if every expert is as likely as another, and the products of
    each token with its own."""
    nbytes, products = sum(m.nbytes for m in matrices) / experts, sum(math.prod(m.shape) for m in matrices) / experts

    def work(sizes: Sizes, batch: Batch) -> Work:
        chosen = experts * (1 - (1 - top_k / experts) ** sizes["tokens"])
        return Work(int(chosen * nbytes), int(2 * sizes["tokens"] * top_k * products))

    return work


def _head_linear(low: Lowering, call: Call) -> None:
    x, weight = _given(call)
    heads, matrix = int(weight.shape[0]), low.matrix(weight)
    records = ABSENT
    if _native.linear.needs_quantised(matrix):
        records = low.temporary("tokens", heads * _native.linear.record_numbers([matrix]))
    at, y = low.place(x), low.result(call.results[0])
    products = 2 * math.prod(int(n) for n in weight.shape)
    low.emit(
        "head_linear", at.ref, matrix, y.ref, records.ref, heads, reads=[at], writes=[y, records],
        cost=Cost((at,), (y,), lambda sizes, _: Work(matrix.nbytes, products * sizes["tokens"]), _unit([matrix])),
    )  # fmt: skip
    low.release(records)


def _recurrence(
    low: Lowering, call: Call, inputs: list[Any], state: Value, operations: int
) -> tuple[list[Place], Place, dict[str, Any]]:
    """Places of the inputs and of y, and what emit() is told of reads, writes and cost: the state is read and written once a
    sequence, and every number of it takes `operations` of arithmetic a token."""
    places, y, at = [low.place(v) for v in inputs], low.result(call.results[0]), low.place(state)
    size = math.prod(low.state_shape(state))

    def work(sizes: Sizes, batch: Batch) -> Work:
        return Work(8 * size * sizes["seqs"], operations * size * sizes["tokens"])

    return places, y, {"reads": [*places, at], "writes": [y, at], "cost": Cost(tuple(places), (y,), work)}


def _gated_delta_rule(low: Lowering, call: Call) -> None:
    *inputs, state, starts, contexts = _given(call)
    places, y, notes = _recurrence(low, call, inputs, state, 8)
    low.emit(
        "gated_delta_rule", [p.ref for p in places], low.place(starts).ref, low.place(contexts).ref, y.ref, low.layer(state),
        *low.state_shape(state), call.attrs["scale"], **notes,
    )  # fmt: skip


def _selective_scan(low: Lowering, call: Call) -> None:
    x, dt, a, b, c, d, state, starts, contexts = _given(call)
    places, y, notes = _recurrence(low, call, [x, dt, b, c], state, 5)
    heads, dv, dk = low.state_shape(state)
    limits = tuple(float(n) for n in call.attrs["dt_limits"])
    refs = [low.place(v).ref for v in (a, d, starts, contexts)]
    low.emit(
        "selective_scan", [p.ref for p in places], *refs, y.ref, low.layer(state), [heads, b.shape[1], dv, dk], limits, **notes,
    )  # fmt: skip


def _short_conv(low: Lowering, call: Call) -> None:
    x, weight, bias, state, starts, contexts = _given(call)
    (at,), y, notes = _recurrence(low, call, [x], state, 2)
    channels, width = (int(n) for n in weight.shape)
    refs = [at.ref, low.transposed(weight).ref, *(low.place(v).ref for v in (bias, starts, contexts)), y.ref]
    low.emit("short_conv", *refs, low.layer(state), width, channels, call.attrs["kind"] or "", **notes)


def _latent_write(low: Lowering, call: Call) -> None:
    state, latent, rope = _given(call)
    places = [low.place(latent), low.place(rope)]
    low.emit(
        "latent_write", *(p.ref for p in places), low.layer(state), reads=places, writes=[low.place(state)],
        cost=Cost(tuple(places), (), store(token_bytes(low, state))),
    )  # fmt: skip


def _latent_queries(low: Lowering, latent: Value, rope: Value) -> Place:
    """Both parts of each head's query side by side, to be given back."""
    rank, width = last(latent), last(latent) + last(rope)
    q = low.temporary("tokens", int(latent.shape[1]) * width)
    copy_columns(low, latent, 0, width, q, 0, rank)
    copy_columns(low, rope, 0, width, q, rank, width - rank)
    return q


def _latent_attention(low: Lowering, call: Call) -> None:
    latent, rope, state, starts, contexts = _given(call)
    heads, rank, width = int(latent.shape[1]), last(latent), last(latent) + last(rope)
    q = _latent_queries(low, latent, rope)
    work = attention(token_bytes(low, state), heads * (width + rank), 0, True)
    attend(low, q, (starts, contexts, None), state, call.results[0], heads, work, scale=call.attrs["scale"])
    low.release(q)


def _sparse_latent_attention(low: Lowering, call: Call) -> None:
    latent, rope, state, starts, contexts, chosen = _given(call)
    heads, rank, width, top_k = int(latent.shape[1]), last(latent), last(latent) + last(rope), last(chosen)
    q = _latent_queries(low, latent, rope)
    places, y = [q, *(low.place(v) for v in (starts, contexts, chosen))], low.result(call.results[0])
    low.emit(
        "sparse_latent_attention", *(p.ref for p in (*places, y)), low.layer(state), heads, top_k, call.attrs["scale"],
        reads=[*places, low.place(state)], writes=[y],
        cost=Cost(tuple(places), (y,), sparse(token_bytes(low, state), heads * (width + rank), top_k)),
    )  # fmt: skip
    low.release(q)


def _top_positions(low: Lowering, call: Call) -> None:
    q, weights, state, starts, contexts = _given(call)
    heads, capacity, key = int(q.shape[1]), span_capacity(low), ("worth",)
    if key not in low.shared:
        low.shared[key] = low.temporary("fixed", capacity * _native.SPAN)
    worth, places = low.shared[key], [low.place(v) for v in (q, weights, starts, contexts)]
    found = low.result(call.results[0])
    low.emit(
        "top_positions", *(p.ref for p in (*places, found, worth)), low.layer(state), heads, call.attrs["top_k"], capacity,
        reads=[*places, low.place(state)], writes=[found, worth],
        cost=Cost(tuple(places), (found,), attention(token_bytes(low, state), heads * (last(q) + 1), 0, True)),
    )  # fmt: skip


def _bidirectional_attention(low: Lowering, call: Call) -> None:
    q, k, v, starts = _given(call)
    heads, kv_heads, dim, window = int(q.shape[1]), int(k.shape[1]), last(q), call.attrs["window"]
    columns = low.temporary("tokens", _native.Tape.column_numbers(kv_heads, dim))
    places, at, y = [low.place(x) for x in (q, k, v)], low.place(starts), low.result(call.results[0])
    low.emit(
        "bidirectional_attention", [p.ref for p in places], at.ref, y.ref, columns.ref, heads, kv_heads, dim, call.attrs["scale"],
        -1 if window is None else window, reads=[*places, at], writes=[y, columns],
        cost=Cost(tuple(places), (y,), both_ways(2 * heads * dim, window)),
    )  # fmt: skip
    low.release(columns)


def _segment_embedding(low: Lowering, call: Call) -> None:
    """Token ids become rows of the table first, which are none beyond it whatever the ids are."""
    tokens, table, starts = _given(call)
    ids, places = low.temporary("tokens", 1), [low.place(tokens), low.place(starts)]
    refs = [p.ref for p in (*places, ids)]
    low.emit("segment_ids", *refs, call.attrs["separator"], int(table.shape[0]), reads=places, writes=[ids])
    y = low.result(call.results[0])
    low.emit(
        "embedding", ids.ref, low.matrix(table), 1.0, y.ref, rows_of(call.results[0]).native, reads=[ids], writes=[y],
    )  # fmt: skip
    low.release(ids)


def _chunked_attention(low: Lowering, call: Call) -> None:
    q, state, starts, contexts = _given(call)
    heads, chunk = int(q.shape[1]), call.attrs["chunk"]
    work = attention(token_bytes(low, state), 2 * heads * last(q), 0, True, chunk)
    attend(low, low.place(q), (starts, contexts, None), state, call.results[0], heads, work, scale=call.attrs["scale"], chunk=chunk)


def _position_scale(low: Lowering, call: Call) -> None:
    x, positions = _given(call)
    at, y = low.place(x), low.result(call.results[0])
    numbers = math.prod(int(n) for n in x.shape[1:])
    low.emit("position_scale", at.ref, low.place(positions).ref, y.ref, numbers, **call.attrs, reads=[at], writes=[y])


def _constants(*indices: int) -> Any:
    def supports(call: Call) -> str | None:
        missing = [v for i in indices if (v := call.args[i]) is not None and v.kind != "constant"]
        return "the weights must be constants" if missing else None

    return supports


def _step_s_own(call: Call) -> str | None:
    """Recurrences end with the step's query starts and context lengths."""
    own = all(v is not None and v.kind == "input" for v in call.args[-2:])
    return None if own else "query starts and context lengths must be the step's own"


def _input_starts(call: Call) -> str | None:
    own = call.args[-1] is not None and call.args[-1].kind == "input"
    return None if own else "query starts must be the step's own"


def _sparse_fits(call: Call) -> str | None:
    """As _step_s_own; what was chosen is behind them."""
    own = all(v is not None and v.kind == "input" for v in call.args[3:5])
    return None if own else "query starts and context lengths must be the step's own"


_KERNELS: Mapping[str, tuple[Lower, Any]] = {
    "moe_route": (_moe_route, _constants(1)),
    "sparse_mixer_route": (_sparse_mixer_route, _constants()),
    "moe_experts": (_moe_experts, _constants(3, 4, 5, 6, 7, 8)),
    "head_linear": (_head_linear, _constants(1)),
    "gated_delta_rule": (_gated_delta_rule, _step_s_own),
    "selective_scan": (_selective_scan, lambda call: _constants(2, 5)(call) or _step_s_own(call)),
    "short_conv": (_short_conv, lambda call: _constants(1, 2)(call) or _step_s_own(call)),
    "latent_write": (_latent_write, _constants()),
    "latent_attention": (_latent_attention, _step_s_own),
    "chunked_attention": (_chunked_attention, _step_s_own),
    "top_positions": (_top_positions, _step_s_own),
    "sparse_latent_attention": (_sparse_latent_attention, _sparse_fits),
    "bidirectional_attention": (_bidirectional_attention, _input_starts),
    "segment_embedding": (_segment_embedding, lambda call: _constants(1)(call) or _input_starts(call)),
    "position_scale": (_position_scale, _constants()),
}


MODEL_KERNELS = tuple(Kernel(name, lower, f"native {name}", supports=supports) for name, (lower, supports) in _KERNELS.items())
