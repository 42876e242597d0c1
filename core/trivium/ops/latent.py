"""Attention over compressed keys and values (multi-head latent attention, DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.ops.attention import attend, sequences_of, write_slots
from trivium.ops.examples import ROWS, STEPS, Array, Rng, normal, paged_state, sequences, tolerances
from trivium.ops.schema import Case, operator
from trivium.ops.state import PagedState


def _latent_write_cases(rng: Rng) -> Iterator[Case]:
    for rows, rank, rope_dim in zip(ROWS, (16, 32, 24, 64, 8), (4, 8, 6, 16, 4)):
        state = paged_state(rng, sequences([rows], [rows + 3]), (1, rank), (1, rope_dim))
        yield Case((state, normal(rng, rows, rank), normal(rng, rows, rope_dim)))


@operator(
    "kv:LatentKV, latent[tokens, rank], rope[tokens, rope_dim] -> kv:LatentKV", cases=_latent_write_cases, tolerances=tolerances()
)
def latent_write(kv: PagedState, latent: Array, rope: Array) -> PagedState:
    """Stores the compressed keys-and-values and the rotated key parts of the step's tokens in their slots (-1: nowhere)."""
    write_slots(kv.k, kv.slots, latent[:, None])
    write_slots(kv.v, kv.slots, rope[:, None])
    return kv


def _latent_attention_cases(rng: Rng) -> Iterator[Case]:
    sizes = [(1, 16, 4), (4, 32, 8), (3, 24, 6), (5, 64, 16), (2, 8, 4), (16, 32, 8)]
    for step, (heads, rank, rope_dim) in zip(STEPS, sizes):
        tokens = int(step.query_starts[-1])
        state = paged_state(rng, step, (1, rank), (1, rope_dim))
        yield Case((normal(rng, tokens, heads, rank), normal(rng, tokens, heads, rope_dim), state, *step), {"scale": rank**-0.5})


@operator(
    "q_latent[tokens, heads, rank], q_rope[tokens, heads, rope_dim], kv:LatentKV, query_starts[seqs+1]:int32,"
    " context_lens[seqs]:int32 -> y[tokens, heads, rank]",
    cases=_latent_attention_cases,
    tolerances=tolerances(4),
)
def latent_attention(
    q_latent: Array, q_rope: Array, kv: PagedState, query_starts: Array, context_lens: Array, *, scale: float
) -> Array:
    """softmax(scale · (q_latent·latentᵀ + q_rope·ropeᵀ)) · latent, causal; all heads read the same stored rows. Positions as in
    paged_attention. The projections into and out of the latent space are the caller's (head_linear)."""
    q = np.concatenate([q_latent, q_rope], axis=-1)
    y = np.zeros_like(q_latent)
    for rows, latent, rope, visible in sequences_of(kv, query_starts, context_lens):
        y[rows] = attend(q[rows], np.concatenate([latent, rope], axis=-1), latent, visible, scale, None, None)
    return y
