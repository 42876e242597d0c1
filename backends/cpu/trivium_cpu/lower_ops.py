"""How each operator becomes operations of the tape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trivium.ops import Call, Value
from trivium.plugin import Kernel
from trivium_cpu import _native
from trivium_cpu.lowering import ABSENT, NO_NORM, Extent, Lowering, extent_of
from trivium_cpu.places import Place
from trivium_cpu.profile import Cost, WorkOf, attention, projection, store

Lower = Callable[[Lowering, Call], None]


def last(value: Value) -> int:
    """The last dimension."""
    size = value.shape[-1]
    assert isinstance(size, int)
    return size


def rows_of(value: Value) -> Extent:
    """How many rows of its last dimension a value has."""
    whole = extent_of(value.shape)
    return Extent(whole.symbol, whole.factor // max(last(value), 1))


def rms_norm_spec(low: Lowering, weight: Value | None, attrs: Mapping[str, Any]) -> Any:
    return _native.NormSpec("rms", low.place(weight).ref, ABSENT.ref, attrs["eps"], attrs["offset"])


def gate_of(attrs: Mapping[str, Any]) -> Any:
    return _native.Gate(attrs["kind"], limit=attrs["limit"], alpha=attrs["alpha"], up_offset=attrs["up_offset"])


class Between(NamedTuple):
    """What a gated projection leaves for the next one of a fused block. record: where its rows are made, quantised, as only the
    next one reads them; ABSENT: nowhere."""

    place: Place
    rows: Extent
    width: int
    record: Place


def project(
    low: Lowering, name: str, x: Value | Between, matrices: list[tuple[Value, Value | None]], outs: list[Place], *,
    norm: Any = NO_NORM, other: Place = ABSENT, total: Place = ABSENT, accumulate: bool = False, gate: Any = None,
    handed: Place = ABSENT,
) -> None:  # fmt: skip
    """One projection operation: see native/ops_linear.h. `outs`: a place for each matrix; one if gated."""
    at, rows, width, record = x if isinstance(x, Between) else (low.place(x), rows_of(x), last(x), ABSENT)
    packed = [low.matrix(weight) for weight, _ in matrices]
    places = outs if gate is None else [outs[0], ABSENT]
    targets = [_native.Target(m, low.place(bias).ref, y.ref) for m, (_, bias), y in zip(packed, matrices, places, strict=True)]
    quantised = any(_native.linear.needs_quantised(m) for m in packed)
    plain = norm is not NO_NORM and not all(_native.linear.needs_quantised(m) for m in packed)
    takes_over = record is not ABSENT
    normed = low.temporary(rows.symbol, rows.factor * width) if plain else ABSENT
    if quantised and not takes_over:
        record = low.temporary(rows.symbol, rows.factor * _native.linear.record_numbers(packed))
    reads = [at, other, *(outs if accumulate else [])]
    cost = Cost((*reads, total), tuple(outs), projection(rows, packed), "int8" if quantised else "float32")
    low.emit(
        "project", name, at.ref, width, rows.native, targets, norm, other.ref, total.ref, normed.ref, record.ref, accumulate, gate,
        handed.ref, takes_over, reads=[*reads, *([record] if takes_over else [])],
        writes=[*outs, total, normed, handed, *([] if takes_over else [record])], cost=cost,
    )  # fmt: skip
    low.release(normed)
    low.release(record)


def _embedding(low: Lowering, call: Call) -> None:
    ids, table = call.args
    assert table is not None
    y = low.result(call.results[0])
    low.emit(
        "embedding", low.place(ids).ref, low.matrix(table), call.attrs["scale"], y.ref, rows_of(call.results[0]).native,
        reads=[low.place(ids)], writes=[y],
    )  # fmt: skip


def _linear(low: Lowering, call: Call) -> None:
    x, weight, bias = call.args
    assert x is not None and weight is not None
    project(low, "linear", x, [(weight, bias)], [low.result(call.results[0])])


def _pointwise(kind: str, factor: str = "") -> Lower:
    def lower(low: Lowering, call: Call) -> None:
        a, b = (*call.args, None)[:2]
        gate = _native.Gate(call.attrs["kind"]) if kind == "activation" else gate_of(call.attrs) if kind == "gated" else None
        y = low.result(call.results[0])
        count = extent_of(call.results[0].shape)
        low.elementwise(kind, low.place(a), low.place(b), y, count, factor=call.attrs[factor] if factor else 1.0, gate=gate)

    return lower


def norm(
    low: Lowering, spec: Any, x: Value, y: Place, *, other: Place = ABSENT, total: Place = ABSENT, residual: Place = ABSENT
) -> None:
    """y = norm(x); or total = x + other, y = norm(total); or y = residual + norm(x)."""
    at = low.place(x)
    low.emit(
        "norm", spec, at.ref, other.ref, total.ref, residual.ref, y.ref, rows_of(x).native, last(x),
        reads=[at, other, residual], writes=[y, total],
    )  # fmt: skip


def _rms_norm(low: Lowering, call: Call) -> None:
    x, weight = call.args
    assert x is not None
    norm(low, rms_norm_spec(low, weight, call.attrs), x, low.result(call.results[0]))


def _layer_norm(low: Lowering, call: Call) -> None:
    x, weight, bias = call.args
    assert x is not None
    spec = _native.NormSpec("layer", low.place(weight).ref, low.place(bias).ref, call.attrs["eps"], 0.0)
    norm(low, spec, x, low.result(call.results[0]))


def rope_table(low: Lowering, positions: Value, inv_freq: Value, scale: float) -> tuple[Place, int]:
    """Cosines and sines of the step's positions, made once for all layers, and half the rotated dimensions."""
    half = last(inv_freq)
    key = ("rope", positions, inv_freq, scale)
    if key not in low.shared:
        table = low.shared[key] = low.temporary("tokens", 2 * half)
        frequencies, at = low.place(inv_freq), low.place(positions)
        low.emit(
            "rope_table", at.ref, frequencies.ref, half, scale, table.ref, Extent("tokens", 1).native,
            reads=[at, frequencies], writes=[table],
        )  # fmt: skip
    return low.shared[key], half


def _rope(low: Lowering, call: Call) -> None:
    x, positions, inv_freq = call.args
    assert x is not None and positions is not None and inv_freq is not None
    table, half = rope_table(low, positions, inv_freq, call.attrs["scale"])
    y, heads = low.result(call.results[0]), x.shape[1]
    low.emit(
        "rope", low.place(x).ref, table.ref, half, call.attrs["interleaved"], y.ref, Extent("tokens", 1).native, heads, last(x),
        reads=[low.place(x), table], writes=[y],
    )  # fmt: skip


def _reshape(low: Lowering, call: Call) -> None:
    (x,) = call.args
    assert x is not None
    low.result_in(call.results[0], x)


def copy_columns(low: Lowering, x: Value, start: int, width: int, to: Place, at: int, count: int) -> None:
    """Columns start .. start + count of x to columns at .. of `to`, whose rows have `width`."""
    low.emit(
        "copy_columns", low.place(x).ref, (last(x), start), to.ref, (width, at), count, rows_of(x).native,
        reads=[low.place(x)], writes=[to],
    )  # fmt: skip


def _slice(low: Lowering, call: Call) -> None:
    (x,) = call.args
    assert x is not None
    start, stop = call.attrs["start"], call.attrs["stop"]
    copy_columns(low, x, start, stop - start, low.result(call.results[0]), 0, stop - start)


def _concat(low: Lowering, call: Call) -> None:
    a, b = call.args
    assert a is not None and b is not None
    y = low.result(call.results[0])
    copy_columns(low, a, 0, last(a) + last(b), y, 0, last(a))
    copy_columns(low, b, 0, last(a) + last(b), y, last(a), last(b))


def _gather_rows(low: Lowering, call: Call) -> None:
    x, rows = call.args
    assert x is not None
    y, (symbol, factor) = low.result(call.results[0]), rows_of(call.results[0])
    low.emit(
        "gather_rows", low.place(x).ref, low.place(rows).ref, y.ref, Extent(symbol, factor).native, last(x),
        reads=[low.place(x), low.place(rows)], writes=[y], cost=Cost((y,), (y,)),
    )  # fmt: skip


def write_kv(
    low: Lowering, state: Value, k: Value, v: Value, *, q: Value | None = None, q_out: Place = ABSENT,
    table: Place = ABSENT, half: int = 0, interleaved: bool = False, q_norm: Any = NO_NORM, k_norm: Any = NO_NORM,
) -> None:  # fmt: skip
    """Stores keys and values; with `q` and a table also norms and rotates queries and keys on the way."""
    heads = q.shape[1] if q is not None else k.shape[1]
    places = [low.place(q), low.place(k), low.place(v)]
    low.emit(
        "rope_write", *(p.ref for p in places), q_out.ref, low.layer(state), heads, Extent("tokens", 1).native, table.ref, half,
        interleaved, q_norm, k_norm, reads=[*places, table], writes=[q_out, low.place(state)],
        cost=Cost((*places, table), (q_out,), store(token_bytes(low, state))),
    )  # fmt: skip


def token_bytes(low: Lowering, state: Value) -> float:
    """Of one token's keys and values in a layer."""
    return float(low.layer(state).nbytes) / low.spec.page_size


def _kv_write(low: Lowering, call: Call) -> None:
    state, k, v = call.args
    assert state is not None and k is not None and v is not None
    write_kv(low, state, k, v)


def _paged_attention(low: Lowering, call: Call) -> None:
    q, state, *rest = call.args
    assert q is not None and state is not None
    heads, window, causal = int(q.shape[1]), call.attrs["window"] or 0, call.attrs["causal"]
    work = attention(token_bytes(low, state), 2 * heads * last(q), window, causal)
    softcap = call.attrs["softcap"] or 0.0
    attend(
        low, low.place(q), rest, state, call.results[0], heads, work, scale=call.attrs["scale"], softcap=softcap, window=window,
        causal=causal,
    )  # fmt: skip


def attend(
    low: Lowering, q: Place, rest: Sequence[Value | None], state: Value, y: Value, heads: int, work: WorkOf, *, scale: float,
    softcap: float = 0.0, window: int = 0, chunk: int = 0, causal: bool = True,
) -> None:  # fmt: skip
    """Attention of queries q[tokens, heads, ...] over a state's pages. rest: query starts, context lengths, sinks. Zeros: none."""
    layer = low.layer(state)
    key, capacity = ("spans", layer.value_dim, heads), span_capacity(low)
    if key not in low.shared:
        low.shared[key] = low.temporary("fixed", capacity * _native.Tape.partial_numbers(layer, heads))
    out, spans = low.result(y), low.shared[key]
    places = [q, *(low.place(v) for v in rest)]
    low.emit(
        "attention", *(p.ref for p in places), out.ref, layer, heads, scale, softcap, window, chunk, causal, spans.ref, capacity,
        reads=[*places, low.place(state)], writes=[out, spans], cost=Cost(tuple(places), (out,), work),
    )  # fmt: skip


def _lora(low: Lowering, call: Call) -> None:
    y, x, a, b, adapters = call.args
    assert y is not None and x is not None and a is not None and b is not None
    slots, rank, width = (int(n) for n in a.shape)
    inner, out = low.temporary("tokens", rank), low.result_over(call.results[0], y)
    x_at, slot_of = low.place(x), low.place(adapters)
    low.emit(
        "lora", out.ref, x_at.ref, low.place(a).ref, low.place(b).ref, slot_of.ref, inner.ref, slots, rank, width, last(y),
        reads=[out, x_at], writes=[out, inner],
    )  # fmt: skip
    low.release(inner)


def _lora_fits(call: Call) -> str | None:
    constants = all(v is not None and v.kind == "constant" for v in call.args[2:4])
    own = (adapters := call.args[4]) is not None and adapters.kind == "input"
    return None if constants and own else "the matrices must be constants, and the adapters the step's own"


def span_capacity(low: Lowering) -> int:
    """Spans that may be shared out at a time: few tiles of the longest context."""
    return 4 * low.threads * math.ceil(low.max_model_len / _native.SPAN)


def _attention_fits(call: Call) -> str | None:
    starts, contexts = call.args[2:4]
    inputs = all(v is not None and v.kind == "input" for v in (starts, contexts))
    return None if inputs else "query starts and context lengths must be the step's own"


def _weight_is_constant(index: int) -> Callable[[Call], str | None]:
    def supports(call: Call) -> str | None:
        weight = call.args[index]
        return None if weight is not None and weight.kind == "constant" else "the weight must be a constant"

    return supports


def _embedding_fits(call: Call) -> str | None:
    """A step's token ids and positions are compared with the rows of every table that they look up."""
    ids = call.args[0]
    if ids is not None and ids.kind == "input" and ids.name not in ("token_ids", "positions"):
        return "of the step's inputs only token ids and positions look up rows"
    return _weight_is_constant(1)(call)


def _kernels() -> dict[str, Kernel]:
    plain: dict[str, Lower] = {
        "add": _pointwise("add"), "mul": _pointwise("mul"), "scale": _pointwise("scale", "factor"),
        "softcap": _pointwise("softcap", "cap"), "activation": _pointwise("activation"), "gated": _pointwise("gated"),
        "rms_norm": _rms_norm, "layer_norm": _layer_norm, "rope": _rope, "reshape": _reshape, "slice": _slice, "concat": _concat,
        "gather_rows": _gather_rows, "kv_write": _kv_write,
    }  # fmt: skip
    kernels = {name: Kernel(name, lower, f"native {name}") for name, lower in plain.items()}
    kernels["embedding"] = Kernel("embedding", _embedding, "native embedding", supports=_embedding_fits)
    kernels["linear"] = Kernel("linear", _linear, "native linear", supports=_weight_is_constant(1))
    for name in ("text_ids", "media_rows", "gather_blocks"):  # they move few numbers, and numpy moves them as fast
        kernels[name] = Kernel(name, Lowering.on_host, f"numpy {name}")
    kernels["lora"] = Kernel("lora", _lora, "native lora", supports=_lora_fits)
    kernels["paged_attention"] = Kernel("paged_attention", _paged_attention, "native paged_attention", supports=_attention_fits)
    return kernels


OPERATOR_KERNELS = _kernels()
