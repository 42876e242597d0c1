"""Which drafter an engine uses, what it is asked and must be able to do; and drafters without a model, which look tokens up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from trivium.errors import InvalidRequestError
from trivium.ops.batch import F32
from trivium.sampling import SamplerState
from trivium.sched import Sequence

METHODS = ("ngram", "suffix", "draft", "mtp")
MAX_TRIES = 16
"""Earlier occurrences that are compared, latest first: bounds the time of a proposal."""
KEPT_TOKENS = 1024
"""The last tokens of a finished sequence, which are kept: bounds the time that its end takes."""
SHARED_TOKENS = 1 << 16
"""Tokens of finished requests after which the older half of what is kept is forgotten."""
MIN_SHARE = 0.25
"""Part of the occurrences that must have gone on as drafted."""
GAP = -1
"""Stands behind each of several sequences in one index; no token."""


@dataclass(frozen=True)
class Speculative:
    """method: "ngram" copies what followed the longest, then latest earlier occurrence of the last tokens; "suffix" takes what
    most often followed them, in finished requests too; "draft" asks a smaller model, "mtp" the target's own head for multi-token
    prediction, if its checkpoint has one. num_speculative_tokens: most tokens drafted
    for a sequence in one step. adaptive: drafts get shorter, or end, where measured times and acceptance say that they lose.
    prompt_lookup_min, prompt_lookup_max: length of the occurrences that are looked for, in tokens. model, backend: the draft
    model, as LLM takes them; it must have the target's vocabulary. A head runs on the target's backend unless another is given."""

    method: str
    num_speculative_tokens: int = 6
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    model: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _refuse("method", f"one of {', '.join(METHODS)}", self.method)
        if type(self.adaptive) is not bool:
            raise _refuse("adaptive", "True or False", self.adaptive)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 64:
                raise _refuse(name, "an integer from 1 to 64", value)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refuse("prompt_lookup_min", f"at most prompt_lookup_max ({self.prompt_lookup_max})", self.prompt_lookup_min)
        if (self.method == "draft") != (self.model is not None):
            raise _refuse("model", 'the name of a draft model for method "draft", and left out for any other', self.model)

    @classmethod
    def of(cls, given: Speculative | Mapping[str, Any] | None) -> Speculative | None:
        """From a mapping of the fields; unknown ones are refused."""
        if given is None or isinstance(given, Speculative):
            return given
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known)) if isinstance(given, Mapping) else [given]
        if unknown or "method" not in given:
            message = f"speculative must be a mapping with a method ({', '.join(METHODS)}) and, if need be, {', '.join(known[1:])}"
            raise InvalidRequestError(f"{message}, not {given!r}", param="speculative")
        return cls(**given)


def _refuse(name: str, wanted: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(f"speculative: {name} must be {wanted}, not {got!r}", param="speculative")


class Ask(NamedTuple):
    """At most `limit` (1 or more) tokens are wanted behind those of `seq`. `sampler`: how the target will draw them; not to be
    changed."""

    seq: Sequence
    limit: int
    sampler: SamplerState


Seen = tuple[Sequence, int, F32]
"""What the target has made of tokens n, n + 1, ... of a sequence: float32[tokens, hidden], what its output projection reads. The
token behind them is known."""


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time and never changes the output."""

    watches = False
    """Whether watch() is to be called."""

    def watch(self, seen: Seq[Seen]) -> None:
        """(optional) Of every sequence in a step of the target, what is right of it. May raise, as propose()."""
        return

    @abstractmethod
    def propose(self, asks: Seq[Ask]) -> Seq[Seq[int]]:
        """Tokens for every ask, in its order; fewer than its limit, or none, where nothing is worth a try. What came of earlier
        guesses is seen in the sequence's tokens. May raise: then this step has no drafts. A sequence that isn't `running` any more
        has lost its pages, and should have none here either."""

    @abstractmethod
    def forget(self, seq: Sequence) -> None:
        """The sequence, which propose() may never have seen, has ended."""


class Index:
    """Where every run of `order` tokens ended before: a chain from each end to the one before it, as in LZ77 matchers. Adding a
    token is one dictionary entry. `root`: runs are found only under the root that they were added with."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.tokens = array("i")
        self._before = array("i", [-1])
        self._last: dict[tuple[object, ...], int] = {}

    def extend(self, tokens: Iterable[int], root: bytes = b"") -> None:
        known, before, last, order = self.tokens, self._before, self._last, self.order
        for token in tokens:
            known.append(token)
            end = len(known)
            key = (root, *known[max(end - order, 0) : end])
            before.append(last.get(key, -1))
            last[key] = end

    def ends(self, suffix: Seq[int], root: bytes = b"") -> Iterator[int]:
        """Ends of runs that equal the last `order` tokens of `suffix`, latest first, MAX_TRIES at most."""
        end = self._last.get((root, *suffix[-self.order :]), -1) if len(suffix) >= self.order else -1
        for _ in range(MAX_TRIES):
            if end < 0:
                return
            yield end
            end = self._before[end]

    def common(self, end: int, suffix: Seq[int]) -> int:
        """Tokens before `end` that equal the last ones of `suffix`, which ends with the run that ends there."""
        count, most = self.order, min(end, len(suffix))
        while count < most and self.tokens[end - 1 - count] == suffix[-1 - count]:
            count += 1
        return count

    def after(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens from `end` on; where the index ends, what began at `end` begins again: it has become a loop."""
        found = self.tokens[end : end + count].tolist()
        if GAP in found:
            return found[: found.index(GAP)]
        return [found[i % len(found)] for i in range(count)] if found else []


def lookup_drafter(config: Speculative) -> Drafter:
    """The drafter of a configuration that needs no model."""
    kinds = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
    if config.method not in kinds:
        message = f"speculative: method {config.method!r} needs a drafter of a loaded draft model; give the engine one"
        raise InvalidRequestError(message, param="speculative")
    return kinds[config.method](config.prompt_lookup_min, config.prompt_lookup_max)


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens, the latest of equally long ones."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._indices = defaultdict[Sequence, Index](lambda: Index(shortest))
        self._shared: list[Index] = []

    def propose(self, asks: Seq[Ask]) -> list[list[int]]:
        return [self._choose(self._ways(ask.seq, ask.limit), ask.limit) for ask in asks]

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq, None)

    def _ways(self, seq: Sequence, limit: int) -> list[list[int]]:
        """What followed the longest earlier occurrences of the last tokens, latest first."""
        own = self._indices[seq]
        own.extend(seq.tokens(len(own.tokens)))
        suffix = own.tokens[-self._longest :]
        found = [(own.common(end, suffix), own, end) for end in own.ends(suffix) if end < seq.length]
        for shared in self._shared:
            found += [(shared.common(end, suffix), shared, end) for end in shared.ends(suffix, seq.root)]
        best = max((length for length, _, _ in found), default=0)
        return [index.after(end, limit) for length, index, end in found if length == best]

    def _choose(self, ways: list[list[int]], limit: int) -> list[int]:
        return ways[0] if ways else []


class SuffixDrafter(NgramDrafter):
    """What most often followed the longest earlier occurrences of the last tokens, in the sequence itself and in finished ones with
    the same root (model, adapter and tenant); of equally frequent tokens the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__(shortest, longest)
        self._shared = [Index(shortest), Index(shortest)]
        """Tokens of finished sequences, newer ones first."""

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        newer = self._shared[0]
        newer.extend([*seq.tokens(max(seq.length - KEPT_TOKENS, 0)), GAP], seq.root)
        if len(newer.tokens) > SHARED_TOKENS // 2:
            self._shared = [Index(newer.order), newer]

    def _choose(self, ways: list[list[int]], limit: int) -> list[int]:
        """Follows the most frequent token, place by place, while enough of `ways`, latest first, go along."""
        draft: list[int] = []
        enough = len(ways) * MIN_SHARE
        while len(draft) < limit:
            votes = Counter(way[len(draft)] for way in ways if len(way) > len(draft))
            token, count = max(votes.items(), key=lambda vote: vote[1], default=(GAP, 0))
            if count <= 0 or count < enough:
                break
            ways = [way for way in ways if len(way) > len(draft) and way[len(draft)] == token]
            draft.append(token)
        return draft
