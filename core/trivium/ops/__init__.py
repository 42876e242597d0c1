"""The operator set, Programs over it, and the arrays that cross to a backend."""

from __future__ import annotations

from trivium.ops.batch import Batch, Sampled, SampleInputs
from trivium.ops.builder import OPERATORS, Builder, new_builder
from trivium.ops.examples import operator
from trivium.ops.media import Span, Tile
from trivium.ops.patterns import evaluate, rewrite
from trivium.ops.program import INPUTS, Call, Constant, InputScale, Pattern, Program, StateDecl, Value, Weight
from trivium.ops.schema import OPSET, Arg, Case, Operator, Shape, Signature, Tolerance, collect
from trivium.ops.state import Group, KVSpec, LatentKV, PagedKV, PagedState, Pages, Recurrent, RecurrentState, StateSpec

__all__ = [
    "INPUTS", "OPERATORS", "OPSET", "Arg", "Batch", "Builder", "Call", "Case", "Constant", "Group", "InputScale", "KVSpec",
    "LatentKV", "Operator", "PagedKV", "PagedState", "Pages", "Pattern", "Program", "Recurrent", "RecurrentState",
    "SampleInputs", "Sampled", "Shape", "Signature", "Span", "StateDecl", "StateSpec", "Tile", "Tolerance", "Value", "Weight",
    "collect", "evaluate", "new_builder", "operator", "rewrite",
]  # fmt: skip
