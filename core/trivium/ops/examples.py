"""Ingredients of the operators' example inputs: sizes, random arrays, random paged states, tolerances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.ops.schema import Tolerance
from trivium.ops.state import PagedState, RecurrentState

Array = npt.NDArray[Any]
Rng = np.random.Generator

ROWS = (1, 2, 3, 8, 17)
"""Numbers of tokens that every row-wise operator is tried with."""

STALE = 1e3
"""What pages and slots that no sequence owns are filled with: large enough that a kernel which reads them is seen."""


def tolerances(factor: float = 1.0) -> Mapping[str, Tolerance]:
    """Tolerances per activation dtype: a few units in the last place, times `factor` for operators that sum long rows."""
    unit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
    return {dtype: Tolerance(factor * eps, factor * eps) for dtype, eps in unit.items()}


def normal(rng: Rng, *shape: int) -> npt.NDArray[np.float32]:
    """Standard normal numbers, float32[shape]."""
    return rng.standard_normal(shape, dtype=np.float32)


class Sequences(NamedTuple):
    """The sequences of an example step: query_starts int32[seqs+1], context_lens int32[seqs]."""

    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]


def sequences(queries: Sequence[int], contexts: Sequence[int]) -> Sequences:
    """Sequence s has queries[s] tokens in this step and contexts[s] tokens once it has run."""
    return Sequences(np.cumsum([0, *queries], dtype=np.int32), np.asarray(contexts, np.int32))


STEPS = (
    sequences([1], [1]), sequences([5], [5]), sequences([1, 1, 1], [7, 33, 16]), sequences([3, 1, 9], [10, 17, 9]),
    sequences([1] * 8, [2, 3, 5, 8, 13, 21, 34, 55]), sequences([17, 1], [40, 4]),
)  # fmt: skip
"""Prefill, decode, chunks that continue a context, and mixtures of them."""


def paged_state(
    rng: Rng, step: Sequences, key_shape: tuple[int, int], value_shape: tuple[int, int],
    *, page_size: int = 4, window: int | None = None,
) -> PagedState:  # fmt: skip
    """A state whose sequences hold random tokens on pages in random order; pages behind the window are given back (-1)."""
    used = [-(-int(c) // page_size) for c in step.context_lens]
    pages = rng.permutation(sum(used) + 3).astype(np.int32)
    table = np.full((len(used), max(used) + 1), -1, np.int32)
    k = np.full((len(pages), page_size, *key_shape), STALE, np.float32)
    v = np.full((len(pages), page_size, *value_shape), STALE, np.float32)
    slots, taken = [], 0
    for s, (blocks, context) in enumerate(zip(used, step.context_lens)):
        table[s, :blocks] = pages[taken : taken + blocks]
        taken += blocks
        at = np.arange(context)
        where = table[s, at // page_size].astype(np.int64), at % page_size
        k[where], v[where] = normal(rng, context, *key_shape), normal(rng, context, *value_shape)
        first = int(context - np.diff(step.query_starts)[s])
        slots.append((where[0] * page_size + where[1])[first:])
        if window is not None:
            table[s, : max(0, first - window + 1) // page_size] = -1
    return PagedState(k, v, table, np.concatenate(slots))


def recurrent_state(rng: Rng, step: Sequences, shape: tuple[int, ...]) -> RecurrentState:
    """A state with a random page for each sequence; pages that nobody owns, and those of sequences that start, hold STALE."""
    seqs = len(step.context_lens)
    table = rng.permutation(seqs + 2).astype(np.int32)[:seqs]
    data = np.full((seqs + 2, *shape), STALE, np.float32)
    continued = table[step.context_lens > np.diff(step.query_starts)]
    data[continued] = normal(rng, len(continued), *shape)
    return RecurrentState(data, table)
