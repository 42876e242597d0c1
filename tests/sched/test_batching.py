"""A Batch, number by number."""

from __future__ import annotations

import numpy as np
from fake_model import spec_of
from trivium.kv import KVCache, root_key
from trivium.ops.sample import plain_inputs
from trivium.sched import Entry, RowMap, Sequence, make_batch, sampled_rows

PAGE = 4


def entry(kv: KVCache, tokens: list[int], start: int, count: int, index: int, *, scored: bool = False) -> Entry:
    """A sequence of which `start` tokens are computed, with room for `count` more."""
    seq = Sequence(tokens, root_key(str(index)), (0, index, 0), score_end=len(tokens) - 1 if scored else 0)
    kv.grow(seq, start)
    kv.advance(seq, start)
    seq.scored = min(start, seq.score_end)
    kv.grow(seq, start + count)
    return Entry(seq, start, count)


def test_arrays_of_a_decode_a_chunk_and_an_end_of_a_prompt() -> None:
    kv = KVCache(spec_of((None, 5, "recurrent"), PAGE), 60, 4)
    entries = [entry(kv, list(range(10, 20)), 9, 1, 0), entry(kv, list(range(30, 50)), 2, 7, 1), entry(kv, [60, 61, 62], 0, 3, 2)]
    rows = [sampled_rows(e) for e in entries]
    assert rows == [RowMap(9, 0, True), RowMap(2, 0, False), RowMap(0, 0, True)]
    batch = make_batch(entries, rows, kv, plain_inputs(2))
    assert batch.token_ids.tolist() == [19, 32, 33, 34, 35, 36, 37, 38, 60, 61, 62]
    assert batch.positions.tolist() == [9, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert batch.query_starts.tolist() == [0, 1, 8, 11]
    assert batch.context_lens.tolist() == [10, 9, 3]
    assert batch.sample_rows.tolist() == [0, 10]
    assert batch.block_tables.shape == (3, 3, 3)
    in_use = batch.block_tables >= 0
    assert in_use[0].tolist() == [[True] * 3, [True] * 3, [True, False, False]]
    assert in_use[1].tolist() == [[False, True, True], [True] * 3, [True, False, False]]
    assert in_use[2].tolist() == [[True, False, False]] * 3
    pages = batch.block_tables[in_use].tolist()
    assert len(set(pages)) == len(pages), "no page in two places"
    for g in (0, 1):
        owner = np.repeat(np.arange(3), np.diff(batch.query_starts))
        expected = batch.block_tables[g, owner, batch.positions // PAGE] * PAGE + batch.positions % PAGE
        assert batch.slot_mapping[g].tolist() == expected.tolist()
    assert batch.slot_mapping[2].tolist() == (np.repeat(batch.block_tables[2, :, 0], [1, 7, 3]) * PAGE).tolist()
    arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables, batch.sample_rows)
    assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)
    assert batch.slot_mapping.dtype == np.int64


def test_rows_of_a_scored_prompt_go_on_where_they_stopped() -> None:
    kv = KVCache(spec_of((None,), PAGE), 60, 4)
    first = entry(kv, list(range(10)), 0, 4, 0, scored=True)
    last = entry(kv, list(range(10)), 6, 4, 1, scored=True)
    rows = [sampled_rows(first), sampled_rows(last)]
    assert rows == [RowMap(0, 4, False), RowMap(6, 3, True)]
    assert make_batch([first, last], rows, kv, plain_inputs(8)).sample_rows.tolist() == list(range(8))
    again = last._replace(start=0, tokens=10)
    last.seq.scored = 9
    assert sampled_rows(again) == RowMap(9, 0, True)


def test_a_step_that_ends_no_prompt_wants_no_row() -> None:
    kv = KVCache(spec_of((None,), PAGE), 60, 4)
    chunk = entry(kv, list(range(10)), 0, 4, 0)
    batch = make_batch([chunk], [sampled_rows(chunk)], kv, plain_inputs(0))
    assert batch.sample_rows.shape == (0,) and batch.sample_rows.dtype == np.int32
