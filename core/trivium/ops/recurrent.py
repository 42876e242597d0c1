"""Operators that carry a fixed-size state along each sequence: gated delta rule, state-space recurrence, short convolution."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.ops.dense import ACTIVATIONS
from trivium.ops.examples import Array, Draw, operator
from trivium.ops.state import RecurrentState


def spans(s: RecurrentState, query_starts: Array, context_lens: Array) -> Iterator[tuple[int, int, int, Array]]:
    """(begin, end, page, first state) of every sequence that has tokens in the step."""
    for i, context in enumerate(context_lens.tolist()):
        begin, end, page = int(query_starts[i]), int(query_starts[i + 1]), int(s.table[i])
        if begin < end:
            yield begin, end, page, np.zeros_like(s.data[page]) if context == end - begin else s.data[page].copy()


@operator(
    "q[tokens, heads, dk], k[tokens, heads, dk], v[tokens, heads, dv], g[tokens, heads]!, beta[tokens, heads]!, s:Recurrent,"
    " query_starts[seqs+1]:int32, context_lens[seqs]:int32 -> y[tokens, heads, dv], s:Recurrent", {"scale": 0.25}, tolerance=10,
    draw={"k": lambda d: d.normal() / d.shape[-1] ** 0.5, "g": lambda d: -d.uniform(), "beta": Draw.uniform,
          "s": lambda d: d.recurrent(d.call["heads"], d.call["dk"], d.call["dv"])},
)  # fmt: skip
def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, s: RecurrentState, query_starts: Array, context_lens: Array,
    *, scale: float,
) -> tuple[Array, RecurrentState]:  # fmt: skip
    """Linear attention with decay and overwriting; the state S of a head is [dk, dv], Recurrent((heads, dk, dv)).

    Token by token: S = exp(g)·S; S = S + beta · k ⊗ (v - Sᵀk); y = scale · Sᵀq. A sequence whose context starts in this step
    starts from zeros. q and k are used as they come (Yang et al., "Gated Delta Networks", 2024).
    """
    y = np.zeros_like(v)
    for begin, end, page, state in spans(s, query_starts, context_lens):
        for t in range(begin, end):
            state = state * np.exp(g[t])[:, None, None]
            missing = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][:, :, None] * missing[:, None, :]
            y[t] = np.float32(scale) * np.einsum("hkv,hk->hv", state, q[t])
        s.data[page] = state
    return y, s


@operator(
    "x[tokens, heads, dv], dt[tokens, heads]!, a[heads]:weight, b[tokens, groups, dk], c[tokens, groups, dk], d[heads]:weight,"
    " s:Recurrent, query_starts[seqs+1]:int32, context_lens[seqs]:int32 -> y[tokens, heads, dv], s:Recurrent",
    {}, {"dt_limits": (0.25, 0.75)}, draw={"dt": Draw.uniform, "a": lambda d: -4 * d.uniform(),
          "s": lambda d: d.recurrent(d.call["heads"], d.call["dv"], d.call["dk"])},
    sizes={"groups": (1, 2, 3, 3, 1, 2)}, tolerance=10,
)  # fmt: skip
def selective_scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, s: RecurrentState, query_starts: Array, context_lens: Array,
    *, dt_limits: tuple[float, float] = (0.0, np.inf),
) -> tuple[Array, RecurrentState]:  # fmt: skip
    """The state-space recurrence of Mamba-2; the state S of a head is [dv, dk], Recurrent((heads, dv, dk)). Head h reads group
    h // (heads / groups) of b and c.

    Token by token: S = exp(dt·a)·S + dt · x ⊗ b; y = S·c + d·x. A sequence whose context starts in this step starts from
    zeros. dt is clipped to dt_limits, and else used as it comes (Dao and Gu, "Transformers are SSMs", 2024).
    """
    dt = np.clip(dt, np.float32(dt_limits[0]), np.float32(dt_limits[1]))
    y, (b, c) = np.zeros_like(x), (np.repeat(group, x.shape[1] // group.shape[1], axis=1) for group in (b, c))
    for begin, end, page, state in spans(s, query_starts, context_lens):
        for t in range(begin, end):
            state = np.exp(dt[t] * a)[:, None, None] * state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
            y[t] = np.einsum("hvk,hk->hv", state, c[t]) + d[:, None] * x[t]
        s.data[page] = state
    return y, s


@operator(
    "x[tokens, channels], weight[channels, width]:weight, bias[channels]:weight?, s:Recurrent, query_starts[seqs+1]:int32,"
    " context_lens[seqs]:int32 -> y[tokens, channels], s:Recurrent",
    {"bias": None}, {"kind": "silu"}, draw={"s": lambda d: d.recurrent(d.call["width"] - 1, d.call["channels"])}, tolerance=2,
)  # fmt: skip
def short_conv(
    x: Array, weight: Array, bias: Array | None, s: RecurrentState, query_starts: Array, context_lens: Array,
    *, kind: str | None = None,
) -> tuple[Array, RecurrentState]:  # fmt: skip
    """Causal convolution of each channel along its sequence: y[t] = f(sum over i of weight[:, i] · x[t-width+1+i] + bias), f an
    activation or none. The state is the last width-1 inputs, oldest first, Recurrent((width-1, channels)); before the beginning
    of a sequence the inputs are zeros."""
    y = np.zeros_like(x)
    width = weight.shape[1]
    for begin, end, page, past in spans(s, query_starts, context_lens):
        inputs = np.concatenate([past, x[begin:end]])
        y[begin:end] = sum(weight[:, i] * inputs[i : i + end - begin] for i in range(width))
        s.data[page] = inputs[len(inputs) - width + 1 :]
    y = y if bias is None else y + bias
    return (y if kind is None else ACTIVATIONS[kind](y)), s
