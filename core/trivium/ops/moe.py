"""Mixture of experts: the router and the experts' computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import ProgramError
from trivium.ops.dense import ACTIVATIONS, CLIPPED, apply_gate, linear
from trivium.ops.examples import Array, Draw, operator, times
from trivium.ops.schema import Shape

SCORINGS = ("softmax", "sigmoid", "softmax_topk")


def _infer_route(shapes: Sequence[Shape | None], attrs: Mapping[str, Any]) -> tuple[Shape, ...]:
    tokens, experts = shapes[0] or (0, 0)
    if attrs["scoring"] not in SCORINGS:
        raise ProgramError(f"moe_route: no scoring is called {attrs['scoring']!r}; there are {', '.join(SCORINGS)}")
    top_k, groups = attrs["top_k"], attrs["groups"]
    if not isinstance(experts, int) or experts % groups or top_k > experts * attrs["top_groups"] // groups:
        raise ProgramError(f"moe_route: {top_k} of {experts} experts in {groups} groups don't fit together")
    return (tokens, top_k), (tokens, top_k)


def _softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _in_best_groups(choice: Array, scoring: str, groups: int, top_groups: int) -> Array:
    """`choice` with -inf for all experts outside the best groups of each token."""
    grouped = choice.reshape(len(choice), groups, -1)
    best = -np.sort(-grouped, axis=-1)
    worth = best[..., :2].sum(axis=-1) if scoring == "sigmoid" else best[..., 0]
    kept = np.zeros(worth.shape, bool)
    np.put_along_axis(kept, np.argsort(-worth, axis=-1, kind="stable")[:, :top_groups], True, axis=-1)
    return np.asarray(np.where(kept[..., None], grouped, -np.inf).reshape(choice.shape))


_ROUTES: Sequence[Mapping[str, Any]] = (
    {"top_k": 2}, {"top_k": 3, "normalize": False, "scale": 2.5}, {"top_k": 4, "scoring": "softmax_topk"},
    {"top_k": 3, "scoring": "sigmoid", "groups": 4, "top_groups": 2}, {"top_k": 2, "groups": 4, "top_groups": 3}, {"top_k": 1},
)  # fmt: skip


@operator(
    "logits[tokens, experts]!, bias[experts]:weight? -> weights[tokens, top_k], ids[tokens, top_k]:int32",
    *({**route, "bias": bias} for route in _ROUTES for bias in (None, times(0.1))),
    sizes={"experts": (16,) * 6}, infer=_infer_route,
)  # fmt: skip
def moe_route(
    logits: Array, bias: Array | None = None, *, top_k: int, scoring: str = "softmax", normalize: bool = True, scale: float = 1.0,
    groups: int = 1, top_groups: int = 1,
) -> tuple[Array, Array]:  # fmt: skip
    """The top_k experts of each token, best first (at equal scores the lower id), and their weights.

    Scores p are softmax(logits), sigmoid(logits), or for softmax_topk the logits themselves. Experts are chosen by p + bias; their
    weights come from p alone: p, divided by their sum if `normalize`, times `scale`; for softmax_topk the softmax over the chosen
    logits, times `scale`. With groups > 1 the experts form equal consecutive groups and only the top_groups best are chosen
    from; a group is worth its best p + bias (softmax; DeepSeek-V2) or the sum of its two best (sigmoid; DeepSeek-V3, 2024).
    """
    p = _softmax(logits) if scoring == "softmax" else ACTIVATIONS["sigmoid"](logits) if scoring == "sigmoid" else logits
    choice = p if bias is None else p + bias
    if groups > 1:
        choice = _in_best_groups(choice, scoring, groups, top_groups)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, ids, axis=-1)
    if scoring == "softmax_topk":
        weights = _softmax(weights)
    elif normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights * np.float32(scale), ids.astype(np.int32)


@operator(
    "logits[tokens, experts]! -> weights[tokens, top_k], ids[tokens, top_k]:int32", {"top_k": 2},
    {"top_k": 3, "jitter": 0.25, "logits": times(3)},
)  # fmt: skip
def sparse_mixer_route(logits: Array, *, top_k: int, jitter: float = 0.01) -> tuple[Array, Array]:
    """The top_k experts of each token, best first (at equal logits the lower id). Expert e has the softmax weight that it has among
    those not chosen before it whose logits s are near its own, m: (m - s) / max(|s|, m) is not above 2 · jitter
    (Liu et al., "GRIN: GRadient-INformed MoE", 2024; as in Phi-3.5-MoE)."""
    left, weights, ids = logits.copy(), list[Array](), list[Array]()
    for _ in range(top_k):
        chosen = left.argmax(axis=-1)[:, None]
        best = np.take_along_axis(left, chosen, axis=-1)
        far = best - logits > np.float32(2 * jitter) * np.maximum(np.abs(logits), best)
        weights.append(1 / np.where(far, 0, np.exp(left - best)).sum(axis=-1, keepdims=True))
        ids.append(chosen)
        np.put_along_axis(left, chosen, -np.inf, axis=-1)
    return np.concatenate(weights, axis=-1), np.concatenate(ids, axis=-1).astype(np.int32)


def _expert_ids(d: Draw) -> list[Array]:
    return [d.rng.permutation(d.call["experts"])[: d.call["top_k"]] for _ in range(d.call["tokens"])]


@operator(
    "x[tokens, hidden], weights[tokens, top_k], ids[tokens, top_k]:int32, gate[experts, inter, hidden]:weight*,"
    " up[experts, inter, hidden]:weight*, down[experts, hidden, inter]:weight*, gate_bias[experts, inter]:weight?,"
    " up_bias[experts, inter]:weight?, down_bias[experts, hidden]:weight? -> y[tokens, hidden]",
    {"gate_bias": None, "up_bias": None, "down_bias": None}, CLIPPED, {"kind": "gelu_tanh"},
    draw={"weights": Draw.uniform, "ids": _expert_ids}, tolerance=16,
)  # fmt: skip
def moe_experts(
    x: Array, weights: Array, ids: Array, gate: Array, up: Array, down: Array, gate_bias: Array | None = None,
    up_bias: Array | None = None, down_bias: Array | None = None, *, kind: str = "silu", limit: float | None = None,
    alpha: float = 1.0, up_offset: float = 0.0,
) -> Array:  # fmt: skip
    """y[t] = sum over j of weights[t, j] · expert ids[t, j] of x[t], where expert e is
    down[e] · gated(gate[e]·x + gate_bias[e], up[e]·x + up_bias[e]) + down_bias[e], with the attributes of `gated`."""
    y = np.zeros((x.shape[0], down.shape[1]), np.float32)
    for e in np.unique(ids).tolist():
        rows, choice = np.nonzero(ids == e)
        g, u = linear(x[rows], gate[e]), linear(x[rows], up[e])
        g, u = g if gate_bias is None else g + gate_bias[e], u if up_bias is None else u + up_bias[e]
        out = linear(apply_gate(g, u, kind, limit, alpha, up_offset), down[e])
        out = out if down_bias is None else out + down_bias[e]
        np.add.at(y, rows, out * weights[rows, choice][:, None])
    return y
