"""How each operator becomes nodes. A lowering function takes (Graph, Call)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trivium.ops import Call, PagedKV, Value
from trivium.plugin import Kernel
from trivium_onnxruntime.graph import CONTRIB, KV_TYPES, Graph

Lower = Callable[[Graph, Call], None]


def _argument(call: Call, index: int) -> Value:
    value = call.args[index]
    assert value is not None
    return value


def _embedding(g: Graph, call: Call) -> None:
    ids, table = g.tensor(_argument(call, 0)), _argument(call, 1)
    weight = g.common.weights[table]
    if weight.array is not None:
        y = g.node("Gather", g.constant(table.name, weight.array), ids)
    else:
        y = _look_up(g, ids, table)
    factor = call.attrs["scale"]
    g.set(call.results[0], y if factor == 1.0 else g.node("Mul", y, g.scalar(factor)))


def _look_up(g: Graph, ids: str, table: Value) -> str:
    """Rows of a table in blocks."""
    weight = g.common.weights[table]
    assert weight.q is not None and weight.d is not None
    rows, width = weight.shape
    data = g.constant(f"{table.name} rows", weight.q.reshape(rows, -1))
    scales = g.constant(f"{table.name} d", weight.d.reshape(rows, -1))
    y = g.contrib("GatherBlockQuantized", data, ids, scales, bits=weight.bits, block_size=32, gather_axis=0, quantize_axis=1)
    if weight.m is None:
        return y
    rest = g.constant(f"{table.name} m", weight.m.reshape(rows, -1) + np.float32(8) * weight.d.reshape(rows, -1))
    least = g.node("Unsqueeze", g.node("Gather", rest, ids), g.constant("last", np.array([-1], np.int64)))
    return g.reshape(g.node("Add", g.reshape(y, (0, 0, width // 32, 32)), least), (0, 0, width))


def _linear(g: Graph, call: Call) -> None:
    x, weight, bias = call.args
    assert x is not None and weight is not None
    source = g.by_head(x)
    y = g.project(source, g.common.weights[weight], weight.name, g.tensor(bias) if bias is not None else "")
    g.set_by_head(call.results[0], y)


def _head_linear(g: Graph, call: Call) -> None:
    weight = _argument(call, 1)
    x = g.node("Unsqueeze", g.by_head(_argument(call, 0)), g.constant("before last", np.array([-2], np.int64)))
    held = g.common.weights[weight]
    turned = np.ascontiguousarray((held.numbers() if held.array is None else held.array).swapaxes(1, 2))
    y = g.product("MatMul", x, f"{weight.name} turned", turned)
    g.set(call.results[0], g.reshape(y, (0, 0, int(np.prod(call.results[0].shape[1:], dtype=np.int64)))))  # type: ignore[arg-type]


def _elementwise(op: str) -> Lower:
    def lower(g: Graph, call: Call) -> None:
        g.set(call.results[0], g.node(op, *(g.tensor(v) for v in call.args if v is not None)))

    return lower


def _scale(g: Graph, call: Call) -> None:
    g.set(call.results[0], g.node("Mul", g.tensor(_argument(call, 0)), g.scalar(call.attrs["factor"])))


def _softcap(g: Graph, call: Call) -> None:
    cap = g.scalar(call.attrs["cap"])
    g.set(call.results[0], g.node("Mul", g.node("Tanh", g.node("Div", g.tensor(_argument(call, 0)), cap)), cap))


def gamma(g: Graph, weight: Value | None, offset: float, width: int) -> str:
    """The factor of a norm; without a weight ones."""
    if weight is None:
        return g.constant(f"ones {width}", np.ones(width, np.float32))
    numbers = g.common.weights[weight].numbers()
    return g.constant(f"{weight.name} + {offset}", numbers + np.float32(offset)) if offset else g.tensor(weight)


def _rms_norm(g: Graph, call: Call) -> None:
    x, weight = _argument(call, 0), call.args[1]
    factor = gamma(g, weight, call.attrs["offset"], int(x.shape[-1]))
    y = g.node("SimplifiedLayerNormalization", g.by_head(x), factor, epsilon=float(call.attrs["eps"]), axis=-1, stash_type=1)
    g.set_by_head(call.results[0], y)


def _layer_norm(g: Graph, call: Call) -> None:
    x, weight, bias = call.args
    assert x is not None
    args = [g.by_head(x), gamma(g, weight, 0.0, int(x.shape[-1])), *([g.tensor(bias)] if bias is not None else [])]
    g.set_by_head(call.results[0], g.node("LayerNormalization", *args, epsilon=float(call.attrs["eps"]), axis=-1))


def activate(g: Graph, x: str, kind: str, alpha: float = 1.0) -> str:
    """f(x) of the operator `activation`; alpha: silu only."""
    if kind in ("silu", "quick_gelu"):
        return g.contrib("QuickGelu", x, alpha=1.702 if kind == "quick_gelu" else float(alpha))
    if kind in ("gelu", "gelu_tanh"):
        return g.node("Gelu", x, approximate="none" if kind == "gelu" else "tanh")
    if kind == "relu2":
        turned = g.node("Relu", x)
        return g.node("Mul", turned, turned)
    return g.node({"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softplus": "Softplus"}[kind], x)


def _activation(g: Graph, call: Call) -> None:
    g.set(call.results[0], activate(g, g.tensor(_argument(call, 0)), call.attrs["kind"]))


def _gated(g: Graph, call: Call) -> None:
    gate, up, a = g.tensor(_argument(call, 0)), g.tensor(_argument(call, 1)), call.attrs
    if a["limit"] is not None:
        gate = g.node("Min", gate, g.scalar(a["limit"]))
        up = g.node("Clip", up, g.scalar(-a["limit"]), g.scalar(a["limit"]))
    up = g.node("Add", up, g.scalar(a["up_offset"])) if a["up_offset"] else up
    g.set(call.results[0], g.node("Mul", activate(g, gate, a["kind"], a["alpha"]), up))


def rotate(g: Graph, x: str, shape: Any, positions: Value, inv_freq: Value, interleaved: bool, scale: float) -> str:
    """The rotated heads of the flat tensor x, a value of `shape`. Cosines and sines of a step are made once for all layers."""

    def angles() -> str:
        at = g.node("Cast", g.tensor(positions), to=1)
        turned = g.node("Unsqueeze", at, g.constant("last", np.array([-1], np.int64)))
        return g.node("Mul", turned, g.exact(inv_freq))

    def table(op: str) -> str:
        made = g.cast(g.node(op, g.once(("angles", positions, inv_freq), angles)))
        return made if scale == 1.0 else g.node("Mul", made, g.scalar(scale))

    cos, sin = (g.once((op, positions, inv_freq, scale), lambda op=op: table(op)) for op in ("Cos", "Sin"))
    width = 2 * int(inv_freq.shape[0])
    part: dict[str, Any] = {} if width == shape[2] else {"rotary_embedding_dim": width}
    return g.node("RotaryEmbedding", x, cos, sin, interleaved=int(interleaved), num_heads=int(shape[1]), **part)


def _rope(g: Graph, call: Call) -> None:
    x, positions, inv_freq = call.args
    assert x is not None and positions is not None and inv_freq is not None
    g.set(call.results[0], rotate(g, g.tensor(x), x.shape, positions, inv_freq, call.attrs["interleaved"], call.attrs["scale"]))


def _reshape(g: Graph, call: Call) -> None:
    g.set(call.results[0], g.tensor(_argument(call, 0)))


def _slice(g: Graph, call: Call) -> None:
    start, stop = (g.constant(f"index {n}", np.array([n], np.int64)) for n in (call.attrs["start"], call.attrs["stop"]))
    y = g.node("Slice", g.by_head(_argument(call, 0)), start, stop, g.constant("last", np.array([-1], np.int64)))
    g.set_by_head(call.results[0], y)


def _concat(g: Graph, call: Call) -> None:
    g.set_by_head(call.results[0], g.node("Concat", g.by_head(_argument(call, 0)), g.by_head(_argument(call, 1)), axis=-1))


def _gather_rows(g: Graph, call: Call) -> None:
    x, rows = _argument(call, 0), _argument(call, 1)
    flat = g.reshape(g.tensor(x), (-1, int(np.prod(x.shape[1:], dtype=np.int64))))  # type: ignore[arg-type]
    g.set(call.results[0], g.node("Gather", flat, g.tensor(rows)))


def _lora(g: Graph, call: Call) -> None:
    """All adapters at once, their low-rank numbers zeroed where a token has another one."""
    y, x, a, b, adapters = call.args
    assert y is not None and x is not None and a is not None and b is not None and adapters is not None
    slots, rank, _ = (int(n) for n in a.shape)
    owner = g.constant(f"slots {slots} x {rank}", np.repeat(np.arange(slots, dtype=np.int32), rank))

    def mask() -> str:
        own = g.node("Unsqueeze", g.tensor(adapters), g.constant("last", np.array([-1], np.int64)))
        return g.node("Cast", g.node("Equal", own, owner), to=g.type)

    low = g.contrib("FusedMatMul", g.tensor(x), g.reshape(g.variable(a), (slots * rank, -1)), transB=1)
    low = g.node("Mul", low, g.once(("adapters", slots, rank), mask))
    g.set(call.results[0], g.node("Add", g.tensor(y), g.node("MatMul", low, g.reshape(g.variable(b), (slots * rank, -1)))))


def kept(g: Graph, x: str) -> str:
    """Keys or values as the KV format holds them."""
    dtype = g.common.spec.dtype
    return x if dtype == g.common.dtype else g.node("Cast", g.node("Cast", x, to=KV_TYPES[dtype]), to=1)


def _kv_write(g: Graph, call: Call) -> None:
    """Keys and values wait for the attention that reads them, which appends them to the rows."""
    state = g.common.state_of[_argument(call, 0)]
    g.pending[state] = kept(g, g.tensor(_argument(call, 1))), kept(g, g.tensor(_argument(call, 2)))
    g.states.add(state)


def attention(g: Graph, state: int, heads: int, args: Mapping[str, str], **attrs: Any) -> str:
    """Attention over what a state holds, to which the step's keys and values are added first. args: query, and key, value
    (absent: packed in the query), cos, sin, sink."""
    return (_over_pages if g.common.paged else _over_rows)(g, state, heads, args, **attrs)


def _over_pages(g: Graph, state: int, heads: int, args: Mapping[str, str], **attrs: Any) -> str:
    """PagedAttention; a second one of a state reads the pages as the first one leaves them. Where the step's keys and values lie in
    the pages already, their slots are -1: they are not stored again."""
    spec, (group, _) = g.common.program.states[state].spec, g.common.spec.group_of(state)
    assert isinstance(spec, PagedKV)
    first = g.constant("first", np.array([0], np.int64))
    flat = [g.node("Squeeze", args[name], first) if name in args else "" for name in ("query", "key", "value")]
    pages = [g.latest.get((state, part)) or g.state_input(state, part) for part in ("keys", "values")]
    lengths = [g.input("step.starts", "int32", ("N",)), g.input("step.past", "int32", ("seqs",))]
    tables = g.input(f"step.tables.{group}", "int32", ("seqs", "blocks"))
    slots = g.input("step.nowhere" if state in g.from_pages else f"step.slots.{group}", "int32", ("S",))
    inputs = [*flat, *pages, *lengths, tables, args.get("cos", ""), args.get("sin", ""), slots, args.get("sink", "")]
    inputs += ["", "", "", "", g.input("step.bounds", "int32", (2,))]
    y = f"attention.{state}.{len(g.outputs)}"
    names = [f"{part}.{state}.new.{len(g.outputs)}" for part in ("keys", "values")]
    g.latest |= {(state, part): name for part, name in zip(("keys", "values"), names)}
    g.outputs.update(dict.fromkeys(names, g.state_shape(spec)))
    g.node_to("PagedAttention", inputs, [y, *names], domain=CONTRIB, num_heads=heads, kv_num_heads=spec.kv_heads, **attrs)
    return g.node("Unsqueeze", y, first)


def _over_rows(g: Graph, state: int, heads: int, args: Mapping[str, str], **attrs: Any) -> str:
    """GroupQueryAttention."""
    spec = g.common.program.states[state].spec
    assert isinstance(spec, PagedKV)
    past = [g.state_input(state, part) for part in ("keys", "values")]
    lengths = [g.input("last_position", "int32", ("B",)), g.input("longest", "int32", ())]
    inputs = [args["query"], args.get("key", ""), args.get("value", ""), *past, *lengths, args.get("cos", ""), args.get("sin", "")]
    inputs += ["", "", args.get("sink", ""), "", "", "", "", g.input("queries", "int32", ("B",))]
    y = f"attention.{state}.{len(g.outputs)}"
    shape = g.state_shape(spec)
    names = [f"keys.{state}.new", f"values.{state}.new"]
    if names[0] in g.outputs:  # a second reader of what the first one has appended: the same numbers again
        names = [f"{name}.{len(g.outputs)}" for name in names]
    g.outputs.update(dict.fromkeys(names, shape))
    g.node_to("GroupQueryAttention", inputs, [y, *names], domain=CONTRIB, num_heads=heads, kv_num_heads=spec.kv_heads, **attrs)
    return y


def attention_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of paged_attention as GroupQueryAttention calls them."""
    return {
        "scale": float(attrs["scale"]), "local_window_size": int(attrs["window"] or -1), "softcap": float(attrs["softcap"] or 0.0),
    }  # fmt: skip


def _paged_attention(g: Graph, call: Call) -> None:
    """Keys and values that were stored before this model come from the pages; PagedAttention leaves unread what is given here."""
    q, kv, _, _, sinks = call.args
    assert q is not None and kv is not None
    state = g.common.state_of[kv]
    spec = g.common.program.states[state].spec
    assert isinstance(spec, PagedKV)
    if state not in g.pending:
        g.from_pages.add(state)
        width = spec.kv_heads * spec.head_dim
        g.pending[state] = (
            g.input(f"key.{state}", g.common.dtype, ("B", "S", width)), g.input(f"value.{state}", g.common.dtype, ("B", "S", width))
        )  # fmt: skip
    key, value = g.pending[state]
    args = {"query": g.tensor(q), "key": key, "value": value, **({"sink": g.tensor(sinks)} if sinks is not None else {})}
    g.set(call.results[0], attention(g, state, int(q.shape[1]), args, **attention_attrs(call.attrs)))


def store_pending(g: Graph) -> None:
    """Keys and values that nobody in this model attends to are appended all the same: as queries of themselves."""
    for state, (key, value) in g.pending.items():
        if not any(name.startswith(f"keys.{state}.new") for name in g.outputs):
            spec = g.common.program.states[state].spec
            assert isinstance(spec, PagedKV)
            attention(g, state, spec.kv_heads, {"query": key, "key": key, "value": value}, scale=1.0)


def supports_attention(call: Call) -> str | None:
    """None, or why GroupQueryAttention can't do it."""
    q, kv = call.args[:2]
    assert q is not None and kv is not None
    if not call.attrs["causal"]:
        return "GroupQueryAttention sees a chunk of several sequences causally only"
    return None if int(q.shape[2]) % 8 == 0 else "GroupQueryAttention takes head sizes that are a multiple of 8"


def supports_linear(call: Call) -> str | None:
    weight = call.args[1]
    assert weight is not None
    return None if weight.kind == "constant" else "the weight must be a constant"


def _supports_write(call: Call) -> str | None:
    k, v = call.args[1:3]
    assert k is not None and v is not None
    return None if k.shape == v.shape and int(k.shape[2]) % 8 == 0 else "head sizes must be a multiple of 8"


def _supports_slots(call: Call) -> str | None:
    return None if all(v is not None and v.kind == "constant" for v in call.args[2:4]) else "the matrices must be constants"


_LOWERED: Mapping[str, tuple[Lower, Callable[[Call], str | None]]] = {
    name: entry if isinstance(entry, tuple) else (entry, lambda call: None)
    for name, entry in {
        "embedding": (_embedding, supports_linear), "linear": (_linear, supports_linear),
        "head_linear": (_head_linear, supports_linear),
        "add": _elementwise("Add"), "mul": _elementwise("Mul"), "scale": _scale, "softcap": _softcap, "rms_norm": _rms_norm,
        "layer_norm": _layer_norm, "activation": _activation, "gated": _gated, "rope": _rope, "reshape": _reshape, "slice": _slice,
        "concat": _concat, "gather_rows": _gather_rows, "lora": (_lora, _supports_slots), "kv_write": (_kv_write, _supports_write),
        "paged_attention": (_paged_attention, supports_attention),
    }.items()
}  # fmt: skip

OPERATOR_KERNELS = tuple(Kernel(name, lower, f"onnx {name}", supports=supports) for name, (lower, supports) in _LOWERED.items())
