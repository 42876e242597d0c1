"""Grammars that a text is held to: compiled once a tokenizer, then asked before every token which ids may come next.

The masks are llguidance's: an id is allowed exactly if its bytes, put behind the text so far, can still become a text of the
grammar. Special tokens have no text, so they are only allowed where a Lark grammar names them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.errors import InvalidRequestError
from trivium.ops.batch import U32 as Mask, id_mask

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llguidance import LLMatcher, LLTokenizer

    from trivium.text.tokenizer import Tokenizer

CACHED = 64
"""Grammars kept, last used first."""
COMPILE_SECONDS, COMPILE_BYTES = 1, 2**30
"""Processor time and memory that compiling a grammar may take."""
_LIMITS: dict[str, Any] = {"max_lexer_states": 25_000, "precompute_large_lexemes": False, "verbose_errors": False}
_TRIAL = f"""
import resource, sys
for what, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, {COMPILE_SECONDS}), (resource.RLIMIT_AS, {COMPILE_BYTES})):
    resource.setrlimit(what, (limit, limit))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
rules = sys.stdin.buffer.read().decode()
source = '%llguidance {{"no_forcing": true}}\\n' + (any_to_lark(rules) if sys.argv[1] == "grammar" else rules)
LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=LLParserLimits(**{_LIMITS}))
sys.stdout.buffer.write(source.encode())
"""
"""What a process of its own does with a grammar, as the library has limits, but not for everything, and a thread that is lost in
it can't be ended. Returns it as llguidance's dialect of Lark. no_forcing: where only one text is possible, any tokens that spell it
are allowed, not just those that the tokenizer would choose, so that other limits on tokens leave as much as there is."""


class Grammars:
    """The grammars of one tokenizer. Any thread may ask; of equal grammars that are asked for at a time one is compiled.

    vocab_size: ids that can be sampled. eos_ids: the model's own end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Set[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._texts = id_mask(range(vocab_size), vocab_size) & ~self._mask(eos_ids)
        self._known: OrderedDict[tuple[str, str], Future[LLMatcher | str]] = OrderedDict()

    def matcher(self, kind: str, text: str, end_ids: Set[int]) -> Matcher:
        """A new matcher at the beginning of a text; `kind`: json (a schema), regex, choice (a JSON list of strings) or grammar
        (Lark or GBNF). `end_ids`: tokens that end the output, allowed exactly where the text may end. InvalidRequestError with the
        reason if the grammar is not possible."""
        from concurrent.futures import Future

        spec = kind, text
        with self._lock:
            future = self._known.get(spec)
            if new := future is None:
                future = self._known[spec] = Future()
            self._known.move_to_end(spec)
            while len(self._known) > CACHED:
                self._known.popitem(last=False)
        if new:
            try:
                future.set_result(self._compile(*spec))
            except BaseException as fault:
                self._forget(spec)
                future.set_exception(fault)
        compiled = future.result()
        if isinstance(compiled, str):
            raise InvalidRequestError(f"structured_outputs: this {kind} can't be used: {compiled}", param="structured_outputs")
        ends = self._mask(end_ids)
        return Matcher(compiled.deep_copy(), self._texts & ~ends, ends, end_ids, lambda: self._forget(spec))

    def _mask(self, ids: Set[int]) -> Mask:
        return id_mask([i for i in ids if i < self._vocab_size], self._vocab_size)

    def _forget(self, spec: tuple[str, str]) -> None:
        with self._lock:
            self._known.pop(spec, None)

    def _compile(self, kind: str, text: str) -> LLMatcher | str:
        """A matcher at the beginning, or why there is none."""
        import subprocess

        from llguidance import LLMatcher, LLParserLimits

        trial = subprocess.run([sys.executable, "-P", "-c", _TRIAL, kind], input=_rules(kind, text).encode(), capture_output=True)
        if trial.returncode < 0:
            return f"compiling it takes more than {COMPILE_SECONDS} s of processor time or {COMPILE_BYTES >> 20} MiB; simplify it"
        if trial.returncode > 0:
            return trial.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        with self._building:  # one thread makes it, the others wait
            trie = self._trie
        matcher = LLMatcher(trie, trial.stdout.decode(), log_level=0, limits=LLParserLimits(**_LIMITS))
        matcher.compute_bitmask()  # an error if nothing may come first; and all copies find this mask's states made
        return _error(matcher) or matcher

    @cached_property
    def _trie(self) -> LLTokenizer:
        """The trie of all tokens: a tenth of a second for 49,152 of them, and their bytes as long again."""
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(i for i in self._eos_ids if i < self._vocab_size)
        tokens: Sequence[bytes] = [self._source.token_bytes(i) for i in range(self._vocab_size)]
        parts = {"eos_token_id": ends[0] if ends else None, "bos_token_id": None, "tokens": tokens}
        wrapper = TokenizerWrapper(SimpleNamespace(**parts, special_token_ids=sorted(self._source.special_ids)))
        return LLTokenizer(wrapper, eos_token=ends or None)


@dataclass
class Matcher:
    """Where one output stands in its grammar. _texts: ids that end nothing; _ends: those of _end_ids. _retire is called when the
    library fails: what it has made of the grammar, which all copies share, may be full or broken. complete: the text has ended, no
    token may follow."""

    _inner: LLMatcher
    _texts: Mask
    _ends: Mask
    _end_ids: Set[int]
    _retire: Callable[[], None]
    complete: bool = False

    def accept(self, token: int) -> None:
        """Takes a token that the mask allowed; InvalidRequestError for another."""
        if token in self._end_ids:
            self.complete = True
        else:
            self._inner.consume_token(token)
            self._check()
            self.complete = self._inner.is_stopped()

    def mask(self) -> Mask:
        """uint32[ceil(vocab/32)]: bit i of word w allows id 32 * w + i. InvalidRequestError where the grammar's limits are hit."""
        found: Mask = np.frombuffer(self._inner.compute_bitmask(), "<u4")[: len(self._texts)] & self._texts
        self._check()
        return found | self._ends if self._inner.is_accepting() else found

    def masks_ahead(self, drafts: Iterable[int]) -> list[Mask]:
        """The masks behind drafts[0], drafts[1] and so on; the list ends early where the grammar forbids a draft, ends with it, or
        hits its limits, which is raised when, and only when, those drafts have come true. Nothing changes here."""
        twin, masks = replace(self, _inner=self._inner.deep_copy()), list[Mask]()
        with contextlib.suppress(InvalidRequestError):
            for token in drafts:
                twin.accept(token)
                if twin.complete:
                    break
                masks.append(twin.mask())
        return masks

    def _check(self) -> None:
        if self._inner.is_error():
            self._retire()
            message = f"structured_outputs: the grammar can't go on: {_error(self._inner)}"
            raise InvalidRequestError(message, param="structured_outputs")


def _error(matcher: LLMatcher) -> str:
    """The library's reason, "" if there is no error."""
    reason = matcher.get_error().removesuffix("\n<non-verbose/>")
    return "the model's tokens can't spell any text of it" if reason == "NoExtensionBias" else reason


def _rules(kind: str, text: str) -> str:
    from llguidance import regex_to_lark

    if kind == "json":
        return f"start: %json {text}"
    if kind == "regex":
        return f"start: /{regex_to_lark(text, 'd')}/"
    if kind == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return text
