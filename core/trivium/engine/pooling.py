"""Pooled embeddings: which hidden states of a prompt are wanted, and the vector that is made of them. And scores of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivium.engine.outputs import RequestOutput
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.ops.batch import F32

_FIRST_ROW: dict[str, Callable[[int], int]] = {"last": lambda tokens: tokens - 1, "mean": lambda tokens: 0, "cls": lambda tokens: 0}
"""By kind of pooling: from which row on the hidden states of a prompt count."""


@dataclass(frozen=True)
class PoolingParams:
    """How the final hidden states h[tokens, hidden] of a prompt (after the last norm, before the output projection) become one
    vector: pooling "last": that of the last token, "cls": of the first, "mean": the mean over all. dimensions: only the first so
    many numbers are kept (None: all). normalize: then the vector is divided by its Euclidean length. None for the first two: as the
    model was made for, see own_pooling(). Raises InvalidRequestError."""

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and (type(self.pooling) is not str or self.pooling not in _FIRST_ROW):
            raise InvalidRequestError(f"pooling must be one of {', '.join(_FIRST_ROW)}, not {self.pooling!r}", param="pooling")
        if self.normalize is not None and type(self.normalize) is not bool:
            raise InvalidRequestError(f"normalize must be True or False, not {self.normalize!r}", param="normalize")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequestError(f"dimensions must be None or from 1 up, not {self.dimensions!r}", param="dimensions")


_KINDS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


CLASSIFIER = "ForSequenceClassification"
"""How the names of architectures end whose hidden states are the numbers of classes."""


def own_pooling(architecture: str, modules: Mapping[str, Mapping[str, Any]], *, whole: bool) -> PoolingParams:
    """What a model was made for. A classifier's numbers stand in the row of the first token if it reads `whole` sequences from both
    ends, else in that of the last. Else as Checkpoint.modules say; without any the mean of whole sequences, and the last token of
    those that are read from left to right. UnsupportedError for a module or a way of pooling that there is none of here."""
    if (classes := architecture.endswith(CLASSIFIER)) or not modules:
        return PoolingParams(("cls" if classes else "mean") if whole else "last", normalize=not classes)
    if unknown := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedError(f"this model's embeddings go through a module {min(unknown)} (modules.json), which is not supported")
    config = modules.get("Pooling", {})
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    mode = str(config.get("pooling_mode", modes[0] if len(modes) == 1 else modes))
    if (kind := _KINDS.get(mode, mode)) not in _FIRST_ROW:
        raise UnsupportedError(f"pooling by {mode} (modules.json) is not supported; by {', '.join(_FIRST_ROW)} is", param="pooling")
    return PoolingParams(kind, normalize="Normalize" in modules)


class Pool:
    """Takes the hidden states of one prompt as its chunks are computed. Its sum is float64, one row after another, so the vector
    depends neither on the chunks nor on what else ran."""

    def __init__(self, params: PoolingParams, tokens: int, hidden: int, own: PoolingParams, *, whole: bool) -> None:
        """own: for what `params` leaves open. whole: the first token's state, too, depends on all of the prompt."""
        if params.dimensions is not None and params.dimensions > hidden:
            message = f"dimensions {params.dimensions} is more than the {hidden} of this model's hidden states; give less"
            raise InvalidRequestError(message, param="dimensions")
        kind, normalize = params.pooling or own.pooling or "last", own.normalize if params.normalize is None else params.normalize
        self.first = _FIRST_ROW[kind](tokens)
        self.tokens = 1 if kind == "cls" and not whole else tokens
        """How many tokens of the prompt need to be computed: in a causal model the first sees none of the others."""
        self._params = PoolingParams(kind, normalize, params.dimensions)
        self._wanted = 1 if kind == "cls" else tokens - self.first
        self._rows = 0
        self._sum = np.zeros(hidden)

    def add(self, hidden: F32) -> None:
        """The next rows, float32[rows, hidden]."""
        hidden = hidden[: self._wanted - self._rows]
        for row in hidden:
            self._sum += row
        self._rows += len(hidden)

    def result(self) -> F32 | None:
        """float32[dimensions]; None as long as rows are missing."""
        if self._rows < self._wanted:
            return None
        vector = (self._sum / self._rows)[: self._params.dimensions]
        length = np.linalg.norm(vector) if self._params.normalize else 1.0
        return (vector / length if length > 0 else vector).astype(np.float32)


def text_pair(pair: object) -> tuple[str, str]:
    """`pair`, which must be two texts; else InvalidRequestError."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
        raise InvalidRequestError(f"what is scored must be pairs of texts, not {pair!r:.160}", param="pairs")
    return pair[0], pair[1]


def relevance(output: RequestOutput) -> float:
    """Of a pair that a cross-encoder has read: the logistic function of its number, 0 to 1."""
    if output.error is not None or output.embedding is None:
        raise output.error or InvalidRequestError("the request was aborted")
    return float(1 / (1 + np.exp(-np.float64(output.embedding[0]))))


def likelihood(output: RequestOutput) -> tuple[float, bool]:
    """Of a scored prompt: see LLM.loglikelihood."""
    if output.error is not None:
        raise output.error
    scored = [entry[token] for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or []) if entry is not None]
    return sum(found.logprob for found in scored), all(found.rank == 1 for found in scored)
