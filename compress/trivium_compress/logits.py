"""Full logits of any model on any backend, out of the engine's own steps, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium import LLM, SamplingParams
from trivium.errors import BackendError, InvalidRequestError, UnsupportedError
from trivium.models import describe
from trivium.ops import Batch
from trivium.plugin import Executable, Step
from trivium.weights import open_checkpoint, resolve

from trivium_compress.source import traced

Array = npt.NDArray[Any]
ROWS = 64
"""Tokens in a step unless more are asked for: so many rows of logits there are at a time."""
_SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


class Watched(Executable):
    """An executable that shows the logits of each step."""

    def __init__(self, inner: Executable, show: Callable[[Array], None]) -> None:
        self._inner = inner
        self._show = show

    def run(self, batch: Batch) -> Step:
        step = self._inner.run(batch)
        if len(batch.sample_rows):
            self._show(step.output("logits"))
        return step


class Scorer:
    """A loaded model that scores windows of at most `window` tokens, and answers with up to `room` tokens more, if it has so many
    positions. options: arguments of LLM()."""

    def __init__(self, model: str, window: int, options: Mapping[str, Any], *, room: int = 0) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        longest = given.get("max_model_len")
        checkpoint = open_checkpoint(resolve(model))
        if not traced(checkpoint).states:
            message = f"{model} reads whole texts and foretells no tokens, of which all figures are made; measure it by its task"
            raise UnsupportedError(message, param="model")
        if longest is not None and longest < window:
            raise InvalidRequestError(f"max_model_len {longest} has no room for windows of {window} tokens", param="max_model_len")
        if longest is None:
            positions = describe(checkpoint.config).max_positions
            given["max_model_len"] = max(window, min(window + room, positions))
        given["max_num_batched_tokens"] = given.get("max_num_batched_tokens", ROWS)
        given["max_num_seqs"] = min(ROWS, given["max_num_batched_tokens"])  # a step has no more rows of logits than sequences
        self.llm = LLM(model, enable_prefix_caching=False, **given)
        self.vocab_size = self.llm.loaded.vocab_size

    def score(self, ids: Sequence[int], first: int, use: Callable[[int, Array], None]) -> None:
        """Calls `use(row, logits float32[n, vocab_size])` for rows from `first` - 1 on (row i foretells token i + 1), as the steps
        come: nothing is kept."""
        at, last = 0, len(ids) - 1

        def show(logits: Array) -> None:
            nonlocal at
            start, stop = max(at, first - 1), min(at + len(logits), last)
            if start < stop:
                use(start, logits[start - at : stop - at, : self.vocab_size])
            at += len(logits)

        with self._watched(show):
            self.llm.generate([list(map(int, ids))], _SCORE)
        if at < last:
            raise BackendError(f"{self.llm.loaded.backend.name} gave logits of {at} rows, not {last}")

    def rows(self, ids: Sequence[int], first: int) -> Array:
        """float32[len(ids) - first, vocab_size] at once: the rows that foretell the tokens from `first` on."""
        out = np.empty((len(ids) - first, self.vocab_size), np.float32)

        def keep(row: int, logits: Array) -> None:
            out[row - first + 1 : row - first + 1 + len(logits)] = logits

        self.score(ids, first, keep)
        return out

    @contextmanager
    def _watched(self, show: Callable[[Array], None]) -> Iterator[None]:
        engine, loaded = self.llm.engine, self.llm.loaded
        engine.model = replace(loaded, executable=Watched(loaded.executable, show))
        try:
            yield
        finally:
            engine.model = loaded

    def longest_prompt(self, tokens: int) -> int:
        """Of a prompt to which an answer of `tokens` tokens can be made; InvalidRequestError if there is none."""
        longest = self.llm.loaded.max_model_len - tokens
        if longest < 1:
            message = f"answers of {tokens} tokens leave no room for a prompt within {self.llm.loaded.max_model_len}"
            raise InvalidRequestError(message, param="answer_tokens")
        return longest

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """What the model makes of prompts, greedily."""
        params, longest = SamplingParams(temperature=0.0, max_tokens=tokens), self.longest_prompt(tokens)
        outputs = self.llm.generate([list(map(int, ids))[-longest:] for ids in prompts], params)
        return [output.outputs[0].text for output in outputs]

    def close(self) -> None:
        self.llm.close()


class KeptScorer(Scorer):
    """A measure for several models: the rows of each window are computed once and kept in files of `folder`."""

    def __init__(self, model: str, window: int, options: Mapping[str, Any], folder: Path) -> None:
        super().__init__(model, window, options)
        self._folder = folder
        self._kept: dict[tuple[int, ...], Path] = {}

    def rows(self, ids: Sequence[int], first: int) -> Array:
        key = (first, *ids)
        if key not in self._kept:
            path = self._folder / f"rows-{len(self._kept)}.npy"
            np.save(path, super().rows(ids, first))
            self._kept[key] = path
        kept: Array = np.load(self._kept[key], mmap_mode="r")
        return kept
