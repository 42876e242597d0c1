"""Low-rank adapters: what a few thin matrices add to a projection, token by token."""

from __future__ import annotations

import numpy as np

from trivium.ops.examples import Array, Draw, operator


def _second_is_zeros(d: Draw) -> Array:
    b = d.normal()
    b[1] = 0
    return b


@operator(
    "y[tokens, out], x[tokens, in], a[slots, rank, in]:weight, b[slots, rank, out]:weight, adapters[tokens]:int32"
    " -> z[tokens, out]", {"adapters": lambda d: d.integers(3, -1)}, {"adapters": lambda d: np.sort(d.integers(3, -1))},
    {"adapters": lambda d: np.full(d.shape, -1)}, sizes={"rank": (4, 1, 3, 16, 5, 8)}, tolerance=10,
    draw={"a": lambda d: d.normal() / d.shape[-1] ** 0.5, "b": _second_is_zeros},
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
