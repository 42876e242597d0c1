"""Resident weight formats by name; no torch in here, since capabilities are asked for without it."""

from __future__ import annotations

from trivium.plugin import WeightFormat
from trivium_torch.formats import FORMATS as FLOATS

FORMATS = (
    *(f for f in FLOATS if f.name != "int8"),
    WeightFormat("int8", bits=8, error_budget=0.02),
    WeightFormat("w8a8", bits=8, error_budget=0.02),
    WeightFormat("int4", bits=4.5, error_budget=0.13),
)
"""int8: whole numbers -127..127 times a float32 scale for each output row; activations stay as they are (W8A16). w8a8: the same
numbers, and activations are rounded to 8 bits: by the checkpoint's own scale (ops.InputScale) where it has one, else token by
token. int4: numbers -8..7 in groups of inputs, each with a scale and a whole offset in the activations' dtype (W4A16). The
budgets hold for weights without outliers beyond four standard deviations within a row, and for activations that are rounded
token by token: a checkpoint's scale was chosen for its own.

Weights that are whole numbers times a scale already (ModelSlim, GPTQ, AWQ, compressed-tensors, Q4_0) keep their numbers: see
weights.stored8 and weights.lattice. Yet no format is declared as lossless for them, because the scales of int4 are rounded
where activations are bfloat16."""
