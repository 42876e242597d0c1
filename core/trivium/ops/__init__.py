"""The operator set, Programs over it, and the arrays that cross to a backend."""

from __future__ import annotations

from collections.abc import Mapping

from trivium.ops import attention, dense, sample
from trivium.ops.batch import Batch, Sampled, SampleInputs
from trivium.ops.builder import Builder
from trivium.ops.program import INPUTS, Call, Constant, Pattern, Program, StateDecl, Value, walk_values
from trivium.ops.schema import OPSET, Arg, Case, Operator, Shape, Signature, Tolerance, collect, operator
from trivium.ops.state import Group, KVSpec, LatentKV, PagedKV, PagedState, Recurrent, RecurrentState, StateSpec
from trivium.ops.tensors import Weight

OPERATORS: Mapping[str, Operator] = collect(dense, attention, sample)
"""The operator set, by name."""


def new_builder() -> Builder:
    """A Builder over the whole operator set."""
    return Builder(OPERATORS)


__all__ = [
    "INPUTS", "OPERATORS", "OPSET", "Arg", "Batch", "Builder", "Call", "Case", "Constant", "Group", "KVSpec", "LatentKV",
    "Operator", "PagedKV", "PagedState", "Pattern", "Program", "Recurrent", "RecurrentState", "SampleInputs", "Sampled", "Shape",
    "Signature", "StateDecl", "StateSpec", "Tolerance", "Value", "Weight", "collect", "new_builder", "operator", "walk_values",
]  # fmt: skip
