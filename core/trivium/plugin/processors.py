"""Logits processors from plugins: found by name, held to their contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import InvalidRequestError
from trivium.plugin.guard import blame
from trivium.plugin.hooks import PROCESSORS, LogitsProcessor, ProcessorFactory
from trivium.plugin.installed import entry_points
from trivium.plugin.registry import call_hook

Biases = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Processors:
    """The installed logits processors; each is imported when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._loaded: dict[str, ProcessorFactory] = {}

    def make(self, wanted: Mapping[str, Any], vocab_size: int) -> list[Callable[..., Biases | None]]:
        """The processors of one request by name and arguments, in that order. Raises InvalidRequestError for an unknown name and
        PluginError for a faulty plugin; what is returned raises PluginError where the processor fails or breaks its contract."""
        return [self._make(name, arguments, vocab_size) for name, arguments in wanted.items()]

    def _make(self, name: str, arguments: Any, vocab_size: int) -> Callable[..., Biases | None]:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        what = f"logits processor {name!r}"
        with blame(what):
            processor = self._loaded[name](arguments, self._tokenizer)

        def guarded(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Biases | None:
            with blame(what):
                return _checked(processor, prompt_ids, output_ids, vocab_size)

        return guarded


def _load(name: str) -> ProcessorFactory:
    installed = entry_points(PROCESSORS)
    found = [e for e in installed if e.name == name]
    if len(found) != 1:
        known = ", ".join(sorted({e.name for e in installed})) or "none"
        reason = "no logits processor is" if not found else "two logits processors are"
        raise InvalidRequestError(f"{reason} called {name!r}; installed: {known}", param="logits_processors")
    with blame(f"logits processor {name!r}: loading it"):
        factory: ProcessorFactory = call_hook(found[0].load(), "trivium_logits_processor")
    return factory


def _checked(processor: LogitsProcessor, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> Biases | None:
    given = processor(prompt_ids, output_ids)
    if given is None:
        return None
    ids, values = np.asarray(given[0]), np.asarray(given[1], np.float32)
    whole = ids.dtype.kind in "iu" or ids.size == 0
    if ids.ndim != 1 or ids.shape != values.shape or not whole or not np.all((ids >= 0) & (ids < vocab_size) & (values < np.inf)):
        raise ValueError(f"it returned {given!r:.80}, not ids from 0 to {vocab_size - 1} and as many numbers")
    return ids.astype(np.int32), values
