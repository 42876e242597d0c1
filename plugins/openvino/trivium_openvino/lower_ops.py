"""How each operator becomes OpenVINO nodes. The shapes of the graphs for norms and rotations are those that OpenVINO's own passes
know and replace by one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from openvino import opset15 as ops

from trivium.ops import Call, Value
from trivium.plugin import Kernel
from trivium_openvino.lowering import Lowering


def _f32(x: Any) -> Any:
    return ops.constant(np.asarray(x, np.float32))


def _ints(*x: int) -> Any:
    return ops.constant(np.array(x, np.int64))


def _int(x: int) -> Any:
    return ops.constant(np.int64(x))


def _embedding(low: Lowering, call: Call) -> None:
    ids, weight = call.args
    y = ops.gather(low.node(weight), low.node(ids), _ints(0))
    scale = call.attrs["scale"]
    low.set(call.results[0], y if scale == 1.0 else ops.multiply(y, _f32(scale)))


def _linear(low: Lowering, call: Call) -> None:
    """Projections of one value whose weights are held alike are one product, cut up afterwards: the value is read and quantised
    once, and a step of few rows is ruled by the number of kernels."""
    calls = low.siblings(call)
    if call is not calls[0]:
        return
    x, weight, bias = call.args
    whole = len(calls) == 1
    node = low.node(weight) if whole else low.joined(calls)
    y = ops.matmul(low.node(x), node, False, True)
    if bias is not None:
        y = ops.add(y, low.node(bias) if whole else _f32(np.concatenate([low.array(c.args[2]) for c in calls])))
    widths = [int(c.results[0].shape[-1]) for c in calls]
    parts = [y] if whole else ops.variadic_split(y, _int(-1), _ints(*widths)).outputs()
    for c, part in zip(calls, parts, strict=True):
        low.set(c.results[0], part)


def _binary(make: Callable[[Any, Any], Any]) -> Callable[[Lowering, Call], None]:
    def lower(low: Lowering, call: Call) -> None:
        low.set(call.results[0], make(low.node(call.args[0]), low.node(call.args[1])))

    return lower


def _scale(low: Lowering, call: Call) -> None:
    low.set(call.results[0], ops.multiply(low.node(call.args[0]), _f32(call.attrs["factor"])))


def _softcap(low: Lowering, call: Call) -> None:
    cap = _f32(call.attrs["cap"])
    low.set(call.results[0], ops.multiply(ops.tanh(ops.divide(low.node(call.args[0]), cap)), cap))


def _rms_norm(low: Lowering, call: Call) -> None:
    x, weight = call.args
    assert x is not None
    node, last = low.node(x), _ints(-1)
    mean = ops.reduce_mean(ops.power(node, _f32(2)), last, True)
    inverse = ops.divide(_f32(1), ops.sqrt(ops.add(mean, _f32(call.attrs["eps"]))))
    factor = np.ones(int(x.shape[-1]), np.float32) if weight is None else low.array(weight) + np.float32(call.attrs["offset"])
    low.set(call.results[0], ops.multiply(ops.multiply(node, inverse), _f32(factor)))


def _layer_norm(low: Lowering, call: Call) -> None:
    x, weight, bias = call.args
    y = ops.mvn(low.node(x), _ints(-1), True, call.attrs["eps"], "inside_sqrt")
    y = y if weight is None else ops.multiply(y, low.node(weight))
    low.set(call.results[0], y if bias is None else ops.add(y, low.node(bias)))


_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "silu": ops.swish, "gelu": lambda x: ops.gelu(x, "erf"), "gelu_tanh": lambda x: ops.gelu(x, "tanh"), "relu": ops.relu,
    "relu2": lambda x: ops.multiply(ops.relu(x), ops.relu(x)), "sigmoid": ops.sigmoid, "tanh": ops.tanh, "softplus": ops.softplus,
    "quick_gelu": lambda x: ops.multiply(x, ops.sigmoid(ops.multiply(x, _f32(1.702)))),
}  # fmt: skip


def _activation(low: Lowering, call: Call) -> None:
    low.set(call.results[0], _ACTIVATIONS[call.attrs["kind"]](low.node(call.args[0])))


def _gated(low: Lowering, call: Call) -> None:
    gate, up = (low.node(v) for v in call.args)
    limit, alpha, offset = (call.attrs[name] for name in ("limit", "alpha", "up_offset"))
    if limit is not None:
        gate, up = ops.minimum(gate, _f32(limit)), ops.clamp(up, -limit, limit)
    if alpha == 1.0:
        gate = _ACTIVATIONS[call.attrs["kind"]](gate)
    else:
        gate = ops.multiply(gate, ops.sigmoid(ops.multiply(gate, _f32(alpha))))
    low.set(call.results[0], ops.multiply(gate, up if offset == 0 else ops.add(up, _f32(offset))))


class Turns:
    """Cosines and sines of a rope's angles, float32, by position: made once, as far as positions have come."""

    def __init__(self, inv_freq: npt.NDArray[np.float32], scale: float, shape: tuple[int, ...]) -> None:
        """`shape`: of a position; if it has twice as many numbers as inv_freq, they stand there twice."""
        self._inv_freq, self._scale, self._shape = np.resize(inv_freq, int(np.prod(shape))), np.float32(scale), shape
        self._tables = np.zeros((2, 0, *shape), np.float32)

    def at(self, positions: npt.NDArray[np.int32], which: int) -> npt.NDArray[np.float32]:
        """float32[tokens, *shape] of the cosines (0) or sines (1)."""
        top = int(positions.max(initial=-1)) + 1
        if top > self._tables.shape[1]:
            angles = np.arange(-(-top // 1024) * 1024, dtype=np.float32)[:, None] * self._inv_freq
            tables = np.stack([np.cos(angles), np.sin(angles)]) * self._scale
            self._tables = tables.reshape(2, len(angles), *self._shape)
        return self._tables[which].take(positions, axis=0)


def _turns(low: Lowering, positions: Value, inv_freq: Value, scale: float, interleaved: bool) -> tuple[Any, Any]:
    """Cosines and sines of a step as inputs: [tokens, 1, 1, 2 half], or [tokens, 1, half, 1] for interleaved pairs."""
    key = ("rope", inv_freq, scale, interleaved)
    if key in low.part.feeds:
        return low.part.feeds[key].parameter, low.part.feeds[(*key, "sin")].parameter
    assert positions.kind == "input"
    half = int(inv_freq.shape[0])
    shape = (1, half, 1) if interleaved else (1, 1, 2 * half)
    table = Turns(low.array(inv_freq), scale, shape)
    cos = low.feed(key, (-1, *shape), lambda batch: table.at(batch.positions, 0), np.float32)
    return cos, low.feed((*key, "sin"), (-1, *shape), lambda batch: table.at(batch.positions, 1), np.float32)


def _rope(low: Lowering, call: Call) -> None:
    x, positions, inv_freq = call.args
    assert x is not None and positions is not None and inv_freq is not None
    heads, width, half = int(x.shape[1]), int(x.shape[2]), int(inv_freq.shape[0])
    interleaved = call.attrs["interleaved"]
    cos, sin = _turns(low, positions, inv_freq, call.attrs["scale"], interleaved)
    node = ops.reshape(low.node(x), _ints(-1, heads, 1, width), special_zero=False)
    whole = 2 * half == width
    turned = node if whole else _cut(node, 0, 2 * half)
    turned = _turn_pairs(turned, cos, sin, heads, half) if interleaved else _turn_halves(turned, cos, sin, half)
    y = turned if whole else ops.concat([turned, _cut(node, 2 * half, width)], -1)
    low.set(call.results[0], ops.reshape(y, _ints(-1, heads, width), special_zero=False))


def _turn_halves(x: Any, cos: Any, sin: Any, half: int) -> Any:
    first, second = _cut(x, 0, half), _cut(x, half, 2 * half)
    other = ops.concat([ops.multiply(second, _f32(-1)), first], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(other, sin))


def _turn_pairs(x: Any, cos: Any, sin: Any, heads: int, half: int) -> Any:
    pairs = ops.reshape(x, _ints(-1, heads, half, 2), special_zero=False)
    a, b = _cut(pairs, 0, 1), _cut(pairs, 1, 2)
    first = ops.subtract(ops.multiply(a, cos), ops.multiply(b, sin))
    second = ops.add(ops.multiply(b, cos), ops.multiply(a, sin))
    return ops.reshape(ops.concat([first, second], -1), _ints(-1, heads, 1, 2 * half), special_zero=False)


def _cut(x: Any, start: int, stop: int) -> Any:
    """Numbers start..stop-1 of the last dimension."""
    return ops.slice(x, _ints(start), _ints(stop), _ints(1), _ints(-1))


def _reshape(low: Lowering, call: Call) -> None:
    sizes = (d if isinstance(d, int) else -1 for d in call.attrs["shape"])
    low.set(call.results[0], ops.reshape(low.node(call.args[0]), _ints(*sizes), special_zero=False))


def _slice(low: Lowering, call: Call) -> None:
    low.set(call.results[0], _cut(low.node(call.args[0]), call.attrs["start"], call.attrs["stop"]))


def _concat(low: Lowering, call: Call) -> None:
    low.set(call.results[0], ops.concat([low.node(v) for v in call.args], -1))


def _gather_rows(low: Lowering, call: Call) -> None:
    low.set(call.results[0], ops.gather(low.node(call.args[0]), low.node(call.args[1]), _ints(0)))


def _lora(low: Lowering, call: Call) -> None:
    """All adapters at once: x times every a, numbers of other adapters than the token's set to zero, times every b."""
    y, x, a, b, adapters = call.args
    assert a is not None and b is not None
    for weight in (a, b):
        low.weights[weight].changes = True
    slots, rank = int(a.shape[0]), int(a.shape[1])
    flat = [ops.reshape(low.node(w), _ints(slots * rank, int(w.shape[2])), special_zero=False) for w in (a, b)]
    small = ops.matmul(low.node(x), flat[0], False, True)
    owner = ops.constant(np.repeat(np.arange(slots, dtype=np.int32), rank))
    mine = ops.equal(ops.unsqueeze(low.node(adapters), _ints(1)), owner)
    small = ops.select(mine, small, _f32(0))
    low.set(call.results[0], ops.add(low.node(y), ops.matmul(small, flat[1], False, False)))


_LOWERED: Mapping[str, Callable[[Lowering, Call], None]] = {
    "embedding": _embedding, "linear": _linear, "add": _binary(ops.add), "mul": _binary(ops.multiply),
    "scale": _scale, "softcap": _softcap, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "activation": _activation,
    "gated": _gated, "rope": _rope, "reshape": _reshape, "slice": _slice, "concat": _concat, "gather_rows": _gather_rows,
    "lora": _lora,
}  # fmt: skip


def _weights_are_constants(call: Call) -> str | None:
    """Norms fold their weight into the graph, rope its table."""
    named = zip(call.op.signature.args, call.args, strict=True)  # type: ignore[union-attr]
    folded = ((arg, v) for arg, v in named if v is not None and (arg.dtype == "weight" or arg.name == "inv_freq"))
    made = [arg.name for arg, v in folded if v.kind != "constant"]
    return f"{', '.join(made)} must be constants" if made else None


OPERATOR_KERNELS = tuple(Kernel(n, fn, f"OpenVINO {n}", supports=_weights_are_constants) for n, fn in _LOWERED.items())
