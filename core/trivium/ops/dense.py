"""Row-wise operators: projections, norms, activations, rotary embedding, and moving numbers about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import ProgramError
from trivium.ops.examples import ROWS, Array, Rng, normal, tolerances
from trivium.ops.schema import Case, Shape, operator


def _embedding_cases(rng: Rng) -> Iterator[Case]:
    for rows, hidden in zip(ROWS, (8, 5, 16, 33, 64)):
        yield Case((rng.integers(0, 11, rows, dtype=np.int32), normal(rng, 11, hidden)), {"scale": 1.0 if rows % 2 else 0.5})


@operator(
    "token_ids[tokens]:int32, weight[vocab, hidden]:weight -> y[tokens, hidden]", cases=_embedding_cases, tolerances=tolerances()
)
def embedding(token_ids: Array, weight: Array, *, scale: float = 1.0) -> Array:
    """Row token_ids[t] of the table, times `scale`."""
    return weight[token_ids] * np.float32(scale)


def _linear_cases(rng: Rng) -> Iterator[Case]:
    for rows, n_in, n_out in zip(ROWS, (16, 32, 7, 64, 129), (8, 33, 5, 96, 31)):
        yield Case((normal(rng, rows, n_in), normal(rng, n_out, n_in), None))
        yield Case((normal(rng, rows, n_in), normal(rng, n_out, n_in), normal(rng, n_out)))
    yield Case((normal(rng, 75, 160), normal(rng, 70, 160), normal(rng, 70)))


@operator("x[..., in], weight[out, in]:weight, bias[out]:weight? -> y[..., out]", cases=_linear_cases, tolerances=tolerances(4))
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y = x · weightᵀ + bias. Each row is a product of its own: in one product of all, the order of the sums, and with it the last
    bits of a row, would depend on how many rows there are."""
    y: Array = np.matmul(x[..., None, :], weight.T)[..., 0, :]
    return y if bias is None else y + bias


def _head_cases(rng: Rng) -> Iterator[Case]:
    for rows, heads, n_in, n_out in zip(ROWS, (1, 3, 4, 2, 5), (8, 5, 16, 32, 7), (16, 3, 8, 33, 12)):
        yield Case((normal(rng, rows, heads, n_in), normal(rng, heads, n_out, n_in)))


@operator(
    "x[tokens, heads, in], weight[heads, out, in]:weight -> y[tokens, heads, out]", cases=_head_cases, tolerances=tolerances(4)
)
def head_linear(x: Array, weight: Array) -> Array:
    """y[t, h] = weight[h] · x[t, h]: a projection of its own for every head (the absorbed matrices of latent attention)."""
    return np.asarray(np.matmul(x[..., None, :], weight.swapaxes(1, 2))[..., 0, :])


def _row_cases(rng: Rng, attrs: Sequence[Mapping[str, Any]] = ({},), arrays: int = 1) -> Iterator[Case]:
    """Calls with as many arrays of one shape, once for each of the attributes."""
    for rows, n in zip(ROWS, (8, 5, 16, 33, 64)):
        yield from (Case(tuple(normal(rng, rows, n) * 3 for _ in range(arrays)), a) for a in attrs)
    yield Case(tuple(normal(rng, 3, 4, 6) for _ in range(arrays)), attrs[0])


def _pair_cases(rng: Rng) -> Iterator[Case]:
    return _row_cases(rng, arrays=2)


@operator("a[..., n], b[..., n] -> y[..., n]", cases=_pair_cases, tolerances=tolerances())
def add(a: Array, b: Array) -> Array:
    """y = a + b, elementwise."""
    return a + b


@operator("a[..., n], b[..., n] -> y[..., n]", cases=_pair_cases, tolerances=tolerances())
def mul(a: Array, b: Array) -> Array:
    """y = a * b, elementwise."""
    return a * b


@operator(
    "x[..., n] -> y[..., n]", cases=lambda rng: _row_cases(rng, [{"factor": 0.25}, {"factor": -3.0}]), tolerances=tolerances()
)
def scale(x: Array, *, factor: float) -> Array:
    """y = factor * x."""
    return x * np.float32(factor)


@operator("x[..., n] -> y[..., n]", cases=lambda rng: _row_cases(rng, [{"cap": 2.0}, {"cap": 30.0}]), tolerances=tolerances())
def softcap(x: Array, *, cap: float) -> Array:
    """y = cap * tanh(x / cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def _rms_norm_cases(rng: Rng) -> Iterator[Case]:
    for rows, n in zip(ROWS, (8, 5, 16, 33, 64)):
        yield Case((normal(rng, rows, n), normal(rng, n)), {"eps": 1e-6})
        yield Case((normal(rng, rows, n) * 50, normal(rng, n)), {"eps": 1e-5, "offset": 1.0})
        yield Case((normal(rng, rows, n) * 1e-3, None), {"eps": 1e-5})  # numbers so small that eps decides
    yield Case((normal(rng, 3, 4, 8), normal(rng, 8)), {"eps": 1e-6})


@operator("x[..., hidden], weight[hidden]:weight? -> y[..., hidden]", cases=_rms_norm_cases, tolerances=tolerances(2))
def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6, offset: float = 0.0) -> Array:
    """y = x / sqrt(mean(x²) + eps) * (offset + weight), over the last dimension; without a weight the factor is 1
    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return y if weight is None else y * (np.float32(offset) + weight)


def _layer_norm_cases(rng: Rng) -> Iterator[Case]:
    for rows, n in zip(ROWS, (8, 5, 16, 33, 64)):
        yield Case((normal(rng, rows, n) + 2, normal(rng, n), normal(rng, n)))
        yield Case((normal(rng, rows, n) * 1e-3, normal(rng, n), None), {"eps": 1e-6})
    yield Case((normal(rng, 3, 4, 8), None, None))


@operator(
    "x[..., hidden], weight[hidden]:weight?, bias[hidden]:weight? -> y[..., hidden]",
    cases=_layer_norm_cases,
    tolerances=tolerances(2),
)
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


_KINDS = [{"kind": kind} for kind in ACTIVATIONS]


@operator("x[..., n] -> y[..., n]", cases=lambda g: _row_cases(g, _KINDS), tolerances=tolerances(), infer=_infer_activation)
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


def _gated_cases(rng: Rng) -> Iterator[Case]:
    clipped = {"limit": 1.5, "alpha": 1.702, "up_offset": 1.0}
    return _row_cases(rng, [{"kind": "silu"}, {"kind": "gelu_tanh"}, {"kind": "gelu"}, clipped], arrays=2)


@operator("gate[..., n], up[..., n] -> y[..., n]", cases=_gated_cases, tolerances=tolerances(2), infer=_infer_activation)
def gated(
    gate: Array, up: Array, *, kind: str = "silu", limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> Array:
    """y = f(gate) * (up + up_offset) with f as in `activation`. With `limit`, gate is first clipped from above to limit and up to
    ±limit. alpha (silu only): f(g) = g·σ(alpha·g) (Shazeer, "GLU Variants Improve Transformer", 2020; the clipped form is that of
    gpt-oss)."""
    return apply_gate(gate, up, kind, limit, alpha, up_offset)


def _rope_cases(rng: Rng) -> Iterator[Case]:
    for rows, heads, dim, half in zip(ROWS, (1, 3, 4, 2, 9), (8, 10, 64, 16, 32), (4, 3, 32, 8, 16)):
        inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
        x, positions = normal(rng, rows, heads, dim), rng.integers(0, 500, rows, dtype=np.int32)
        yield Case((x, positions, inv_freq))
        yield Case((x, positions, inv_freq), {"interleaved": True, "scale": 1.25})


@operator(
    "x[tokens, heads, head_dim], positions[tokens]:int32, inv_freq[half] -> y[tokens, heads, head_dim]",
    cases=_rope_cases,
    tolerances=tolerances(10),
)
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


def _infer_reshape(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    old, new = shapes[0] or (), tuple(attrs["shape"])
    symbols = [sorted(d for d in s if isinstance(d, str)) for s in (old, new)]
    sizes = [math.prod(d for d in s if isinstance(d, int)) for s in (old, new)]
    if symbols[0] != symbols[1] or len(symbols[0]) > 1 or sizes[0] != sizes[1]:
        raise ProgramError(f"reshape: {list(old)} can't become {list(new)}; at most one symbol, and equal products")
    return (new,)


def _reshape_cases(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case((normal(rng, rows, 12),), {"shape": ("tokens", 3, 4)})
        yield Case((normal(rng, rows, 5, 2),), {"shape": ("tokens", 10)})


@operator("x[..., n] -> y[..., n]", cases=_reshape_cases, tolerances=tolerances(), infer=_infer_reshape)
def reshape(x: Array, *, shape: Shape) -> Array:
    """The same numbers in row-major order under another shape: integers, and at most one symbol ("tokens") that x has too."""
    return x.reshape([-1 if isinstance(d, str) else d for d in shape])


def _infer_slice(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    shape, start, stop = shapes[0] or (), attrs["start"], attrs["stop"]
    if not shape or not isinstance(shape[-1], int) or not 0 <= start < stop <= shape[-1]:
        raise ProgramError(f"slice: {start}..{stop} is not a part of the last dimension of {list(shape)}")
    return ((*shape[:-1], stop - start),)


def _slice_cases(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case((normal(rng, rows, 12),), {"start": 3, "stop": 8})
        yield Case((normal(rng, rows, 2, 6),), {"start": 0, "stop": 3})


@operator("x[..., n] -> y[..., m]", cases=_slice_cases, tolerances=tolerances(), infer=_infer_slice)
def slice(x: Array, *, start: int, stop: int) -> Array:
    """Numbers start..stop-1 of the last dimension."""
    return x[..., start:stop]


def _infer_concat(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    a, b = shapes[0] or (), shapes[1] or ()
    if a[:-1] != b[:-1] or not isinstance(a[-1], int) or not isinstance(b[-1], int):
        raise ProgramError(f"concat: {list(a)} and {list(b)} must agree in all but the last dimension")
    return ((*a[:-1], a[-1] + b[-1]),)


def _concat_cases(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case((normal(rng, rows, 12), normal(rng, rows, 5)))
        yield Case((normal(rng, rows, 2, 4), normal(rng, rows, 2, 4)))


@operator("a[..., m], b[..., n] -> y[..., k]", cases=_concat_cases, tolerances=tolerances(), infer=_infer_concat)
def concat(a: Array, b: Array) -> Array:
    """a followed by b along the last dimension: y[..., m+n]."""
    return np.concatenate([a, b], axis=-1)


def _gather_cases(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case((normal(rng, rows, 7), np.sort(rng.integers(0, rows, (rows + 1) // 2, dtype=np.int32))))
        yield Case((normal(rng, rows, 16), np.array([rows - 1], np.int32)))


@operator("x[tokens, hidden], rows[rows]:int32 -> y[rows, hidden]", cases=_gather_cases, tolerances=tolerances())
def gather_rows(x: Array, rows: Array) -> Array:
    """y[r] = x[rows[r]]."""
    return x[rows]
