"""Token ids to text, one at a time, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivium.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding of one sequence: all that `push` and `finish` return, joined, is `Tokenizer.decode` of all ids.

    Work per token depends on that token only. Bytes that can still become a character are held; bytes that never can
    become U+FFFD, once for each maximal broken piece (Unicode standard, 3.9, as Python's `errors="replace"`).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: Set[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def show(self, ids: Set[int]) -> None:
        """Special tokens that are not to be hidden: markers that a later stage must see."""
        self._hidden -= ids

    def push(self, *token_ids: int) -> str:
        """Text that is complete with these tokens; "" while a character is unfinished or the tokens are hidden."""
        shown = [self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._hidden]
        return self._trim(self._utf8.decode(b"".join(shown)))

    def finish(self) -> str:
        """The rest: U+FFFD if the sequence ends inside a character, else ""."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text
