"""Fused patterns: where onnxruntime has one operator for several calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivium.ops import Call, Pattern, Value
from trivium.plugin import Kernel
from trivium_onnxruntime.graph import Graph
from trivium_onnxruntime.lower_ops import (
    attention, attention_attrs, gamma, kept, rotate,
)  # fmt: skip


def _qkv_attention(
    b: Any, x: Any, wq: Any, bq: Any, wk: Any, bk: Any, wv: Any, bv: Any, positions: Any, inv_freq: Any, kv: Any,
    query_starts: Any, context_lens: Any, sinks: Any, *, q_shape: Any, k_shape: Any, interleaved: bool, rope_scale: float,
    scale: float, window: int | None, softcap: float | None,
) -> Any:  # fmt: skip
    """Projections, rotation, storing and attention."""
    q, k = b.reshape(b.linear(x, wq, bq), shape=q_shape), b.reshape(b.linear(x, wk, bk), shape=k_shape)
    v = b.reshape(b.linear(x, wv, bv), shape=k_shape)
    q, k = (b.rope(y, positions, inv_freq, interleaved=interleaved, scale=rope_scale) for y in (q, k))
    kv = b.kv_write(kv, k, v)
    return b.paged_attention(q, kv, query_starts, context_lens, sinks, scale=scale, window=window, softcap=softcap), kv


def _lower_qkv_attention(g: Graph, call: Call) -> None:
    """One MatMulNBits for the three projections, whose result GroupQueryAttention takes as it is."""
    x, wq, bq, wk, bk, wv, bv, positions, inv_freq, kv, _, _, sinks = call.args
    assert x is not None and wq is not None and wk is not None and wv is not None
    names, biases = (wq, wk, wv), (bq, bk, bv)
    weight = g.common.join(names) if _rotates_inside(g) else None
    if weight is not None:
        args = [g.project(g.tensor(x), weight, " + ".join(v.name for v in names), _biases(g, names, biases))]
    else:
        each = [g.tensor(b) if b is not None else "" for b in biases]
        args = [g.project(g.tensor(x), g.common.weights[w], w.name, b) for w, b in zip(names, each)]
    _attend(g, args, call.attrs["q_shape"], call.attrs["k_shape"], call, (positions, inv_freq, kv, sinks))


def _rotates_inside(g: Graph) -> bool:
    """Whether the attention operator rotates: what it appends can't be rounded to a KV format after that."""
    return g.common.spec.dtype == g.common.dtype


def _attend(g: Graph, qkv: list[str], q_shape: Any, k_shape: Any, call: Call, rest: tuple[Value | None, ...]) -> None:
    """Rotation, storing and attention of flat queries, keys and values, or of one tensor that holds all three."""
    positions, inv_freq, kv, sinks = rest
    assert positions is not None and inv_freq is not None and kv is not None
    a = call.attrs
    more: dict[str, Any] = attention_attrs(a)
    args = dict(zip(("query", "key", "value"), qkv))
    if _rotates_inside(g):
        args |= dict(zip(("cos", "sin"), _tables(g, inv_freq, a["rope_scale"])))
        more |= {"do_rotary": 1, "rotary_interleaved": int(a["interleaved"])}
    else:
        for name, shape in (("query", q_shape), ("key", k_shape)):
            args[name] = rotate(g, args[name], shape, positions, inv_freq, a["interleaved"], a["rope_scale"])
        args |= {name: kept(g, args[name]) for name in ("key", "value")}
    args |= {"sink": g.tensor(sinks)} if sinks is not None else {}
    g.set(call.results[0], attention(g, g.common.state_of[kv], int(q_shape[1]), args, **more))


def _biases(g: Graph, weights: tuple[Value, ...], biases: tuple[Value | None, ...]) -> str:
    if all(b is None for b in biases):
        return ""
    parts = [np.zeros(int(w.shape[0]), np.float32) if b is None else g.common.weights[b].numbers() for w, b in zip(weights, biases)]
    return g.constant(f"bias of {' + '.join(w.name for w in weights)}", np.concatenate(parts))


def _tables(g: Graph, inv_freq: Value, scale: float) -> tuple[str, str]:
    """Cosines and sines of all positions, float32[positions, half]."""
    frequencies = g.common.weights[inv_freq].numbers()
    angles = np.arange(g.common.positions, dtype=np.float32)[:, None] * frequencies
    return (
        g.constant(f"cos {inv_freq.name} {scale}", np.cos(angles) * np.float32(scale)),
        g.constant(f"sin {inv_freq.name} {scale}", np.sin(angles) * np.float32(scale)),
    )


def _rope_attention(
    b: Any, q: Any, k: Any, v: Any, positions: Any, inv_freq: Any, kv: Any, query_starts: Any, context_lens: Any, sinks: Any,
    *, interleaved: bool, rope_scale: float, scale: float, window: int | None, softcap: float | None,
) -> Any:  # fmt: skip
    """Rotation, storing and attention."""
    q, k = (b.rope(y, positions, inv_freq, interleaved=interleaved, scale=rope_scale) for y in (q, k))
    kv = b.kv_write(kv, k, v)
    return b.paged_attention(q, kv, query_starts, context_lens, sinks, scale=scale, window=window, softcap=softcap), kv


def _lower_rope_attention(g: Graph, call: Call) -> None:
    q, k, v, positions, inv_freq, kv, _, _, sinks = call.args
    assert q is not None and k is not None and v is not None
    _attend(g, [g.tensor(x) for x in (q, k, v)], q.shape, k.shape, call, (positions, inv_freq, kv, sinks))


def _add_norm(b: Any, x: Any, y: Any, weight: Any, *, eps: float, offset: float) -> Any:
    """Residual add and the norm of the sum."""
    total = b.add(x, y)
    return total, b.rms_norm(total, weight, eps=eps, offset=offset)


def _lower_add_norm(g: Graph, call: Call) -> None:
    x, y, weight = call.args
    assert x is not None and y is not None
    factor = gamma(g, weight, call.attrs["offset"], int(x.shape[-1]))
    args, total = [g.tensor(x), g.tensor(y), factor], f"total.{call.results[0].name}"
    normed = f"normed.{call.results[1].name}"
    names = [normed, "", "", total]
    g.node_to("SkipSimplifiedLayerNormalization", args, names, domain="com.microsoft", epsilon=float(call.attrs["eps"]))
    g.set(call.results[0], total)
    g.set(call.results[1], normed)


def _supports_rope(call: Call) -> str | None:
    """For both patterns of attention: what the rotation inside GroupQueryAttention asks for."""
    named = dict(zip(_PARAMETERS[call.name], call.args))
    inv_freq, positions = named["inv_freq"], named["positions"]
    assert inv_freq is not None and positions is not None
    if inv_freq.kind != "constant" or positions.kind != "input":
        return "frequencies must be constants, positions those of the step"
    if call.name == "qkv_attention":
        weights = [named[w] for w in ("wq", "wk", "wv")]
        if any(w is None or w.kind != "constant" for w in weights):
            return "the weights must be constants"
        size, stored = int(call.attrs["q_shape"][2]), int(call.attrs["k_shape"][2])
    else:
        q, v = named["q"], named["v"]
        assert q is not None and v is not None
        size, stored = int(q.shape[2]), int(v.shape[2])
    if size != stored or size % 8 or int(inv_freq.shape[0]) % 8:
        return "GroupQueryAttention takes one head size, a multiple of 8, and rotates a multiple of 16 numbers"
    return None


_PARAMETERS = {
    fn.__name__.lstrip("_"): fn.__code__.co_varnames[1 : fn.__code__.co_argcount] for fn in (_qkv_attention, _rope_attention)
}


def _supports_norm(call: Call) -> str | None:
    x = call.args[0]
    assert x is not None
    return None if len(x.shape) == 2 else "the sum must have one inner dimension"


def _fused(fn: Any, lower: Any, supports: Any, *optional: str) -> Kernel:
    name = fn.__name__.lstrip("_")
    return Kernel(Pattern(name, fn, frozenset(optional)), lower, f"onnx {name}", supports=supports)


FUSED_KERNELS = (
    _fused(_qkv_attention, _lower_qkv_attention, _supports_rope, "bq", "bk", "bv", "sinks"),
    _fused(_rope_attention, _lower_rope_attention, _supports_rope, "sinks"),
    _fused(_add_norm, _lower_add_norm, _supports_norm, "weight"),
)
