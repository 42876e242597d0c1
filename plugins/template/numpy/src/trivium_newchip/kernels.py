"""The kernels of newchip. Each takes and returns the session's own tensors; what has none here runs as the reference on the host.

What a kernel must compute is the docstring of the operator: `help(trivium.ops.OPERATORS['rope'].reference)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivium.ops import Call, Pattern
from trivium.plugin import Kernel

Args = Sequence[Any]
Attrs = Mapping[str, Any]


def matmul(x: Any, weight: Any) -> Any:
    """x · weightᵀ, each row by itself: its last bits must not depend on how many rows there are."""
    return np.matmul(x[..., None, :], weight.T)[..., 0, :]


def linear(session: Any, args: Args, attrs: Attrs) -> Any:
    x, weight, bias = args
    y = matmul(x, weight)
    return y if bias is None else y + bias


def add(session: Any, args: Args, attrs: Attrs) -> Any:
    return args[0] + args[1]


def rms_norm(session: Any, args: Args, attrs: Attrs) -> Any:
    x, weight = args
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    return y if weight is None else y * (np.float32(attrs["offset"]) + weight)


def kv_write(session: Any, args: Args, attrs: Attrs) -> Any:
    """Keys and values of the step's tokens go to their slots; slot -1: nowhere."""
    layer, *news = args
    kept = layer.slots >= 0
    page, offset = np.divmod(layer.slots[kept], layer.parts[0].shape[1])
    for part, new in zip(layer.parts, news, strict=True):
        part[page, offset] = new[kept]
    return layer


def _gated_mlp(b: Any, x: Any, gate: Any, up: Any, *, kind: str) -> Any:
    return b.gated(b.linear(x, gate), b.linear(x, up), kind=kind)


GATED_MLP = Pattern("gated_mlp", _gated_mlp)
"""What the fused kernel computes. trivium finds it in models and the kit holds the kernel to it; no test needs to be written."""


def gated_mlp(session: Any, args: Args, attrs: Attrs) -> Any:
    """silu(x · gateᵀ) * (x · upᵀ) in one kernel."""
    x, gate, up = args
    g = matmul(x, gate)
    return g / (np.float32(1) + np.exp(-g)) * matmul(x, up)


def silu_only(call: Call) -> str | None:
    """Why the fused kernel can't run a call; None if it can."""
    return None if call.attrs["kind"] == "silu" else f"it has no {call.attrs['kind']}"


KERNELS = (
    Kernel("linear", linear, "newchip linear"),
    Kernel("add", add, "newchip add"),
    Kernel("rms_norm", rms_norm, "newchip rms_norm"),
    Kernel("kv_write", kv_write, "newchip kv_write"),
    Kernel(GATED_MLP, gated_mlp, "newchip gated_mlp", supports=silu_only),
)
