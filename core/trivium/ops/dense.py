"""Row-wise operators: projections, norms, activations, rotary embedding, moving numbers about, and low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import ProgramError
from trivium.ops.examples import Array, normal, operator, times
from trivium.ops.schema import Shape


@operator(
    "token_ids[tokens]:int32, weight[vocab, hidden]:weight* -> y[tokens, hidden]",
    {"token_ids": lambda d: d.integers(11)}, {"token_ids": lambda d: d.integers(11), "scale": 0.5},
)  # fmt: skip
def embedding(token_ids: Array, weight: Array, *, scale: float = 1.0) -> Array:
    """Row token_ids[t] of the table, times `scale`."""
    return weight[token_ids] * np.float32(scale)


@operator(
    "token_ids[tokens]:int32, weight[segments, hidden]:weight, query_starts[seqs+1]:int32 -> y[tokens, hidden]",
    {"separator": 3}, draw={"token_ids": lambda d: d.integers(6)}, sizes={"segments": (2, 1, 3, 2, 2, 1)},
)  # fmt: skip
def segment_embedding(token_ids: Array, weight: Array, query_starts: Array, *, separator: int) -> Array:
    """Row s of the table, where s separators stand before the token in its sequence; the last row where there are more. So the
    texts of a pair are told apart (Devlin et al., "BERT", 2019)."""
    before = np.cumsum([0, *(token_ids == separator)])
    first = np.repeat(before[query_starts[:-1]], np.diff(query_starts))
    return np.asarray(weight[np.minimum(before[:-1] - first, len(weight) - 1)])


@operator("x[..., in], weight[out, in]:weight*, bias[out]:weight? -> y[..., out]", {"bias": None}, {}, tolerance=4)
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y = x · weightᵀ + bias. Each row is a product of its own: in one product of all, the order of the sums, and with it the last
    bits of a row, would depend on how many rows there are."""
    y: Array = np.matmul(x[..., None, :], weight.T)[..., 0, :]
    return y if bias is None else y + bias


@operator("x[tokens, heads, in], weight[heads, out, in]:weight -> y[tokens, heads, out]", tolerance=4)
def head_linear(x: Array, weight: Array) -> Array:
    """y[t, h] = weight[h] · x[t, h]: a projection of its own for every head (the absorbed matrices of latent attention)."""
    return np.asarray(np.matmul(x[..., None, :], weight.swapaxes(1, 2))[..., 0, :])


@operator("a[..., n], b[..., n] -> y[..., n]")
def add(a: Array, b: Array) -> Array:
    """y = a + b, elementwise."""
    return a + b


@operator("a[..., n], b[..., n] -> y[..., n]")
def mul(a: Array, b: Array) -> Array:
    """y = a * b, elementwise."""
    return a * b


@operator("x[..., n] -> y[..., n]", {"factor": 0.25}, {"factor": -3.0})
def scale(x: Array, *, factor: float) -> Array:
    """y = factor * x."""
    return x * np.float32(factor)


@operator("x[..., n] -> y[..., n]", {"cap": 2.0, "x": times(3)}, {"cap": 30.0, "x": times(50)})
def softcap(x: Array, *, cap: float) -> Array:
    """y = cap * tanh(x / cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


@operator(
    "x[..., hidden], weight[hidden]:weight? -> y[..., hidden]", {"eps": 1e-6}, {"x": times(50), "eps": 1e-5, "offset": 1.0},
    {"x": times(1e-3), "weight": None, "eps": 1e-5}, tolerance=2,  # numbers so small that eps decides
)  # fmt: skip
def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6, offset: float = 0.0) -> Array:
    """y = x / sqrt(mean(x²) + eps) * (offset + weight), over the last dimension; without a weight the factor is 1
    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return y if weight is None else y * (np.float32(offset) + weight)


@operator(
    "x[..., hidden], weight[hidden]:weight?, bias[hidden]:weight? -> y[..., hidden]", {"x": lambda d: d.normal() + 2},
    {"x": times(1e-3), "bias": None, "eps": 1e-6}, {"weight": None, "bias": None}, tolerance=2,
)  # fmt: skip
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5) -> Array:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension, with the biased variance
    (Ba, Kiros and Hinton, "Layer Normalization", 2016)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    y: Array = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(eps))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may become inf, and 1 / inf is the right answer
        return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-x)))


def _gelu(x: Array) -> Array:
    erf = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / np.float32(math.sqrt(2))), np.float32)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + erf))


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x), "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)), "quick_gelu": lambda x: x * _sigmoid(np.float32(1.702) * x),
    "sigmoid": _sigmoid, "tanh": np.tanh, "softplus": lambda x: np.logaddexp(x, np.float32(0)),
}  # fmt: skip
"""The kinds of activation."""


def _infer_activation(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    """For `activation` and, with two equal shapes, `gated`."""
    if attrs["kind"] not in ACTIVATIONS:
        raise ProgramError(f"no activation is called {attrs['kind']!r}; there are {', '.join(ACTIVATIONS)}")
    if shapes[0] != shapes[-1]:
        raise ProgramError(f"gated: gate is {shapes[0]}, up is {shapes[1]}; they must be equal")
    if attrs.get("alpha", 1.0) != 1.0 and attrs["kind"] != "silu":
        raise ProgramError(f"gated: alpha is defined for silu only, not for {attrs['kind']}")
    return (shapes[0] or (),)


@operator("x[..., n] -> y[..., n]", *({"x": times(3), "kind": kind} for kind in ACTIVATIONS), infer=_infer_activation)
def activation(x: Array, *, kind: str = "silu") -> Array:
    """y = f(x): silu x·σ(x); gelu x·Φ(x) with the exact error function; gelu_tanh its tanh approximation; relu; relu2 relu(x)²;
    quick_gelu x·σ(1.702x); sigmoid; tanh; softplus ln(1+eˣ)."""
    return ACTIVATIONS[kind](x)


def apply_gate(gate: Array, up: Array, kind: str, limit: float | None, alpha: float, up_offset: float) -> Array:
    """The arithmetic of `gated`, which moe_experts shares."""
    if limit is not None:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    y: Array = ACTIVATIONS[kind](gate) if alpha == 1.0 else gate * _sigmoid(np.float32(alpha) * gate)
    return y * (up + np.float32(up_offset))


CLIPPED = {"limit": 1.5, "alpha": 1.702, "up_offset": 1.0}
"""The attributes of `gated` in gpt-oss, but for a limit that examples reach."""


@operator(
    "gate[..., n], up[..., n] -> y[..., n]", {"kind": "silu"}, {"kind": "gelu_tanh"}, {"kind": "gelu"}, CLIPPED,
    draw={"gate": times(3), "up": times(3)}, tolerance=2, infer=_infer_activation,
)  # fmt: skip
def gated(
    gate: Array, up: Array, *, kind: str = "silu", limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> Array:
    """y = f(gate) * (up + up_offset) with f as in `activation`. With `limit`, gate is first clipped from above to limit and up to
    ±limit. alpha (silu only): f(g) = g·σ(alpha·g) (Shazeer, "GLU Variants Improve Transformer", 2020; the clipped form is that of
    gpt-oss)."""
    return apply_gate(gate, up, kind, limit, alpha, up_offset)


@operator(
    "x[tokens, heads, head_dim], positions[tokens]:int32, inv_freq[half] -> y[tokens, heads, head_dim]",
    {}, {"interleaved": True, "scale": 1.25}, tolerance=10,
    draw={"positions": lambda d: d.integers(500), "inv_freq": lambda d: 10000.0 ** -(np.arange(*d.shape) / d.shape[0])},
)  # fmt: skip
def rope(x: Array, positions: Array, inv_freq: Array, *, interleaved: bool = False, scale: float = 1.0) -> Array:
    """Rotates the first 2·half numbers of every head by the angles positions[t]·inv_freq[i] (float32); the rest passes through.

    Pair i is (x[i], x[half+i]), or (x[2i], x[2i+1]) if `interleaved`. `scale` multiplies cosine and sine (attention factor)
    (Su et al., "RoFormer", 2021).
    """
    half = len(inv_freq)
    angles = (positions.astype(np.float32)[:, None] * inv_freq)[:, None, :]
    cos, sin = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    y = x.copy()
    turned = y[..., : 2 * half]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    a, b = first.copy(), second.copy()
    first[...], second[...] = a * cos - b * sin, b * cos + a * sin
    return y


@operator(
    "x[tokens, heads, head_dim], positions[tokens]:int32 -> y[tokens, heads, head_dim]", {"beta": 0.1, "period": 64},
    {"beta": 0.5, "period": 3, "offset": 1}, draw={"positions": lambda d: d.integers(500)}, tolerance=2,
)  # fmt: skip
def position_scale(x: Array, positions: Array, *, beta: float, period: int, offset: int = 0) -> Array:
    """y[t] = x[t] · (1 + beta · ln(1 + floor((positions[t] + offset) / period))): queries of far positions attend more sharply
    (Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025; as in Llama 4 and Mistral 3)."""
    steps = ((positions + offset) // period).astype(np.float32)
    return x * (1 + np.float32(beta) * np.log1p(steps))[:, None, None]


def _infer_reshape(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    old, new = shapes[0] or (), tuple(attrs["shape"])
    symbols = [sorted(d for d in s if isinstance(d, str)) for s in (old, new)]
    sizes = [math.prod(d for d in s if isinstance(d, int)) for s in (old, new)]
    if symbols[0] != symbols[1] or len(symbols[0]) > 1 or sizes[0] != sizes[1]:
        raise ProgramError(f"reshape: {list(old)} can't become {list(new)}; at most one symbol, and equal products")
    return (new,)


@operator(
    "x[..., n] -> y[..., n]", {"x": lambda d: normal(d.rng, d.call["tokens"], 12), "shape": ("tokens", 3, 4)},
    {"x": lambda d: normal(d.rng, d.call["tokens"], 5, 2), "shape": ("tokens", 10)}, infer=_infer_reshape,
)  # fmt: skip
def reshape(x: Array, *, shape: Shape) -> Array:
    """The same numbers in row-major order under another shape: integers, and at most one symbol ("tokens") that x has too."""
    return x.reshape([-1 if isinstance(d, str) else d for d in shape])


def _infer_slice(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    shape, start, stop = shapes[0] or (), attrs["start"], attrs["stop"]
    if not shape or not isinstance(shape[-1], int) or not 0 <= start < stop <= shape[-1]:
        raise ProgramError(f"slice: {start}..{stop} is not a part of the last dimension of {list(shape)}")
    return ((*shape[:-1], stop - start),)


@operator("x[..., n] -> y[..., m]", {"start": 1, "stop": 4}, {"start": 0, "stop": 5}, infer=_infer_slice)
def slice(x: Array, *, start: int, stop: int) -> Array:
    """Numbers start..stop-1 of the last dimension."""
    return x[..., start:stop]


def _infer_concat(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    a, b = shapes[0] or (), shapes[1] or ()
    if a[:-1] != b[:-1] or not isinstance(a[-1], int) or not isinstance(b[-1], int):
        raise ProgramError(f"concat: {list(a)} and {list(b)} must agree in all but the last dimension")
    return ((*a[:-1], a[-1] + b[-1]),)


@operator("a[..., m], b[..., n] -> y[..., k]", infer=_infer_concat)
def concat(a: Array, b: Array) -> Array:
    """a followed by b along the last dimension: y[..., m+n]."""
    return np.concatenate([a, b], axis=-1)


@operator(
    "x[tokens, hidden], rows[rows]:int32 -> y[rows, hidden]", {"rows": lambda d: np.sort(d.integers(d.call["tokens"]))[::2]},
    {"rows": lambda d: [d.call["tokens"] - 1]},
)  # fmt: skip
def gather_rows(x: Array, rows: Array) -> Array:
    """y[r] = x[rows[r]]."""
    return x[rows]


@operator(
    "y[tokens, out], x[tokens, in], a[slots, rank, in]:weight, b[slots, rank, out]:weight, adapters[tokens]:int32"
    " -> z[tokens, out]", {"adapters": lambda d: d.integers(3, -1)}, {"adapters": lambda d: np.sort(d.integers(3, -1))},
    {"adapters": lambda d: np.full(d.shape, -1)}, sizes={"rank": (4, 1, 3, 16, 5, 8)}, tolerance=10,
    draw={"a": lambda d: d.normal() / d.shape[-1] ** 0.5, "b": lambda d: d.normal() * np.reshape([1, 0, 1], (3, 1, 1))},
)  # fmt: skip
def lora(y: Array, x: Array, a: Array, b: Array, adapters: Array) -> Array:
    """z[t] = y[t] + (x[t] · a[s]ᵀ) · b[s] with s = adapters[t]; y[t] itself, bit for bit, where s is -1
    (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021). A smaller rank is filled up with zeros; the scale is a
    part of b. Both matrices may be written between two steps: see Session.assign."""
    z = y.copy()
    for slot in np.unique(adapters[adapters >= 0]):
        rows = adapters == slot
        z[rows] += (x[rows] @ a[slot].T) @ b[slot]
    return z
