"""What crosses the line between core and backend in one step: integer arrays in, sampled ids out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


def id_mask(ids: Collection[int], vocab_size: int) -> U32:
    """uint32[ceil(vocab/32)] with the bits of `ids`, as in SampleInputs.mask."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


COLUMNS: Mapping[str, str] = {
    "temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4", "typical_p": "f4", "top_n_sigma": "f4",
    "xtc_probability": "f4", "xtc_threshold": "f4", "seed": "u8", "position": "i8", "repetition": "f4", "presence": "f4",
    "frequency": "f4", "score_ids": "i4",
}  # fmt: skip
"""What SampleInputs holds one number a row of, and as what."""


@dataclass(slots=True, eq=False, repr=False)  # as Batch made in every step; freezing them would double what they cost
class SampleInputs:
    """How each sampled row is turned into a token (see ops.sample for the exact pipeline). R rows, CSR lists where ragged.

    temperature, top_p, min_p: float32[R]; top_k: int32[R], 0 = off. temperature 0 = greedy.
    typical_p, top_n_sigma, xtc_probability, xtc_threshold: float32[R]; off: typical_p 1, the others 0.
    seed: uint64[R]; position: int64[R], the index of the token to be made (the random counter).
    repetition, presence, frequency: float32[R], neutral 1, 0, 0.
    seen_starts: int32[R+1], seen_ids: int32[S], seen_counts: int32[S]: distinct ids of prompt and output of the rows that have
    a penalty, with their number of occurrences in the output (0: prompt only). Ids are in rising order within a row.
    bias_starts: int32[R+1], bias_ids: int32[B], bias: float32[B]: added to the logits; -inf bans an id.
    mask: uint32[R, ceil(vocab/32)] or None: bit i of word w allows id 32*w+i (grammars, allowed ids).
    score_ids: int32[R], -1 = sample; an id >= 0 is returned as it is and its logprob reported (prompt scoring).
    top_logprobs: alternatives reported per row (maximum over the rows); -1: no logprobs are computed at all.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    typical_p: F32
    top_n_sigma: F32
    xtc_probability: F32
    xtc_threshold: F32
    seed: U64
    position: I64
    repetition: F32
    presence: F32
    frequency: F32
    seen_starts: I32
    seen_ids: I32
    seen_counts: I32
    bias_starts: I32
    bias_ids: I32
    bias: F32
    score_ids: I32
    mask: npt.NDArray[np.uint32] | None = None
    top_logprobs: int = -1


class Sampled(NamedTuple):
    """ids: int32[R]. With logprobs: logprobs float32[R] of the chosen ids, ranks int32[R] (1 = most likely),
    top_ids int32[R, k], top_logprobs float32[R, k], descending, ties by lower id. Logprobs are those of the raw logits
    (before temperature, penalties and bias), natural log, over the tokenizer's vocabulary."""

    ids: I32
    logprobs: F32 | None = None
    ranks: I32 | None = None
    top_ids: I32 | None = None
    top_logprobs: F32 | None = None


_NONE: I32 = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """One step. T tokens of S sequences, R sampled rows, P pooled rows, G groups, B blocks (longest table of the step).

    token_ids, positions: int32[T], sequence after sequence. query_starts: int32[S+1]. context_lens: int32[S], tokens in the cache
    once this step has run. block_tables: int32[G, S, B] (see PagedState). slot_mapping: int64[G, T].
    sample_rows: int32[R], rows of token_ids whose logits are wanted, ascending. sampling: R rows.
    pool_rows: int32[P], rows of token_ids whose final hidden states are wanted (the Program's output "hidden"), ascending.
    adapters: int32[T], the slot of each token's adapter (see the operator `lora`), -1: none; empty for a Program without adapters.
    """

    token_ids: I32
    positions: I32
    query_starts: I32
    context_lens: I32
    block_tables: I32
    slot_mapping: I64
    sample_rows: I32
    sampling: SampleInputs
    pool_rows: I32 = field(default_factory=lambda: _NONE)
    adapters: I32 = field(default_factory=lambda: _NONE)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seqs(self) -> int:
        return len(self.context_lens)
