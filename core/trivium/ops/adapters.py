"""Low-rank adapters: what a few thin matrices add to a projection, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.ops.examples import ROWS, Array, Rng, normal, tolerances
from trivium.ops.schema import Case, operator


def _lora_cases(rng: Rng) -> Iterator[Case]:
    """Tokens with and without an adapter, next to each other and in runs; nobody has one; a slot that is all zeros."""
    for rows, n_in, n_out, rank in zip(ROWS, (16, 33, 7, 64, 129), (8, 5, 33, 600, 31), (4, 1, 3, 16, 5)):
        for adapters in (rng.integers(-1, 3, rows), np.sort(rng.integers(-1, 3, rows)), np.full(rows, -1)):
            a, b = normal(rng, 3, rank, n_in) / n_in**0.5, normal(rng, 3, rank, n_out)
            b[1] = 0
            yield Case((normal(rng, rows, n_out), normal(rng, rows, n_in), a, b, adapters.astype(np.int32)))


@operator(
    "y[tokens, out], x[tokens, in], a[slots, rank, in]:weight, b[slots, rank, out]:weight, adapters[tokens]:int32"
    " -> z[tokens, out]",
    cases=_lora_cases,
    tolerances=tolerances(10),
)
def lora(y: Array, x: Array, a: Array, b: Array, adapters: Array) -> Array:
    """z[t] = y[t] + (x[t] · a[s]ᵀ) · b[s] with s = adapters[t]; y[t] itself, bit for bit, where s is -1
    (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021). A smaller rank is filled up with zeros; the scale is a
    part of b. Both matrices may be written between two steps: see Session.assign."""
    z = y.copy()
    for slot in np.unique(adapters[adapters >= 0]):
        rows = adapters == slot
        z[rows] += (x[rows] @ a[slot].T) @ b[slot]
    return z
