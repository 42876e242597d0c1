"""Copy-on-write: forked streams share every page until one of them writes, and nobody sees another's tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_model import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.errors import CapacityError
from trivium.kv import Copy, KVCache, Ledger, Stream, root_key

PAGE = 4
ROOT = root_key("model")
KINDS: list[tuple[Any, ...]] = [(None,), (None, 6), (1, 9), (None, "recurrent"), ("recurrent",)]


class Pages:
    """What the pages hold, as a device would have it: by page and offset, the tokens up to there."""

    def __init__(self, windows: tuple[Any, ...], pages: int, seqs: int) -> None:
        self.kv = KVCache(spec_of(windows, PAGE), pages, seqs)
        self.windows = windows
        self.cells: dict[tuple[int, int], list[int]] = {}

    def compute(self, stream: Stream, tokens: int) -> list[Copy]:
        """Writes tokens up to `tokens` and reads all that they see."""
        copies = self.kv.grow(stream, tokens)
        for copy in copies:
            for offset in range(PAGE):
                self.cells[copy.dst, offset] = self.cells.get((copy.src, offset), [])
        known = stream.tokens(0, tokens).tolist()
        for g, window in enumerate(self.windows):
            recurrent = window == "recurrent"
            slots = self.kv.slots([(stream.row, stream.computed, tokens)])[g].tolist()
            if recurrent and stream.computed:
                assert self.cells[slots[0] // PAGE, 0] == known[: stream.computed], "another's state"
            for position, slot in zip(range(stream.computed, tokens), slots):
                self.cells[slot // PAGE, slot % PAGE] = known[: position + 1]
            if not recurrent:
                first = 0 if window is None else max(0, stream.computed - window + 1)
                for position, slot in zip(range(first, tokens), self.kv.slots([(stream.row, first, tokens)])[g].tolist()):
                    assert self.cells[slot // PAGE, slot % PAGE] == known[: position + 1], "another's tokens"
        self.kv.advance(stream, tokens - stream.computed)
        return copies


def fork(kv: KVCache, parent: Stream, root: bytes = ROOT) -> Stream:
    child = Stream(parent.tokens(), root)
    kv.fork(parent, child)
    return child


@given(st.sampled_from(KINDS), st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_any_family_of_forks_reads_its_own_tokens(windows: tuple[Any, ...], seed: int) -> None:
    rng, pages = random.Random(seed), Pages(windows, 300, 12)
    streams = [Stream([rng.randrange(3) for _ in range(rng.randrange(1, 20))], ROOT)]
    for _ in range(60):
        stream = rng.choice(streams)
        if rng.random() < 0.25 and stream.computed and len(streams) < 12:
            streams.append(fork(pages.kv, stream))
        elif rng.random() < 0.1 and len(streams) > 1:
            pages.kv.release(stream)
            streams.remove(stream)
        else:
            if not stream.pending:
                stream.append(rng.randrange(3))
            blocks, held, had = stream.blocks, stream.row >= 0, list(pages.kv.held(stream))
            if held and "recurrent" not in windows and rng.random() < 0.3:
                pages.kv.shrink(stream, blocks, pages.kv.grow(stream, stream.length))
                assert pages.kv.held(stream) == had, "a step that is undone leaves a mark"
                pages.kv.check(streams)
            pages.compute(stream, rng.randrange(stream.computed, stream.length) + 1)
        pages.kv.check(streams)
    for stream in streams:
        pages.kv.release(stream)
    pages.kv.check_idle()


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("length", [1, 7, 8, 23])
def test_the_last_owner_writes_in_place_and_all_others_copy_what_is_written(windows: tuple[Any, ...], length: int) -> None:
    pages = Pages(windows, 100, 8)
    parent = Stream(list(range(length)), ROOT)
    pages.compute(parent, length)
    family = [parent, *(fork(pages.kv, parent) for _ in range(4))]
    before = pages.kv.pool.available
    copies = 0
    for i, stream in enumerate(family):
        stream.append(50 + i)
        copies += len(pages.compute(stream, length + 1))
    partial = sum(w == "recurrent" or length % PAGE > 0 for w in windows)
    kept = sum(w == "recurrent" and length % PAGE == 0 for w in windows)  # where others may find it nobody writes in place
    assert copies == 4 * partial + kept
    fresh = 0 if length % PAGE else 5 * sum(w != "recurrent" for w in windows)
    if (length + 1) % PAGE:  # else pages fall out of the window too
        assert before - pages.kv.pool.available == copies + fresh
    pages.kv.check(family)


@given(st.sampled_from(KINDS), st.integers(1, 23), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_ledger_foresees_what_growing_a_family_takes(windows: tuple[Any, ...], length: int, forks: int, dropped: int) -> None:
    pages = Pages(windows, 200, 8)
    parent = Stream(list(range(length)), ROOT)
    pages.compute(parent, length)
    family = [parent, *(fork(pages.kv, parent) for _ in range(forks))]
    for stream in family:
        stream.append(9)
    ledger, gone = Ledger(pages.kv.pool), family[len(family) - min(dropped, forks) :]
    for stream in gone:
        ledger.drop(pages.kv.held(stream))
    for stream in family[: len(family) - len(gone)]:
        ledger.split(pages.kv.written(stream))
        ledger.free -= pages.kv.pages_to_grow(stream, length + 1, stream.blocks)
        ledger.free -= sum(w == "recurrent" for w in windows) if pages.kv.keeps(stream, length + 1) else 0
    for stream in gone:
        pages.kv.release(stream)
    for stream in family[: len(family) - len(gone)]:
        pages.kv.grow(stream, length + 1)
    assert ledger.free == pages.kv.pool.available


@pytest.mark.parametrize("windows", [(None, 9), (5, 1), (None, 6, "recurrent")])
@pytest.mark.parametrize("forks", [1, 4])
def test_pages_of_a_family_are_those_that_brute_force_counts(windows: tuple[Any, ...], forks: int) -> None:
    """Every (group, block) that some stream still reads is held once for each different content, and nothing else is."""
    pages, rng = Pages(windows, 400, 8), random.Random(forks)
    parent = Stream(list(range(10)), ROOT)
    pages.compute(parent, 10)
    family = [parent, *(fork(pages.kv, parent) for _ in range(forks))]
    for _ in range(30):
        for stream in family:
            stream.append(rng.randrange(90))
            pages.compute(stream, stream.length)
        wanted = set()
        for stream in family:
            end = stream.computed
            for g, window in enumerate(windows):
                full = end // PAGE
                first = 0 if window is None or window == "recurrent" else max(0, full * PAGE - window + 1) // PAGE
                blocks = [0] if window == "recurrent" else range(first, -(-end // PAGE))
                for block in blocks:
                    stop = end if window == "recurrent" else min(end, (block + 1) * PAGE)
                    shared = stop <= 8 and window != "recurrent"  # the two full pages of the time before the fork
                    wanted.add((g, block, None if shared else id(stream)))
                if window == "recurrent" and end > 12 and end % PAGE:
                    wanted.add((g, "kept", id(stream)))  # the state at the last edge before what is computed
        assert pages.kv.pool.pages - pages.kv.pool.available == len(wanted)


def test_too_few_pages_for_a_copy_change_nothing() -> None:
    pages = Pages((None,), 2, 4)
    parent = Stream([1, 2, 3, 4, 5], ROOT)
    pages.compute(parent, 5)
    child = fork(pages.kv, parent)
    child.append(6)
    with pytest.raises(CapacityError):
        pages.kv.grow(child, 6)
    pages.kv.check([parent, child])
    assert pages.kv.held(child) == pages.kv.held(parent)


def test_a_page_that_will_be_written_must_have_one_owner() -> None:
    pages = Pages((None,), 9, 4)
    parent = Stream([1, 2, 3, 4, 5], ROOT)
    pages.compute(parent, 5)
    child = fork(pages.kv, parent)
    child.forked = False
    with pytest.raises(AssertionError, match="two owners"):
        pages.kv.check([parent, child])
