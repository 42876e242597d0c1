"""Factors on the inputs of projections that make what rounding costs small: large inputs get finer steps.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration" (2024): factors are a power
of the inputs' mean size; the exponent is the one with the least error of the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium_compress.grids import Grid, meant, nearest
from trivium_compress.walk import Inputs

Array = npt.NDArray[Any]
EXPONENTS = 11
"""How many exponents from 0 to 1 are tried."""


def factors(weights: Sequence[Array], grid: Grid, inputs: Inputs) -> Array:
    """float32[columns], to multiply the columns of all `weights`[rows, columns] with (and to divide their inputs by)."""
    size = inputs.size / max(inputs.count, 1)
    size = np.maximum(size, max(float(size.max()), 1e-30) * 1e-4)
    hessian = np.asarray(inputs.moments / max(inputs.count, 1), np.float32)
    best, least = np.ones(len(size), np.float32), np.inf
    for exponent in np.linspace(0, 1, EXPONENTS):
        tried = size**exponent
        tried = (tried / np.sqrt(tried.max() * tried.min())).astype(np.float32)
        error = sum(_error(w, grid, tried, hessian) for w in weights)
        if error < least:
            best, least = tried, error
    return best


def _error(w: Array, grid: Grid, factor: Array, hessian: Array) -> float:
    """Of the outputs: sum over the rows of e H eᵀ, where e is what rounding w · factor changes, divided by factor."""
    scaled = w * factor
    steps = grid.fit(scaled, search=False)
    miss = meant(grid, nearest(grid, scaled, steps), steps) / factor - w
    return output_error(miss, hessian)


def output_error(miss: Array, hessian: Array) -> float:
    """sum over the rows of e H eᵀ, for e = miss[rows, columns]; hessian: float[columns, columns], or its diagonal."""
    if hessian.ndim == 1:
        return float((miss * miss * hessian).sum(dtype=np.float64))
    return float(((miss @ hessian) * miss).sum(dtype=np.float64))
