"""Recurrent states at page edges: what is found again is the state of exactly those tokens, against brute force."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_model import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from trivium.errors import CapacityError
from trivium.kv import KVCache, Stream, root_key

PAGE = 4
ROOT = root_key("model")
KINDS: list[tuple[Any, ...]] = [(None, "recurrent"), ("recurrent",), ("recurrent", 6, None, "recurrent"), (5, "recurrent")]
tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=40)


class Device:
    """By page and offset, the tokens that were seen when it was written: what a device would hold."""

    def __init__(self, windows: tuple[Any, ...], pages: int = 400, seqs: int = 12) -> None:
        self.kv = KVCache(spec_of(windows, PAGE), pages, seqs)
        self.windows = windows
        self.cells: dict[tuple[int, int], list[int]] = {}

    def grow(self, stream: Stream, tokens: int) -> None:
        for copy in self.kv.grow(stream, tokens):
            self.cells |= {(copy.dst, i): self.cells[copy.src, i] for i in range(PAGE) if (copy.src, i) in self.cells}

    def run(self, stream: Stream, known: list[int]) -> None:
        """Writes positions computed .. len(known) and reads all that they see."""
        start, row = stream.computed, stream.row
        for g, window in enumerate(self.windows):
            if window == "recurrent":
                page = self.kv.slots([(row, start, start + 1)])[g].item() // PAGE
                assert start == 0 or self.cells[page, 0] == known[:start], "another's state"
                self.cells[page, 0] = list(known)
                continue
            for position, slot in zip(range(start, len(known)), self.kv.slots([(row, start, len(known))])[g].tolist()):
                self.cells[slot // PAGE, slot % PAGE] = known[: position + 1]
            first = 0 if window is None else max(0, start - window + 1)
            for position, slot in zip(range(first, len(known)), self.kv.slots([(row, first, len(known))])[g].tolist()):
                assert self.cells[slot // PAGE, slot % PAGE] == known[: position + 1], "another's tokens"

    def compute(self, stream: Stream, tokens: int) -> None:
        self.grow(stream, tokens)
        self.run(stream, stream.tokens(0, tokens).tolist())
        self.kv.advance(stream, tokens - stream.computed)

    def prefill(self, stream: Stream, budget: int) -> None:
        """All known tokens, in chunks as the scheduler makes them."""
        hit = self.kv.match(stream, stream.length - 1)
        if hit.blocks:
            self.kv.adopt(stream, hit)
        while stream.pending:
            self.compute(stream, stream.computed + self.kv.chunk(stream, stream.computed, min(budget, stream.pending)))


@given(st.sampled_from(KINDS), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_lives_read_their_own_states_whatever_they_find_fork_and_draft(windows: tuple[Any, ...], seed: int) -> None:
    rng, device = random.Random(seed), Device(windows)
    kv, streams, stem = device.kv, list[Stream](), [rng.randrange(3) for _ in range(24)]
    for _ in range(50):
        what = rng.random()
        if not streams or (what < 0.2 and len(streams) < 5):
            stream = Stream(stem[: rng.randrange(25)] + [rng.randrange(3) for _ in range(rng.randrange(1, 5))], ROOT)
            device.prefill(stream, rng.randrange(1, 16))
            streams.append(stream)
        elif what < 0.35:
            kv.release(streams.pop(rng.randrange(len(streams))))
        elif what < 0.45 and len(streams) < 5:
            parent = rng.choice(streams)
            child = Stream(parent.tokens(), ROOT)
            kv.fork(parent, child)
            streams.append(child)
        elif what < 0.65:
            draft(device, rng.choice(streams), rng)
        else:
            stream = rng.choice(streams)
            stream.append(rng.randrange(3))
            device.compute(stream, stream.length)
        kv.check(streams)
    for stream in streams:
        kv.release(stream)
    kv.check_idle()


def draft(device: Device, stream: Stream, rng: random.Random) -> None:
    """One step with guesses behind the last token, the first few of which come true; then what is to be computed again."""
    stream.append(rng.randrange(3))
    guesses = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    right, start = rng.randrange(len(guesses) + 1), stream.computed
    device.grow(stream, stream.length + len(guesses))
    device.run(stream, stream.tokens().tolist() + guesses)
    for token in guesses[:right]:
        stream.append(token)
    if right == len(guesses):
        device.kv.advance(stream, stream.length - start)
    else:
        device.kv.take_back(stream, stream.length - start)
        assert stream.computed == start
        device.compute(stream, stream.length)


@given(st.sampled_from(KINDS), st.lists(tokens_of, min_size=1, max_size=5), tokens_of, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_hit_is_the_longest_prefix_that_all_groups_have(
    windows: tuple[Any, ...], earlier: list[list[int]], prompt: list[int], seed: int
) -> None:
    """Some pages are evicted at random; a hit of k pages needs those that position k * PAGE reads, and the states behind page k."""
    rng, device = random.Random(seed), Device(windows)
    for tokens in earlier:
        stream = Stream(tokens, ROOT)
        device.prefill(stream, rng.randrange(1, 16))
        device.kv.release(stream)
    kept = {key: page for key, page in device.kv.pool._pages.items() if rng.random() < 0.9}
    device.kv.pool._pages = kept
    stream = Stream(prompt, ROOT)

    def usable(k: int) -> bool:
        firsts = [0 if w is None else k - 1 if w == "recurrent" else max(0, k * PAGE - w + 1) // PAGE for w in windows]
        return all((device.kv._key(stream, b), g) in kept for g, first in enumerate(firsts) for b in range(max(first, 0), k))

    hit = device.kv.match(stream, len(prompt) - 1)
    assert hit.blocks == max(k for k in range((len(prompt) - 1) // PAGE + 1) if usable(k))


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("length", [4, 5, 8, 9, 31])
@pytest.mark.parametrize("budget", [3, 4, 64])
def test_the_same_prompt_is_found_up_to_its_last_page(windows: tuple[Any, ...], length: int, budget: int) -> None:
    device, prompt = Device(windows), [7 * i % 11 for i in range(length)]
    first, second = Stream(prompt, ROOT), Stream(prompt, ROOT)
    device.prefill(first, budget)
    device.prefill(second, budget)
    assert device.kv.match(Stream(prompt, ROOT), length - 1).tokens == (length - 1) // PAGE * PAGE
    device.kv.check([first, second])


@pytest.mark.parametrize("windows", [KINDS[0], KINDS[2]])
def test_where_prompts_part_the_second_one_leaves_a_state_for_the_third(windows: tuple[Any, ...]) -> None:
    device, stem = Device(windows), list(range(18))
    found = []
    for tail in (50, 60, 70):
        stream = Stream(stem + [tail] * 9, ROOT)
        found.append(device.kv.match(stream, stream.length - 1).tokens)
        device.prefill(stream, 64)
        device.kv.release(stream)
    assert found == [0, 0, 16]


def test_what_is_decoded_leaves_its_last_state_and_the_prompt_s() -> None:
    device, prompt = Device((None, "recurrent")), list(range(10))
    stream = Stream(prompt, ROOT)
    device.prefill(stream, 64)
    for token in range(50, 73):
        stream.append(token)
        device.compute(stream, stream.length)
    device.kv.check([stream])
    states = [key for key in device.kv.pool._pages if key[1] == 1]
    assert sorted(stream.keys.index(key) for key, _ in states) == [1, 7]  # behind token 8, of the prompt, and 32, the last edge
    again = Stream(stream.tokens().tolist() + [80], ROOT)
    assert device.kv.match(again, again.length - 1).tokens == 32


@pytest.mark.parametrize("windows", KINDS)
@given(length=st.integers(1, 40), budget=st.integers(1, 16), drafts=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_sequence_never_holds_more_than_was_foreseen(windows: tuple[Any, ...], length: int, budget: int, drafts: bool) -> None:
    device = Device(windows, KVCache(spec_of(windows, PAGE), 1, 1).peak_pages(length), 1)
    prompt = [3 * i % 7 for i in range(max(length // 2, 1))]
    stream = Stream(prompt, ROOT)
    if budget <= PAGE:  # else pages of a window are still held when the next chunk comes
        device.prefill(stream, budget)
        while stream.length < length:
            stream.append(1)
            device.compute(stream, stream.length)
        assert len(device.kv.held(stream)) <= device.kv.pool.pages
        device.kv.check([stream])


def test_too_few_pages_for_a_state_change_nothing_but_what_was_kept() -> None:
    device = Device((None, "recurrent"), 4, 2)
    stream = Stream(list(range(9)), ROOT)
    device.compute(stream, 4)
    other = Stream([50, 51], ROOT)
    device.compute(other, 2)
    with pytest.raises(CapacityError):
        device.kv.grow(stream, 5)
    device.kv.check([stream, other])
    device.kv.release(other)
    device.compute(stream, 5)
    device.kv.check([stream])


def test_a_private_cache_forgets_states_with_their_stream_and_cuts_no_chunk() -> None:
    device = Device((None, "recurrent"))
    device.kv.private = True
    stream = Stream(list(range(11)), ROOT)
    assert device.kv.chunk(stream, 0, 11) == 11
    device.compute(stream, 8)
    device.compute(stream, 11)
    device.kv.release(stream)  # preempted: it finds them again
    assert device.kv.match(stream, 10).tokens == 8
    device.kv.adopt(stream, device.kv.match(stream, 10))
    device.compute(stream, 11)
    device.kv.release(stream, ended=True)
    assert not device.kv.pool._pages
