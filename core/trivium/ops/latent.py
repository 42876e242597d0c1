"""Attention over compressed keys and values (multi-head latent attention, DeepSeek-V2, 2024)."""

from __future__ import annotations

import numpy as np

from trivium.ops.attention import attend, sequences_of, write_slots
from trivium.ops.examples import Array, operator
from trivium.ops.state import PagedState


@operator("kv:LatentKV, latent[tokens, rank], rope[tokens, rope_dim] -> kv:LatentKV")
def latent_write(kv: PagedState, latent: Array, rope: Array) -> PagedState:
    """Stores the compressed keys-and-values and the rotated key parts of the step's tokens in their slots (-1: nowhere)."""
    write_slots(kv.k, kv.slots, latent[:, None])
    write_slots(kv.v, kv.slots, rope[:, None])
    return kv


@operator(
    "q_latent[tokens, heads, rank], q_rope[tokens, heads, rope_dim], kv:LatentKV, query_starts[seqs+1]:int32,"
    " context_lens[seqs]:int32 -> y[tokens, heads, rank]", {"scale": 0.2}, tolerance=4,
)  # fmt: skip
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
