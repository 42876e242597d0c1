"""GPTQ: codes chosen column by column, each column's error made good, as far as it goes, by the columns after it.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023), with columns in the
order of their inputs' squares and scales that were chosen before. Where a mask says so a column's number becomes 0 instead, which
is SparseGPT (Frantar and Alistarh, 2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium_compress.grids import Grid, Steps

Array = npt.NDArray[Any]
DAMPING = 0.01
"""What is added to the diagonal of the Hessian, as a share of its mean."""
BLOCK = 128
"""Columns whose errors reach the columns after the block in one product."""


class Order(NamedTuple):
    """What is to be known of the inputs. columns: in the order in which they are rounded, largest first; factor: see
    inverse_factor(), in that order."""

    columns: Array
    factor: Array


def ordered(hessian: Array, damping: float = DAMPING) -> Order:
    """hessian: float64[columns, columns], the sum of x xᵀ over the inputs x."""
    columns = np.argsort(-np.diag(hessian), kind="stable")
    return Order(columns, inverse_factor(hessian[np.ix_(columns, columns)], damping))


def gptq(w: Array, order: Order, grid: Grid | None, steps: Steps | None, *, mask: Array | None = None) -> tuple[Array, Array]:
    """(int16 codes, the numbers as each stood when it was to be rounded), both [rows, columns].

    w: float[rows, columns]; grid, steps: what codes mean (None: nothing is rounded, only what the mask says is taken out); mask:
    bool[rows, columns], False where a number becomes 0.
    """
    rows, columns = w.shape
    left = np.array(w.T[order.columns], order="C")  # a column's numbers side by side
    kept = None if mask is None else mask.T[order.columns]
    factor = order.factor.astype(w.dtype)
    codes, stood = np.zeros((columns, rows), np.int16), np.empty_like(left)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = np.empty((stop - start, rows), w.dtype)
        for j in range(start, stop):
            column = stood[j] = left[j]
            codes[j], value = _round(column, grid, steps, int(order.columns[j]), columns)
            if kept is not None:
                value = np.where(kept[j], value, 0)
                stood[j] = np.where(kept[j], column, 0)
            errors[j - start] = (column - value) / factor[j, j]
            left[j + 1 : stop] -= factor[j, j + 1 : stop, None] * errors[j - start]
        left[stop:] -= factor[start:stop, stop:].T @ errors
    back = np.argsort(order.columns, kind="stable")
    return np.ascontiguousarray(codes[back].T), np.ascontiguousarray(stood[back].T)


def _round(column: Array, grid: Grid | None, steps: Steps | None, index: int, columns: int) -> tuple[Array, Array]:
    """(codes, what they stand for) of one column."""
    if grid is None or steps is None:
        return np.zeros(len(column), np.int16), column
    group = index // grid.size(columns)
    own = Steps(steps.scale[:, group : group + 1], steps.offset[:, group : group + 1])
    codes = grid.codes(column[:, None, None], own)
    return codes[:, 0, 0].astype(np.int16), grid.values(codes, own)[:, 0, 0].astype(column.dtype)


def inverse_factor(hessian: Array, damping: float) -> Array:
    """The upper triangular U with UᵀU = (H + damping * mean of the diagonal)^-1, float64. An input that was never anything but 0
    gets the damping alone."""
    h = np.array(hessian, np.float64)
    mean = float(np.diag(h).mean())
    h[np.diag_indices_from(h)] += damping * mean if mean > 0 else 1.0
    # With J the reversal of rows, J H J = L Lᵀ makes H^-1 = (J L^-1 J)ᵀ (J L^-1 J), and J L^-1 J is upper triangular.
    lower = np.linalg.cholesky(h[::-1, ::-1])
    inverse = np.linalg.solve(lower, np.eye(len(h)))
    return np.triu(inverse[::-1, ::-1])
