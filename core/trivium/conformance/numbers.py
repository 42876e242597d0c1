"""Rounding to a device's dtypes and comparing within tolerances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.conformance.report import Mismatch
from trivium.ops import Operator, Pattern, Tolerance
from trivium.ops.patterns import trace
from trivium.ops.state import kv_int8

Array = npt.NDArray[Any]
EXACT = ("float32", "float16", "bfloat16", "int8")
"""KV formats of which is known what they keep."""


def round_to(array: Array, dtype: str) -> Array:
    """float32 numbers that `dtype` holds exactly, the nearest ones; a dtype that is neither a plain float nor "int8" (of KV pages)
    leaves them as they are."""
    if dtype == "int8":
        return kv_int8(np.ascontiguousarray(array, np.float32))
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    even = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (even & np.uint32(0xFFFF0000)).view(np.float32)


def tolerance(op: Operator | Pattern, dtypes: Iterable[str]) -> Tolerance:
    """The operator's tolerance for the coarsest of the dtypes; those of the operators inside add up for a pattern. A dtype that
    has none of its own (8-bit KV) counts four times as coarse as bfloat16."""
    if isinstance(op, Pattern):
        inner = [tolerance(call.op, dtypes) for call in trace(op).calls]
        return Tolerance(sum(t.rtol for t in inner), sum(t.atol for t in inner))
    coarse = Tolerance(*(4 * t for t in op.tolerances.get("bfloat16", Tolerance(1e-5, 1e-5))))
    return max(op.tolerances.get(dtype, coarse) for dtype in dtypes)


def expect_close(what: str, got: Array, want: Array, allowed: Tolerance) -> None:
    """Mismatch with the worst element unless all are within the tolerance."""
    if got.shape != want.shape:
        raise Mismatch(f"{what} has the shape {list(got.shape)}, not {list(want.shape)}")
    wrong = ~(np.abs(got - want) <= allowed.atol + allowed.rtol * np.abs(want))
    if wrong.any():
        worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(np.abs(got - want), nan=np.inf), -1)), got.shape)
        raise Mismatch(
            f"{what}{list(map(int, worst))} is {got[worst]:.7g}, the reference says {want[worst]:.7g}; {int(wrong.sum())} of "
            f"{got.size} are off by more than {allowed.atol:g} + {allowed.rtol:g} * size"
        )


def relative_error(got: Array, want: Array) -> float:
    """Root-mean-square error relative to the root-mean-square size; inf for a wrong shape or numbers that are not finite."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    size = float(np.sqrt(np.mean(np.square(want, dtype=np.float64))))
    return float(np.sqrt(np.mean(np.square(got - want, dtype=np.float64)))) / (size or 1.0)


def expect_relative(what: str, got: Array, want: Array, budget: float) -> float:
    """The relative error; Mismatch if it is over the budget."""
    error = relative_error(got, want)
    if error > budget:
        raise Mismatch(f"{what} has a relative error of {error:.3g}; the budget is {budget:.3g}")
    return error
