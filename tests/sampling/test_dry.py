"""DRY against a brute force that compares every earlier place with the end, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from dry_oracle import brute
from hypothesis import given
from hypothesis import strategies as st

from trivium.sampling import Dry, SamplingParams, breaker_ids

tokens = st.lists(st.integers(0, 4), max_size=60)
breakers = st.frozensets(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=2)


def penalties(dry: Dry) -> dict[int, float]:
    ids, values = dry.penalties()
    assert ids.dtype == np.int32 and values.dtype == np.float32 and ids.tolist() == sorted(set(ids.tolist()))
    return dict(zip(ids.tolist(), values.tolist()))


@given(tokens, tokens, breakers, st.integers(1, 4), st.sampled_from([1.0, 1.75, 3.0]))
def test_penalties_equal_brute_force_however_the_tokens_came(prompt, output, breakers, allowed, base):
    params = SamplingParams(dry_multiplier=0.5, dry_base=base, dry_allowed_length=allowed)
    dry = Dry(params, prompt, breakers)
    for end in range(len(output) + 1):
        ids = prompt + output[:end]
        want = brute(ids, breakers, 0.5, base, allowed)
        assert penalties(dry) == pytest.approx(want, rel=1e-6)
        assert penalties(Dry(params, ids, breakers)) == penalties(dry)
        if end < len(output):
            twin = dry.copy()
            twin.append(1)
            dry.append(output[end])


def test_a_long_repetition_has_a_finite_penalty():
    dry = Dry(SamplingParams(dry_multiplier=1.0, dry_base=4.0), [7] * 20000, frozenset())
    assert penalties(dry) == {7: pytest.approx(-1e30)}
    dry.append(8)
    assert penalties(dry) == {}


def test_breakers_are_the_tokens_that_contain_them_else_their_own_tokens():
    vocabulary = [b"a", b"\n", b"b\n", b":", b"end", b"x"]
    encode = lambda text: [vocabulary.index(c.encode()) for c in text]
    spelled = lambda part: [i for i, text in enumerate(vocabulary) if part in text]
    assert breaker_ids(["\n"], encode, spelled) == {(1,), (2,)}
    assert breaker_ids([":", "ax"], encode, spelled) == {(3,), (0, 5)}
    assert breaker_ids([], encode, spelled) == frozenset()
