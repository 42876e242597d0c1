"""StepPlan -> Batch: the integer arrays that cross to the backend."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from trivium.kv import KVCache
from trivium.ops import Batch, SampleInputs
from trivium.sched.scheduler import Entry


class RowMap(NamedTuple):
    """Which logits one entry wants: `scores` rows from position `start` on give logprobs of the next prompt token; `sample`
    tokens are drawn behind the last known one and behind every draft. The hidden states of its last `pooled` rows are wanted."""

    start: int
    scores: int
    sample: int
    pooled: int = 0


def sampled_rows(entry: Entry) -> RowMap:
    """The rows an entry wants, in ascending order of position: first those to score, then those to sample."""
    seq, end = entry.seq, entry.start + entry.tokens
    first = max(entry.start, seq.scored)
    draws = 1 + len(entry.draft) if end == seq.length < seq.limit else 0
    return RowMap(first, max(min(end, seq.score_end) - first, 0), draws, max(end - max(entry.start, seq.pooled), 0))


def make_batch(entries: Seq[Entry], rows: Seq[RowMap], kv: KVCache, sampling: SampleInputs) -> Batch:
    """The arrays of a step whose pages are reserved. Loops over sequences, never over tokens, and makes each array once from a
    list: numpy's own operations on a handful of numbers would cost more than they do."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    pool_rows: list[int] = []
    query_starts, spans = [0], list[tuple[int, int, int]]()
    for (seq, start, count, _, draft, _), (first, scores, sample, pooled) in zip(entries, rows):
        known, offset = start + count, len(tokens) - start
        tokens.extend(seq.tokens(start, known))
        tokens.extend(draft)
        end = known + len(draft)
        positions.extend(range(start, end))
        wanted.extend(range(first + offset, first + offset + scores))
        wanted.extend(range(known + offset - 1, known + offset - 1 + sample))
        pool_rows.extend(range(known + offset - pooled, known + offset))
        query_starts.append(end + offset)
        spans.append((seq.row, start, end))
    return Batch(
        token_ids=np.array(tokens, np.int32), positions=np.array(positions, np.int32),
        query_starts=np.array(query_starts, np.int32), context_lens=np.array([end for _, _, end in spans], np.int32),
        block_tables=kv.block_tables([row for row, _, _ in spans], max(entry.seq.blocks for entry in entries)),
        slot_mapping=kv.slots(spans), sample_rows=np.array(wanted, np.int32), sampling=sampling,
        pool_rows=np.array(pool_rows, np.int32),
    )  # fmt: skip
