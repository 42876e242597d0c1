"""The models behind the port."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trivium import AsyncLLM, errors

from trivium_server.limits import characters


@dataclass(frozen=True)
class Served:
    """A loaded model under the name that clients know it by. created: Unix seconds."""

    name: str
    llm: AsyncLLM
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.llm.loaded.max_model_len

    @cached_property
    def max_characters(self) -> int:
        """What a context of the longest tokens would hold. What is longer need not be cut into tokens, at seconds a megabyte, for
        anybody to know that it is too long."""
        return self.max_model_len * max(map(len, self.llm.tokenizer.tokens()))

    def check_length(self, prompt: Any) -> None:
        """Raises ContextLengthError for a text, ids or messages that are longer than any that fit, even if they were cut."""
        outer = len(prompt) if isinstance(prompt, list) else 0
        if outer > self.max_characters or (outer := characters(prompt)) > self.max_characters:
            can = f"{self.max_model_len} tokens are possible, and no more than {self.max_characters} characters"
            raise errors.ContextLengthError(f"the prompt has {outer} tokens, messages or characters; {can}", param="prompt")


class Models:
    """By name; the first is the one for clients that name none. Names from clients are looked up here and nowhere else."""

    def __init__(self, served: Iterable[Served], aliases: Iterable[tuple[str, str]] = ()) -> None:
        """aliases: (other name, name)."""
        self._served = {one.name: one for one in served}
        self._aliases = dict(aliases)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def find(self, name: str | None) -> Served:
        """Raises ModelNotFoundError."""
        if name is None:
            return next(iter(self))
        found = self._served.get(self._aliases.get(name, name))
        if found is None:
            known = ", ".join([*self._served, *self._aliases])
            raise errors.ModelNotFoundError(f"there is no model {name!r:.80} here; there are {known}", param="model")
        return found

    @property
    def ready(self) -> bool:
        """Whether all of them take requests."""
        return all(one.llm.is_ready for one in self)

    def close(self) -> None:
        """Gives their memory back."""
        for one in self:
            one.llm.close()
