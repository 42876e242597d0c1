"""Which weights become 0: the smallest (magnitude), or those whose product with the size of their input is smallest (Wanda; Sun et
al., "A Simple and Effective Pruning Approach for Large Language Models", 2024)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import InvalidRequestError

Array = npt.NDArray[Any]


class Sparsity(NamedTuple):
    """`share` of each matrix (magnitude) or of each row (Wanda); or `kept` of each `of` consecutive inputs stay."""

    share: float = 0.0
    kept: int = 0
    of: int = 0

    @classmethod
    def parse(cls, text: str) -> Sparsity:
        """ "0.5", or "2:4"; InvalidRequestError for anything else."""
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            kept, of = int(match[1]), int(match[2])
            if 0 < kept < of <= 64:
                return cls(kept=kept, of=of)
        elif re.fullmatch(r"0?\.\d+", text) and 0 < float(text) < 1:
            return cls(share=float(text))
        message = f"sparsity must be a share between 0 and 1, or KEPT:OF such as 2:4, not {text!r}"
        raise InvalidRequestError(message, param="sparsity")


def kept(w: Array, sparsity: Sparsity, squares: Array | None = None) -> Array:
    """bool[rows, columns], False for what becomes 0. squares: float[columns], sums of the inputs' squares: Wanda; None: magnitude.
    InvalidRequestError where the columns can't be divided as asked."""
    score = np.abs(w) if squares is None else np.abs(w) * np.sqrt(squares).astype(np.float32)
    columns = w.shape[1]
    if sparsity.of:
        if columns % sparsity.of:
            message = f"{sparsity.kept}:{sparsity.of} needs inputs in groups of {sparsity.of}; a projection has {columns}"
            raise InvalidRequestError(message, param="sparsity")
        return _smallest_out(score.reshape(-1, sparsity.of), sparsity.of - sparsity.kept).reshape(w.shape)
    if squares is None:
        return _smallest_out(score.reshape(1, -1), round(sparsity.share * score.size)).reshape(w.shape)
    return _smallest_out(score, round(sparsity.share * columns))


def _smallest_out(score: Array, count: int) -> Array:
    """False for the `count` smallest of each row."""
    mask = np.ones(score.shape, bool)
    if count:
        np.put_along_axis(mask, np.argpartition(score, count - 1, axis=-1)[:, :count], False, axis=-1)
    return mask
