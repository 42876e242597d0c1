"""Logits processors from plugins: found by name, held to their contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import InvalidRequestError
from trivium.extensions import blame, find, installed
from trivium.plugin.hooks import LogitsProcessor, ProcessorFactory

Biases = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Processors:
    """The installed logits processors; each is imported when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._loaded: dict[str, tuple[ProcessorFactory | None, str]] = {}

    def make(self, wanted: Mapping[str, Any], vocab_size: int) -> list[Callable[..., Biases | None]]:
        """The processors of one request by name and arguments, in that order. Raises InvalidRequestError for an unknown name and
        PluginError for a faulty plugin; what is returned raises PluginError where the processor fails or breaks its contract."""
        return [self._make(name, arguments, vocab_size) for name, arguments in wanted.items()]

    def _make(self, name: str, arguments: Any, vocab_size: int) -> Callable[..., Biases | None]:
        if name not in self._loaded:
            self._loaded[name] = find("logits_processor", name)
        factory, what = self._loaded[name]
        if factory is None:
            known = ", ".join(installed("logits_processor")) or "none"
            raise InvalidRequestError(f"no logits processor is called {name!r}; installed: {known}", param="logits_processors")
        with blame(what):
            processor = factory(arguments, self._tokenizer)

        def guarded(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Biases | None:
            with blame(what):
                return _checked(processor, prompt_ids, output_ids, vocab_size)

        return guarded


def _checked(processor: LogitsProcessor, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> Biases | None:
    given = processor(prompt_ids, output_ids)
    if given is None:
        return None
    ids, values = np.asarray(given[0]), np.asarray(given[1], np.float32)
    whole = ids.dtype.kind in "iu" or ids.size == 0
    if ids.ndim != 1 or ids.shape != values.shape or not whole or not np.all((ids >= 0) & (ids < vocab_size) & (values < np.inf)):
        raise ValueError(f"it returned {given!r:.80}, not ids from 0 to {vocab_size - 1} and as many numbers")
    return ids.astype(np.int32), values
