"""DRY ("don't repeat yourself", first in text-generation-webui): a penalty on tokens that would prolong a repetition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from trivium.ops.batch import F32, I32
from trivium.sampling.params import SamplingParams

_MOST = 1e30
"""The largest penalty; a float32 logit stays finite under it."""


def breaker_ids(
    breakers: Iterable[str], encode: Callable[[str], Sequence[int]], spelled: Callable[[bytes], Iterable[int]]
) -> frozenset[tuple[int, ...]]:
    """Token sequences behind which no repetition goes on: each token that contains a breaker (`spelled` finds them), else the
    breaker's own tokens."""
    found: set[tuple[int, ...]] = set()
    for breaker in breakers:
        found |= {(i,) for i in spelled(breaker.encode())} or {tuple(encode(breaker))}
    return frozenset(found - {()})


class Dry:
    """The repetitions at the end of a sequence; O(n) in a few numpy operations a token. The arrays are replaced, not written to.

    _lengths[j], int32[n]: how many tokens before position j equal the last ones of the sequence, back to the last breaker at most.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], breakers: frozenset[tuple[int, ...]]) -> None:
        self._multiplier, self._base = params.dry_multiplier, params.dry_base
        self._allowed = params.dry_allowed_length
        self._breakers = breakers
        self._widths = sorted({len(breaker) for breaker in breakers})
        tokens = list(prompt_ids)
        since = next((k for k in range(len(tokens)) if self._breaks(tokens, len(tokens) - k)), len(tokens))
        self._tokens: I32 = np.array(tokens, np.int32)
        self._lengths: I32 = np.minimum(np.array(_repeats(tokens), np.int32), since)

    def copy(self) -> Dry:
        """An independent twin."""
        return copy.copy(self)

    def append(self, token: int) -> None:
        """Takes note of the next token of the sequence."""
        longer = (self._lengths + 1) * (self._tokens == token)
        self._tokens = np.append(self._tokens, np.int32(token))
        self._lengths = np.append(np.int32(0), longer).astype(np.int32)
        if self._breaks(self._tokens, len(self._tokens)):
            self._lengths = np.zeros_like(self._lengths)

    def penalties(self) -> tuple[I32, F32]:
        """Ids and what is added to their logits: for the longest repetition, of n >= dry_allowed_length tokens, that an id would
        prolong, -dry_multiplier * dry_base ** (n - dry_allowed_length)."""
        at = np.flatnonzero(self._lengths >= self._allowed)
        ids, which = np.unique(self._tokens[at], return_inverse=True)
        longest = np.zeros(len(ids), np.int32)
        np.maximum.at(longest, which, self._lengths[at])
        with np.errstate(over="ignore"):
            penalty = self._multiplier * np.float64(self._base) ** (longest - self._allowed)
        return ids, -np.minimum(penalty, _MOST).astype(np.float32)

    def _breaks(self, tokens: Sequence[int] | I32, end: int) -> bool:
        """Whether tokens[:end] end in a breaker."""
        return any(tuple(int(t) for t in tokens[max(end - width, 0) : end]) in self._breakers for width in self._widths)


def _repeats(tokens: Sequence[int]) -> list[int]:
    """For each position, how many tokens before it equal the last ones: the Z function (Gusfield, "Algorithms on strings, trees,
    and sequences", 1997) of the reversed sequence; linear."""
    back = tokens[::-1]
    z, left, right = [0] * len(back), 0, 0
    for i in range(1, len(back)):
        k = min(right - i, z[i - left]) if i < right else 0
        while i + k < len(back) and back[k] == back[i + k]:
            k += 1
        z[i] = k
        if i + k > right:
            left, right = i, i + k
    return [0, *z[:0:-1]]
