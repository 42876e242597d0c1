"""A plugin with logits processors, as others would write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from trivium.errors import InvalidRequestError
from trivium.plugin import hookimpl


class Shout:
    """Only capital letters, and after `limit` of them the end token."""

    def __init__(self, limit: int, tokenizer: Any) -> None:
        self._limit = limit
        self._rest = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).isupper()]
        self._end = min(tokenizer.eos_ids)

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[Any, Any] | None:
        if len(output_ids) >= self._limit:
            return [self._end], [1000.0]
        return self._rest, np.full(len(self._rest), -np.inf)


class shout:
    @staticmethod
    @hookimpl
    def trivium_logits_processor() -> Any:
        def make(arguments: Any, tokenizer: Any) -> Shout:
            if not isinstance(arguments, dict) or set(arguments) != {"limit"}:
                raise InvalidRequestError("shout takes {'limit': characters}", param="logits_processors")
            return Shout(arguments["limit"], tokenizer)

        return make


class faulty:
    """Does what its argument says, once there are two tokens."""

    @staticmethod
    @hookimpl
    def trivium_logits_processor() -> Any:
        return lambda how, tokenizer: lambda prompt, output: HOW[how]() if len(output) == 2 else None


def _raise() -> None:
    raise KeyError("no such word")


HOW = {
    "raise": _raise,
    "nan": lambda: ([1], [float("nan")]),
    "id": lambda: ([10**6], [1.0]),
    "shape": lambda: ([1, 2], [1.0]),
    "text": lambda: "a",
    "ban": lambda: (range(259), [-np.inf] * 259),
    "fine": lambda: ([], []),
}
