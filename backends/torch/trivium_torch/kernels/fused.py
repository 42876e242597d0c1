"""Patterns that save passes over activations, and calls: what is left to a loop in Python is counted in calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trivium.ops import Pattern
from trivium.plugin import Kernel
from trivium_torch.kernels.attention import store
from trivium_torch.kernels.dense import Args, Attrs, gate, linear, norm, turn
from trivium_torch.pages import Paged
from trivium_torch.session import TorchSession


def _add_norm(b: Any, x: Any, y: Any, weight: Any, *, eps: float, offset: float) -> Any:
    """Residual add and the norm of the sum."""
    total = b.add(x, y)
    return total, b.rms_norm(total, weight, eps=eps, offset=offset)


def add_norm(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    total = torch.add(args[0], args[1])
    return total, norm(total, args[2], attrs["eps"], attrs["offset"])


def _gate_up(
    b: Any, x: Any, wg: Any, bg: Any, wu: Any, bu: Any, *, kind: str, limit: float | None, alpha: float, up_offset: float
) -> Any:  # fmt: skip
    """The first half of a gated feed-forward block."""
    return b.gated(b.linear(x, wg, bg), b.linear(x, wu, bu), kind=kind, limit=limit, alpha=alpha, up_offset=up_offset)


def gate_up(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x, wg, bg, wu, bu = args
    g, up = linear(session, (x, wg, bg), {}), linear(session, (x, wu, bu), {})
    return gate(g, up, attrs).to(g.dtype)


def _rope_write(
    b: Any, q: Any, k: Any, v: Any, positions: Any, inv_freq: Any, kv: Any, *, interleaved: bool, scale: float
) -> Any:  # fmt: skip
    """Rotation of queries and keys, and storing keys and values."""
    turned = b.rope(q, positions, inv_freq, interleaved=interleaved, scale=scale)
    key = b.rope(k, positions, inv_freq, interleaved=interleaved, scale=scale)
    return turned, b.kv_write(kv, key, v)


def rope_write(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Paged]:
    """Queries and keys are turned together."""
    q, k, v, positions, inv_freq, kv = args
    heads = q.shape[1]
    both = turn(session, torch.cat([q, k], dim=1), positions, inv_freq, **attrs)
    store(kv.k, kv, both[:, heads:])
    store(kv.v, kv, v)
    return both[:, :heads], kv


PATTERNS: Mapping[str, Pattern] = {
    "add_norm": Pattern("add_norm", _add_norm), "gate_up": Pattern("gate_up", _gate_up, frozenset({"bg", "bu"})),
    "rope_write": Pattern("rope_write", _rope_write),
}  # fmt: skip
"""By name, for those who have kernels of their own for them."""

KERNELS = (
    Kernel(PATTERNS["add_norm"], add_norm, "add, rms_norm"),
    Kernel(PATTERNS["gate_up"], gate_up, "linear, linear, gated"),
    Kernel(PATTERNS["rope_write"], rope_write, "rope, rope, kv_write"),
)
