"""What a drafter is asked and what it must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

from trivium.sampling import SamplerState
from trivium.sched import Sequence


class Ask(NamedTuple):
    """At most `limit` (1 or more) tokens are wanted behind those of `seq`. `sampler`: how the target will draw them; not to be
    changed."""

    seq: Sequence
    limit: int
    sampler: SamplerState


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time and never changes the output."""

    @abstractmethod
    def propose(self, asks: Seq[Ask]) -> Seq[Seq[int]]:
        """Tokens for every ask, in its order; fewer than its limit, or none, where nothing is worth a try. What came of earlier
        guesses is seen in the sequence's tokens. May raise: then this step has no drafts. A sequence that isn't `running` any more
        has lost its pages, and should have none here either."""

    @abstractmethod
    def forget(self, seq: Sequence) -> None:
        """The sequence, which propose() may never have seen, has ended."""
