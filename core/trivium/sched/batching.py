"""StepPlan -> Batch: the integer arrays that cross to the backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from trivium.kv import KVCache
from trivium.ops import Batch, SampleInputs
from trivium.ops.batch import I32
from trivium.sched.scheduler import Entry


class RowMap(NamedTuple):
    """Which logits one entry wants: `scores` rows from position `start` on give logprobs of the next prompt token; `sample`
    tokens are drawn behind the last known one and behind every draft. The hidden states of its last `pooled` rows are wanted."""

    start: int
    scores: int
    sample: int
    pooled: int = 0


def sampled_rows(entry: Entry, watched: bool = False) -> RowMap:
    """The rows an entry wants, in ascending order of position: first those to score, then those to sample. watched: the hidden
    states of all rows are wanted of sequences that want none themselves."""
    seq, end = entry.seq, entry.start + entry.tokens
    first = max(entry.start, seq.scored)
    draws = 1 + len(entry.draft) if end == seq.length < seq.limit else 0
    pooled = entry.start if watched and seq.pooled > seq.length else max(entry.start, seq.pooled)
    return RowMap(first, max(min(end, seq.score_end) - first, 0), draws, max(end + len(entry.draft) - pooled, 0))


def make_batch(entries: Seq[Entry], rows: Seq[RowMap], kv: KVCache, sampling: SampleInputs) -> Batch:
    """The arrays of a step whose pages are reserved. Loops over sequences, and makes one array of all that is int32: numpy's own
    operations on a handful of numbers would cost more than they do."""
    parts: list[list[int]] = [[], [], [0], [], [], []]
    tokens, positions, starts, ends, wanted, pool_rows = parts
    spans: list[tuple[int, int, int]] = []
    blocks = 1
    for (seq, start, count, _, draft, _), (first, scores, sample, pooled) in zip(entries, rows):
        known, offset = start + count, len(tokens) - start
        tokens.extend(seq.tokens(start, known))
        end = known + len(draft)
        tokens.extend(draft)
        positions.extend(range(start, end))
        if scores:
            wanted.extend(range(first + offset, first + offset + scores))
        wanted.extend(range(known + offset - 1, known + offset - 1 + sample))
        if pooled:
            pool_rows.extend(range(end + offset - pooled, end + offset))
        starts.append(end + offset)
        ends.append(end)
        spans.append((seq.row, start, end))
        blocks = max(blocks, seq.blocks)
    numbers = array("i", [number for part in parts for number in part])
    whole: I32 = np.ndarray((len(numbers),), np.int32, numbers)
    made, at = [], 0
    for part in parts:
        made.append(whole[at : at + len(part)])
        at += len(part)
    tables = kv.block_tables([row for row, _, _ in spans], blocks)
    return Batch(made[0], made[1], made[2], made[3], tables, kv.slots(spans), made[4], sampling, made[5])
