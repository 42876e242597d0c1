"""StepPlan -> Batch: the integer arrays that cross to the backend."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from trivium.kv import KVCache
from trivium.ops import Batch, SampleInputs
from trivium.sched.scheduler import Entry


class RowMap(NamedTuple):
    """Which logits one entry wants: `scores` rows from position `start` on give logprobs of the next prompt token; `sample`:
    and the entry's last row draws a token."""

    start: int
    scores: int
    sample: bool


def sampled_rows(entry: Entry) -> RowMap:
    """The rows an entry wants, in ascending order of position: first those to score, then the one to sample."""
    seq, end = entry.seq, entry.start + entry.tokens
    first = max(entry.start, seq.scored)
    return RowMap(first, max(min(end, seq.score_end) - first, 0), seq.samples and end == seq.length)


def make_batch(entries: Seq[Entry], rows: Seq[RowMap], kv: KVCache, sampling: SampleInputs) -> Batch:
    """The arrays of a step whose pages are reserved. Loops over sequences, never over tokens."""
    seqs = [entry.seq for entry in entries]
    query_starts = np.array([0, *accumulate(entry.tokens for entry in entries)], np.int32)
    starts, counts, table_rows = np.array([(e.start, e.tokens, e.seq.row) for e in entries], np.int32).T
    offsets = starts - query_starts[:-1]
    positions = np.arange(query_starts[-1], dtype=np.int32) + offsets.repeat(counts)
    return Batch(
        token_ids=np.concatenate([seq.tokens(e.start, e.start + e.tokens) for seq, e in zip(seqs, entries)]),
        positions=positions,
        query_starts=query_starts,
        context_lens=starts + counts,
        block_tables=kv.block_tables(table_rows, max(seq.blocks for seq in seqs)),
        slot_mapping=kv.slots(table_rows.repeat(counts), positions),
        sample_rows=_sample_rows(rows, offsets.tolist(), query_starts.tolist()),
        sampling=sampling,
    )


def _sample_rows(rows: Seq[RowMap], offsets: list[int], query_starts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    found: list[int] = []
    for row, offset, end in zip(rows, offsets, query_starts[1:]):
        found.extend(range(row.start - offset, row.start - offset + row.scores))
        if row.sample:
            found.append(end - 1)
    return np.array(found, np.int32)
