"""Fused patterns and how they become operations of the tape.

Most time goes into reading weights, so the patterns are cut where the matrices are: what comes before a projection (residual, norm,
quantisation of its input) and what comes after it (residual, gate, rotation, storing keys) is done where the numbers are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trivium.ops import Call, Pattern
from trivium.plugin import Kernel
from trivium_cpu import _native
from trivium_cpu.lower_ops import Between, gate_of, norm, project, rms_norm_spec, rope_table, rows_of, write_kv
from trivium_cpu.lowering import ABSENT, Lowering


def _add_norm(b: Any, x: Any, y: Any, weight: Any, *, eps: float, offset: float) -> Any:
    """Residual add and the norm of the sum."""
    total = b.add(x, y)
    return total, b.rms_norm(total, weight, eps=eps, offset=offset)


def _lower_add_norm(low: Lowering, call: Call) -> None:
    x, y, weight = call.args
    assert x is not None and y is not None
    total, normed = (low.result(v) for v in call.results)
    norm(low, rms_norm_spec(low, weight, call.attrs), x, normed, other=low.place(y), total=total)


def _norm_add(b: Any, x: Any, y: Any, weight: Any, *, eps: float, offset: float) -> Any:
    """Norm of a block's result before it is added to the residual."""
    return b.add(x, b.rms_norm(y, weight, eps=eps, offset=offset))


def _lower_norm_add(low: Lowering, call: Call) -> None:
    x, y, weight = call.args
    assert x is not None and y is not None
    norm(low, rms_norm_spec(low, weight, call.attrs), y, low.result(call.results[0]), residual=low.place(x))


def _linear_add(b: Any, residual: Any, x: Any, weight: Any, bias: Any) -> Any:
    """A projection added to the residual."""
    return b.add(residual, b.linear(x, weight, bias))


def _lower_linear_add(low: Lowering, call: Call) -> None:
    residual, x, weight, bias = call.args
    assert residual is not None and x is not None and weight is not None
    y = low.result_over(call.results[0], residual)
    project(low, "linear+add", x, [(weight, bias)], [y], accumulate=True)


def _norm_qkv(
    b: Any, x: Any, weight: Any, wq: Any, bq: Any, wk: Any, bk: Any, wv: Any, bv: Any, *, eps: float, offset: float
) -> Any:  # fmt: skip
    """Norm and the three projections of attention, whose input is quantised once."""
    h = b.rms_norm(x, weight, eps=eps, offset=offset)
    return b.linear(h, wq, bq), b.linear(h, wk, bk), b.linear(h, wv, bv)


def _lower_norm_qkv(low: Lowering, call: Call) -> None:
    x, weight, wq, bq, wk, bk, wv, bv = call.args
    assert x is not None and wq is not None and wk is not None and wv is not None
    outs = [low.result(v) for v in call.results]
    project(low, "norm+qkv", x, [(wq, bq), (wk, bk), (wv, bv)], outs, norm=rms_norm_spec(low, weight, call.attrs))


def _gate_up(
    b: Any, x: Any, wg: Any, bg: Any, wu: Any, bu: Any, *, kind: str, limit: float | None, alpha: float, up_offset: float
) -> Any:  # fmt: skip
    """The first half of a gated feed-forward block."""
    return b.gated(b.linear(x, wg, bg), b.linear(x, wu, bu), kind=kind, limit=limit, alpha=alpha, up_offset=up_offset)


def _lower_gate_up(low: Lowering, call: Call) -> None:
    x, wg, bg, wu, bu = call.args
    assert x is not None and wg is not None and wu is not None
    project(low, "gate+up", x, [(wg, bg), (wu, bu)], [low.result(call.results[0])], gate=gate_of(call.attrs))


def _norm_gate_up(
    b: Any, x: Any, weight: Any, wg: Any, bg: Any, wu: Any, bu: Any,
    *, eps: float, offset: float, kind: str, limit: float | None, alpha: float, up_offset: float,
) -> Any:  # fmt: skip
    """Norm and the first half of a gated feed-forward block."""
    h = b.rms_norm(x, weight, eps=eps, offset=offset)
    return b.gated(b.linear(h, wg, bg), b.linear(h, wu, bu), kind=kind, limit=limit, alpha=alpha, up_offset=up_offset)


def _lower_norm_gate_up(low: Lowering, call: Call) -> None:
    x, weight, wg, bg, wu, bu = call.args
    assert x is not None and wg is not None and wu is not None
    y = low.result(call.results[0])
    spec = rms_norm_spec(low, weight, call.attrs)
    project(low, "norm+gate+up", x, [(wg, bg), (wu, bu)], [y], norm=spec, gate=gate_of(call.attrs))


def _feed_forward(
    b: Any, x: Any, weight: Any, wg: Any, bg: Any, wu: Any, bu: Any, wd: Any, bd: Any,
    *, eps: float, offset: float, kind: str, limit: float | None, alpha: float, up_offset: float,
) -> Any:  # fmt: skip
    """A gated feed-forward block from its norm to the residual: what the gate leaves is quantised at once, part by part, where the
    last projection reads parts."""
    h = b.rms_norm(x, weight, eps=eps, offset=offset)
    inner = b.gated(b.linear(h, wg, bg), b.linear(h, wu, bu), kind=kind, limit=limit, alpha=alpha, up_offset=up_offset)
    return b.add(x, b.linear(inner, wd, bd))


def _lower_feed_forward(low: Lowering, call: Call) -> None:
    x, weight, wg, bg, wu, bu, wd, bd = call.args
    assert x is not None and wg is not None and wu is not None and wd is not None
    rows, down = rows_of(x), low.matrix(wd)
    width = int(wd.shape[1])
    inner = low.temporary(rows.symbol, rows.factor * width)
    record = ABSENT
    if _native.linear.reads_parts(down):
        record = low.temporary(rows.symbol, rows.factor * _native.linear.record_numbers([down]))
    spec = rms_norm_spec(low, weight, call.attrs)
    project(low, "norm+gate+up", x, [(wg, bg), (wu, bu)], [inner], norm=spec, gate=gate_of(call.attrs), handed=record)
    y = low.result_over(call.results[0], x)
    project(low, "linear+add", Between(inner, rows, width, record), [(wd, bd)], [y], accumulate=True)
    low.release(inner)


def _norm_linear(b: Any, x: Any, weight: Any, w: Any, bias: Any, *, eps: float, offset: float) -> Any:
    """Norm and one projection: the output layer."""
    return b.linear(b.rms_norm(x, weight, eps=eps, offset=offset), w, bias)


def _lower_norm_linear(low: Lowering, call: Call) -> None:
    x, weight, w, bias = call.args
    assert x is not None and w is not None
    y = low.result(call.results[0])
    project(low, "norm+linear", x, [(w, bias)], [y], norm=rms_norm_spec(low, weight, call.attrs))


def _rope_write(
    b: Any, q: Any, k: Any, v: Any, positions: Any, inv_freq: Any, kv: Any, *, interleaved: bool, scale: float
) -> Any:  # fmt: skip
    """Rotation of queries and keys, and storing keys and values."""
    turned = b.rope(q, positions, inv_freq, interleaved=interleaved, scale=scale)
    key = b.rope(k, positions, inv_freq, interleaved=interleaved, scale=scale)
    return turned, b.kv_write(kv, key, v)


def _lower_rope_write(low: Lowering, call: Call) -> None:
    q, k, v, positions, inv_freq, kv = call.args
    assert q is not None and k is not None and v is not None and positions is not None and inv_freq is not None and kv is not None
    table, half = rope_table(low, positions, inv_freq, call.attrs["scale"])
    q_out = low.result(call.results[0])
    write_kv(low, kv, k, v, q=q, q_out=q_out, table=table, half=half, interleaved=call.attrs["interleaved"])


def _qk_norm_rope_write(
    b: Any, q: Any, k: Any, v: Any, q_weight: Any, k_weight: Any, positions: Any, inv_freq: Any, kv: Any,
    *, eps: float, offset: float, interleaved: bool, scale: float,
) -> Any:  # fmt: skip
    """Norm of each head's queries and keys, their rotation, and storing keys and values."""
    turned = b.rope(b.rms_norm(q, q_weight, eps=eps, offset=offset), positions, inv_freq, interleaved=interleaved, scale=scale)
    key = b.rope(b.rms_norm(k, k_weight, eps=eps, offset=offset), positions, inv_freq, interleaved=interleaved, scale=scale)
    return turned, b.kv_write(kv, key, v)


def _lower_qk_norm_rope_write(low: Lowering, call: Call) -> None:
    q, k, v, q_weight, k_weight, positions, inv_freq, kv = call.args
    assert q is not None and k is not None and v is not None and positions is not None and inv_freq is not None and kv is not None
    table, half = rope_table(low, positions, inv_freq, call.attrs["scale"])
    q_norm, k_norm = (rms_norm_spec(low, w, call.attrs) for w in (q_weight, k_weight))
    write_kv(
        low, kv, k, v, q=q, q_out=low.result(call.results[0]), table=table, half=half, interleaved=call.attrs["interleaved"],
        q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip


def _heads_match(call: Call) -> str | None:
    """Queries, keys and values of one head size, and whole groups of query heads."""
    q, k, v = call.args[:3]
    assert q is not None and k is not None and v is not None
    if q.shape[2] != k.shape[2] or k.shape != v.shape:
        return "queries, keys and values must have one head size"
    return None if int(q.shape[1]) % int(k.shape[1]) == 0 else "query heads must be a multiple of kv heads"


def _weights_are_constants(*indices: int) -> Callable[[Call], str | None]:
    def supports(call: Call) -> str | None:
        constant = all((v := call.args[i]) is not None and v.kind == "constant" for i in indices)
        return None if constant else "the weights must be constants"

    return supports


def _fused(fn: Any, lower: Any, supports: Any, *optional: str) -> Kernel:
    name = fn.__name__.lstrip("_")
    return Kernel(Pattern(name, fn, frozenset(optional)), lower, f"native {name}", supports=supports)


FUSED_KERNELS = (
    _fused(_feed_forward, _lower_feed_forward, _weights_are_constants(2, 4, 6), "weight", "bg", "bu", "bd"),
    _fused(_qk_norm_rope_write, _lower_qk_norm_rope_write, _heads_match),
    _fused(_norm_qkv, _lower_norm_qkv, _weights_are_constants(2, 4, 6), "weight", "bq", "bk", "bv"),
    _fused(_norm_gate_up, _lower_norm_gate_up, _weights_are_constants(2, 4), "weight", "bg", "bu"),
    _fused(_rope_write, _lower_rope_write, _heads_match),
    _fused(_gate_up, _lower_gate_up, _weights_are_constants(1, 3), "bg", "bu"),
    _fused(_linear_add, _lower_linear_add, _weights_are_constants(2), "bias"),
    _fused(_norm_linear, _lower_norm_linear, _weights_are_constants(2), "weight", "bias"),
    _fused(_norm_add, _lower_norm_add, lambda call: None, "weight"),
    _fused(_add_norm, _lower_add_norm, lambda call: None, "weight"),
)
"""Largest first; among equals the more profitable one first."""
