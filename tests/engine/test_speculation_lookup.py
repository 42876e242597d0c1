"""Lookup drafters against brute force over all earlier places."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from trivium.engine.speculation import drafter as module
from trivium.engine.speculation.drafter import Ask, NgramDrafter, SuffixDrafter
from trivium.sampling import SamplerState, SamplingParams
from trivium.sched import Sequence

STATE = SamplerState(SamplingParams(), [1], (), 8, 0)
streams = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ask(drafter, seq, limit):
    return list(drafter.propose([Ask(seq, limit, STATE)])[0])


def agreement(tokens, end, suffix):
    """Tokens before `end` that equal the last ones of suffix."""
    count = 0
    while count < min(end, len(suffix)) and tokens[end - 1 - count] == suffix[-1 - count]:
        count += 1
    return count


def places(tokens, suffix, shortest, *, own):
    """(agreement, end) of the latest MAX_TRIES earlier places, latest first."""
    ends = [e for e in range(len(tokens) - own, 0, -1) if agreement(tokens, e, suffix) >= shortest]
    return [(agreement(tokens, e, suffix), e) for e in ends[: module.MAX_TRIES - own]]


def looped(tokens, end, count):
    tail = tokens[end:]
    return [tail[i % len(tail)] for i in range(count)] if tail else []


@given(streams, st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), st.lists(st.integers(0, 40)))
def test_ngram_copies_what_followed_the_longest_then_latest_match(tokens, shortest, more, limit, cuts):
    longest = shortest + more
    drafter = NgramDrafter(shortest, longest)
    for end in sorted({c for c in cuts if 0 < c < len(tokens)} | {len(tokens)}):  # the index grows with the sequence
        drafts = [ask(drafter, seq, limit) for seq in [seq_of(drafter, tokens, end)]]
        found = places(tokens[:end], tokens[:end][-longest:], shortest, own=1)
        best = max(found, default=(0, end))
        assert drafts == [looped(tokens[:end], best[1], limit)]


def seq_of(drafter, tokens, end):
    """One growing Sequence a drafter."""
    seq = drafter.__dict__.setdefault("_test_seq", Sequence(tokens[:end], b"r", (0, 0, 0)))
    for token in tokens[seq.length : end]:
        seq.append(token)
    return seq


@given(streams, streams, streams, st.integers(1, 3), st.integers(0, 4), st.integers(1, 6))
def test_suffix_follows_the_majority_here_and_in_finished_sequences(first, stranger, tokens, shortest, more, limit):
    longest = shortest + more
    drafter = SuffixDrafter(shortest, longest)
    drafter.forget(Sequence(first, b"r", (0, 0, 0)))
    drafter.forget(Sequence(stranger, b"another tenant", (0, 1, 0)))
    suffix = tokens[-longest:]
    found = [(n, looped(tokens, e, limit)) for n, e in places(tokens, suffix, shortest, own=1)]
    found += [(n, first[e : e + limit]) for n, e in places(first, suffix, shortest, own=0)]
    ways = [way for n, way in found if n == max(found)[0]] if found else []
    want, alive = [], ways
    while len(want) < limit:
        votes = Counter(way[len(want)] for way in alive if len(way) > len(want))
        if not votes or max(votes.values()) < len(ways) / 4:
            break
        want.append(next(t for t in votes if votes[t] == max(votes.values())))  # of equals the latest, which comes first
        alive = [way for way in alive if way[: len(want)] == want]
    assert ask(drafter, Sequence(tokens, b"r", (0, 2, 0)), limit) == want


def test_what_is_kept_of_finished_sequences_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "SHARED_TOKENS", 40)
    drafter = SuffixDrafter(2, 4)
    for i in range(20):
        drafter.forget(Sequence([i, i + 1, i + 2, i + 3], b"r", (0, i, 0)))
    assert sum(len(index.tokens) for index in drafter._shared) <= 45
    asked = {i: ask(drafter, Sequence([i, i + 1], b"r", (0, 99, i)), 3) for i in (0, 18)}
    assert asked == {0: [], 18: [20, 21]}
    assert ask(drafter, Sequence([18, 19], b"other", (0, 99, 99)), 3) == []
