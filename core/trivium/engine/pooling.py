"""Pooled embeddings: which hidden states of a prompt are wanted, and the vector that is made of them. And scores of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trivium.engine.outputs import RequestOutput
from trivium.errors import InvalidRequestError
from trivium.ops.batch import F32

_FIRST_ROW: dict[str, Callable[[int], int]] = {"last": lambda tokens: tokens - 1, "mean": lambda tokens: 0, "cls": lambda tokens: 0}
"""By kind of pooling: from which row on the hidden states of a prompt count."""


@dataclass(frozen=True)
class PoolingParams:
    """How the final hidden states h[tokens, hidden] of a prompt (after the last norm, before the output projection) become one
    vector: pooling "last": that of the last token, "cls": of the first, "mean": the mean over all. dimensions: only the first so
    many numbers are kept (None: all). normalize: then the vector is divided by its Euclidean length. Raises InvalidRequestError."""

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if type(self.pooling) is not str or self.pooling not in _FIRST_ROW:
            raise InvalidRequestError(f"pooling must be one of {', '.join(_FIRST_ROW)}, not {self.pooling!r}", param="pooling")
        if type(self.normalize) is not bool:
            raise InvalidRequestError(f"normalize must be True or False, not {self.normalize!r}", param="normalize")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequestError(f"dimensions must be None or from 1 up, not {self.dimensions!r}", param="dimensions")


class Pool:
    """Takes the hidden states of one prompt as its chunks are computed. Its sum is float64, one row after another, so the vector
    depends neither on the chunks nor on what else ran."""

    def __init__(self, params: PoolingParams, tokens: int, hidden: int) -> None:
        if params.dimensions is not None and params.dimensions > hidden:
            message = f"dimensions {params.dimensions} is more than the {hidden} of this model's hidden states; give less"
            raise InvalidRequestError(message, param="dimensions")
        self.first = _FIRST_ROW[params.pooling](tokens)
        self.tokens = 1 if params.pooling == "cls" else tokens
        """How many tokens of the prompt need to be computed: in a causal model the first sees none of the others."""
        self._params = params
        self._rows = 0
        self._sum = np.zeros(hidden)

    def add(self, hidden: F32) -> None:
        """The next rows, float32[rows, hidden]."""
        for row in hidden:
            self._sum += row
        self._rows += len(hidden)

    def result(self) -> F32 | None:
        """float32[dimensions]; None as long as rows are missing."""
        if self.first + self._rows < self.tokens:
            return None
        vector = (self._sum / self._rows)[: self._params.dimensions]
        length = np.linalg.norm(vector) if self._params.normalize else 1.0
        return (vector / length if length > 0 else vector).astype(np.float32)


def likelihood(output: RequestOutput) -> tuple[float, bool]:
    """Of a scored prompt: see LLM.loglikelihood."""
    if output.error is not None:
        raise output.error
    scored = [entry[token] for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or []) if entry is not None]
    return sum(found.logprob for found in scored), all(found.rank == 1 for found in scored)
