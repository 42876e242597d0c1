"""What sampling remembers of a running request, and the arrays of one step made of it."""

from __future__ import annotations

import copy
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trivium.errors import InvalidRequestError
from trivium.ops import SampleInputs
from trivium.ops.batch import COLUMNS, I32, U32 as Mask, id_mask
from trivium.ops.sample import derive_seed
from trivium.sampling.dry import Dry
from trivium.sampling.params import SamplingParams

Row = tuple["SamplerState", int, int]
Pairs = tuple[I32, npt.NDArray[Any]]
Processor = Callable[[Sequence[int], Sequence[int]], Pairs | None]
_ROW = np.dtype([(name, kind) for name, kind in COLUMNS.items() if name not in ("position", "score_ids")])


def fresh_seed() -> int:
    """A 64-bit seed from the operating system, for a request that brings none."""
    return int.from_bytes(os.urandom(8), "little")


class _Seen:
    """Distinct ids, ascending, and how often each occurs in the output."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.ids = np.unique(np.fromiter(prompt_ids, np.int32))
        self.counts = np.zeros(len(self.ids), np.int32)

    def add(self, token: int) -> None:
        at = int(np.searchsorted(self.ids, token))
        if at == len(self.ids) or self.ids[at] != token:
            self.ids, self.counts = np.insert(self.ids, at, token), np.insert(self.counts, at, 0)
        self.counts[at] += 1

    def copy(self) -> _Seen:
        twin = copy.copy(self)
        twin.counts = self.counts.copy()
        return twin


class Grammar(Protocol):
    """Which ids the text so far leaves possible (text.Matcher)."""

    @property
    def complete(self) -> bool: ...
    def accept(self, token: int) -> None: ...
    def mask(self) -> Mask: ...
    def masks_ahead(self, drafts: Sequence[int]) -> list[Mask]: ...


class SamplerState:
    """One sample of a request: its parameters ready for the sampler, and what depends on the tokens made so far.

    `index` is the sample's number within n, `bad_words` its forbidden token sequences (see bad_word_ids), `dry` the prompt's
    repetitions, `processors` what gives further biases from prompt and output ids, `grammar` what its text is held to. `mask`,
    uint32[words] or None, allows ids for the next token: those of allowed_token_ids and the grammar. It may be replaced from step
    to step, never written to. Raises InvalidRequestError where no token could ever be sampled.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Iterable[int], vocab_size: int, default_seed: int, *,
        index: int = 0, bad_words: Sequence[Sequence[int]] = (), dry: Dry | None = None, processors: Sequence[Processor] = (),
        grammar: Grammar | None = None,
    ) -> None:  # fmt: skip
        params.validate(vocab_size=vocab_size)
        seed = default_seed if params.seed is None else params.seed
        self.params = params
        self.seed = derive_seed(seed % 2**64, index)
        self.generated = 0
        self.logprobs = _alternatives(0 if params.ranked and params.logprobs is None else params.logprobs, vocab_size)
        self.prompt_logprobs = _alternatives(params.prompt_logprobs, vocab_size)
        self._allowed = None if params.allowed_token_ids is None else id_mask(params.allowed_token_ids, vocab_size)
        self._grammar = grammar
        self.mask = self._allowed if grammar is None else self._narrow(grammar.mask())
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.seen = None if penalties == (1.0, 0.0, 0.0) else _Seen(prompt_ids)
        self._ends = frozenset(i for i in (*eos_ids, *params.stop_token_ids) if i < vocab_size)
        self._vocab_size = vocab_size
        self._bad_words = tuple(tuple(word) for word in bad_words)
        self._tail: deque[int] = deque(maxlen=max((len(word) - 1 for word in self._bad_words), default=0))
        self._dry = dry and dry.copy()
        self._processors = processors
        self._prompt, self._output = prompt_ids, list[int]()
        self._follows = any((self.seen is not None, dry is not None, grammar is not None, bad_words, processors))
        self._fixed_bias = _pairs(params.logit_bias or {})
        self._next_bias: tuple[Pairs | None] | None = None
        plain = {name: getattr(params, name, 0) for name in _ROW.names or ()}
        clean: dict[str, float] = {"top_k": min(max(params.top_k, 0), vocab_size), "seed": self.seed}
        clean |= zip(("repetition", "presence", "frequency"), penalties, strict=True)
        self.packed = np.array([tuple((plain | clean).values())], _ROW).tobytes()
        self.bias()

    def append(self, token: int) -> None:
        """Takes note of a token that was made. InvalidRequestError if the grammar leaves no token behind it."""
        if self.moves:
            self._next_bias = None
        self.generated += 1
        if self._follows:
            self._output.append(token)
            self._tail.append(token)
            if self.seen is not None:
                self.seen.add(token)
            if self._dry is not None:
                self._dry.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)
            if not self._grammar.complete:
                self.mask = self._narrow(self._grammar.mask())
                self.bias()

    @property
    def complete(self) -> bool:
        """The grammar leaves nothing that could follow."""
        return self._grammar is not None and self._grammar.complete

    def ahead(self, drafts: Sequence[int]) -> list[SamplerState]:
        """len(drafts) + 1 states, the j-th as if drafts[:j] had been appended; this one stays as it is. They are rows for
        build_inputs and must not be appended to: where nothing depends on the output they are the same object. The list ends early,
        at a draft that the grammar forbids or that completes it, or at a state without a next token: its error is raised when, and
        only when, those drafts have come true."""
        rows = [self]
        if not drafts:
            return rows
        for token, mask in zip(drafts, repeat(None) if self._grammar is None else self._grammar.masks_ahead(drafts)):
            row = rows[-1]
            if row.moves:
                row = row._copy()
                row.append(token)
                try:
                    row.mask = row.mask if mask is None else row._narrow(mask)
                    row.bias()
                except Exception:
                    break
            rows.append(row)
        return rows

    def bias(self) -> Pairs | None:
        """What is added to the logits of the next token: ids int32, ascending, and float32 values (-inf bans).
        Raises InvalidRequestError if that leaves no token."""
        if self._next_bias is None:
            self._next_bias = (self._make_bias(),)
        return self._next_bias[0]

    @property
    def moves(self) -> bool:
        """Whether the next token may change what is asked for the tokens behind it; once not, never again."""
        return self._follows or self.generated < self.params.min_tokens

    def _copy(self) -> SamplerState:
        twin = copy.copy(self)
        twin.seen, twin._tail, twin._grammar = self.seen and self.seen.copy(), self._tail.copy(), None
        twin._dry, twin._output = self._dry and self._dry.copy(), self._output.copy()
        return twin

    def _narrow(self, mask: Mask) -> Mask:
        """The grammar's mask within allowed_token_ids."""
        narrow = mask if self._allowed is None else mask & self._allowed
        if not narrow.any():
            message = "no token is left: allowed_token_ids has none that the grammar of structured_outputs can go on or end with"
            raise InvalidRequestError(message, param="structured_outputs" if self._allowed is None else "allowed_token_ids")
        return narrow

    def _make_bias(self) -> Pairs | None:
        tail = tuple(self._tail)
        banned = {w[-1] for w in self._bad_words if len(w) == 1 or tail[-len(w) + 1 :] == w[:-1]}
        if self.generated < self.params.min_tokens:
            banned |= self._ends
        parts = [_pairs(dict.fromkeys(banned, -np.inf)), None if self._dry is None else self._dry.penalties()]
        parts += [processor(self._prompt, self._output) for processor in self._processors]
        if all(part is None for part in parts):
            return self._fixed_bias
        bias = _sum([self._fixed_bias, *parts])
        gone = bias[0][bias[1] == -np.inf]
        everything = len(gone) == self._vocab_size
        if everything or (self.mask is not None and not (self.mask & ~id_mask(gone, self._vocab_size)).any()):
            names = ("min_tokens", "bad_words", "logits_processors")
            by = [name for name in names if getattr(self.params, name)] or ["allowed_token_ids"]
            raise InvalidRequestError(f"no token is left: {' and '.join(by)} rule out every token that is allowed", param=by[-1])
        return bias


def _alternatives(asked: int | None, vocab_size: int) -> int:
    """-1: no logprobs at all, else how many alternatives."""
    if asked is None:
        return -1
    return vocab_size if asked < 0 else min(asked, vocab_size)


def _pairs(biases: Mapping[int, float]) -> Pairs | None:
    if not biases:
        return None
    ids = np.array(sorted(biases), np.int32)
    return ids, np.array([biases[i] for i in ids.tolist()], np.float32)


def _sum(parts: Iterable[Pairs | None]) -> Pairs:
    """Ids ascending, each once, and the float32 sum of what the parts say, added in their order."""
    found = [part for part in parts if part is not None]
    ids, which = np.unique(np.concatenate([part[0] for part in found]), return_inverse=True)
    total = np.zeros(len(ids), np.float32)
    np.add.at(total, which, np.concatenate([part[1] for part in found]))
    return ids, total


def _ragged(parts: Sequence[Pairs | None], dtype: type) -> tuple[I32, I32, Any]:
    """Rows of (ids, values), None for none, one after the other: starts, ids, values."""
    nothing: Pairs = np.zeros(0, np.int32), np.zeros(0, dtype)
    ids, values = zip(nothing, *[nothing if part is None else part for part in parts])
    return np.cumsum([len(each) for each in ids], dtype=np.int32), np.concatenate(ids), np.concatenate(values)


def _masks(rows: Sequence[Row], vocab_size: int) -> Mask | None:
    masks = [state.mask for state, _, _ in rows]
    if all(mask is None for mask in masks):
        return None
    everything = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    return np.stack([everything if mask is None else mask for mask in masks])


def build_inputs(rows: Sequence[Row], vocab_size: int, kept: dict[Any, SampleInputs] | None = None) -> SampleInputs:
    """The sampler's arrays for one step: a row is (state, position of the token to be made, id to score or -1). kept: the caller's
    own; if the last step's rows are asked for again, and nothing but their positions can have changed, so are its arrays, to which
    nobody can write."""
    states, positions, score_ids = zip(*rows) if rows else ((), (), ())
    kept = {} if kept is None else kept
    inputs = kept.get((states, score_ids))
    if inputs is None:
        kept.clear()
        inputs = _make_inputs(rows, score_ids, vocab_size)
        if not any(state.moves for state in states):
            kept[states, score_ids] = inputs
            for column in [getattr(inputs, name) for name in SampleInputs.__slots__]:
                if isinstance(column, np.ndarray):
                    column.setflags(write=False)
    inputs.position = np.ndarray((len(positions),), np.int64, array("q", positions))
    return inputs


def _make_inputs(rows: Sequence[Row], score_ids: Sequence[int], vocab_size: int) -> SampleInputs:
    """All but the positions."""
    packed = np.frombuffer(b"".join([state.packed for state, _, _ in rows]), _ROW)
    columns = {name: np.ascontiguousarray(packed[name]) for name in _ROW.names or ()}
    seen = [(s.seen.ids, s.seen.counts) if score < 0 and s.seen is not None else None for s, _, score in rows]
    seen_starts, seen_ids, seen_counts = _ragged(seen, np.int32)
    bias_starts, bias_ids, bias = _ragged([s.bias() if score < 0 else None for s, _, score in rows], np.float32)
    return SampleInputs(
        **columns, position=np.zeros(0, np.int64), score_ids=np.array(score_ids, np.int32),
        seen_starts=seen_starts, seen_ids=seen_ids, seen_counts=seen_counts,
        bias_starts=bias_starts, bias_ids=bias_ids, bias=bias,
        mask=_masks(rows, vocab_size),
        top_logprobs=max([s.logprobs if score < 0 else s.prompt_logprobs for s, _, score in rows], default=-1),
    )  # fmt: skip
