"""Block tables, prefix hits and windows against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.errors import CapacityError
from trivium.kv import KVCache, Stream, root_key

PAGE = 4
ROOT = root_key("model")
tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def fill(kv: KVCache, stream: Stream, chunk: int = 3) -> None:
    """Computes all known tokens, a chunk at a time."""
    while stream.pending:
        count = min(chunk, stream.pending)
        kv.grow(stream, stream.computed + count)
        kv.advance(stream, count)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(st.lists(tokens_of, min_size=1, max_size=6), tokens_of)
@settings(max_examples=60, deadline=None)
def test_a_hit_is_the_longest_page_aligned_prefix_that_was_computed(earlier: list[list[int]], prompt: list[int]) -> None:
    kv = KVCache(spec_of((None, None), PAGE), 400, 8)
    for tokens in earlier:
        stream = Stream(tokens, ROOT)
        fill(kv, stream)
        kv.release(stream)
    hit = kv.match(Stream(prompt, ROOT), len(prompt) - 1)
    longest = max(common_prefix(prompt, tokens) for tokens in earlier)
    assert hit.blocks == min(longest, len(prompt) - 1) // PAGE
    assert [len(pages) for pages in hit.pages] == [hit.blocks] * 2


@given(st.lists(tokens_of, min_size=1, max_size=6), tokens_of, st.integers(1, 14), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_a_window_needs_only_its_own_pages(earlier: list[list[int]], prompt: list[int], window: int, seed: int) -> None:
    """Some pages are evicted at random; a hit of k pages needs every full page and those that position k * PAGE reads."""
    kv = KVCache(spec_of((None, window), PAGE), 400, 8)
    for tokens in earlier:
        stream = Stream(tokens, ROOT)
        fill(kv, stream)
        kv.release(stream)
    stream, rng = Stream(prompt, ROOT), np.random.default_rng(seed)
    kept = {(key, g): page for (key, g), page in kv.pool._pages.items() if rng.random() < 0.9}
    kv.pool._pages = kept
    hit = kv.match(stream, len(prompt) - 1)

    def usable(k: int) -> bool:
        first = max(0, k * PAGE - window + 1) // PAGE
        wanted = [(b, 0) for b in range(k)] + [(b, 1) for b in range(first, k)]
        return all((kv._key(stream, b), g) in kept for b, g in wanted)

    assert hit.blocks == max(k for k in range((len(prompt) - 1) // PAGE + 1) if usable(k))


@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_pages_of_a_window_are_freed_as_they_fall_out_and_no_sooner(window: int, length: int, chunk: int) -> None:
    kv = KVCache(spec_of((None, window), PAGE), 100, 2)
    stream = Stream(list(range(length)), ROOT)
    while stream.pending:
        count = min(chunk, stream.pending)
        kv.grow(stream, stream.computed + count)
        table = kv.block_tables([stream.row], stream.blocks)
        first_read = max(0, stream.computed - window + 1) // PAGE
        assert (table[1, 0, first_read:] >= 0).all() and (table[0, 0] >= 0).all()
        kv.advance(stream, count)
        held = int((kv.block_tables([stream.row], stream.blocks)[1, 0] >= 0).sum())
        assert held <= -(-(window - 1) // PAGE) + 1
        kv.check([stream])
    assert len(kv.held(stream)) <= kv.peak_pages(length)
    kv.release(stream)
    kv.check_idle()


@pytest.mark.parametrize("other", [("other",), ("model", "adapter"), ("model", "", "tenant"), ("mode", "l")])
def test_other_models_adapters_and_tenants_share_nothing(other: tuple[str, ...]) -> None:
    kv = KVCache(spec_of((None,), PAGE), 20, 4)
    tokens = list(range(12))
    fill(kv, Stream(tokens, ROOT))
    assert kv.match(Stream(tokens, root_key(*other)), 11).blocks == 0
    assert kv.match(Stream(tokens, ROOT), 11).blocks == 2


def test_equal_tokens_at_another_place_are_no_hit() -> None:
    kv = KVCache(spec_of((None,), PAGE), 20, 4)
    fill(kv, Stream([1, 2, 3, 4, 5, 6, 7, 8], ROOT))
    assert kv.match(Stream([5, 6, 7, 8, 1, 2, 3, 4, 9], ROOT), 8).blocks == 0


def test_a_shared_page_is_owned_by_both_and_outlives_the_first() -> None:
    kv = KVCache(spec_of((None,), PAGE), 20, 4)
    first, second = Stream(list(range(10)), ROOT), Stream([*range(10), 99], ROOT)
    fill(kv, first)
    kv.adopt(second, kv.match(second, 10))
    assert second.computed == 8 and kv.held(second) == kv.held(first)[:2]
    fill(kv, second)
    kv.release(first)
    kv.check([second])
    assert len(kv.held(second)) == 3


def test_an_evicted_prefix_loses_its_end_first() -> None:
    kv = KVCache(spec_of((None, None), PAGE), 8, 4)
    old = Stream(list(range(16)), ROOT)
    fill(kv, old)
    kv.release(old)
    fill(kv, Stream([50] * 8, ROOT))
    assert kv.match(Stream([*range(16), 0], ROOT), 16).blocks == 2


def test_too_few_pages_change_nothing() -> None:
    kv = KVCache(spec_of((None,), PAGE), 3, 2)
    stream = Stream(list(range(20)), ROOT)
    kv.grow(stream, 8)
    with pytest.raises(CapacityError, match="2 pages were asked for, 1 of 3"):
        kv.grow(stream, 16)
    kv.check([stream])
    assert stream.blocks == 2


def test_tables_widen_and_streams_grow() -> None:
    kv = KVCache(spec_of((None,), PAGE), 300, 2)
    stream = Stream([1], ROOT)
    for i in range(999):
        fill(kv, stream)
        stream.append(i)
    assert stream.tokens(1).tolist() == list(range(999))
    assert len(set(kv.held(stream))) == 250
