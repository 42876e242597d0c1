"""Resident weight formats and dtypes by name; no torch in here, since capabilities are asked for without it."""

from __future__ import annotations

from trivium.plugin import WeightFormat

DTYPES = ("float32", "bfloat16", "float16")
"""Names that trivium and torch share."""

FORMATS = (
    WeightFormat("float32", bits=32, lossless_from=frozenset({"float32", "bfloat16", "float16"})),
    WeightFormat("bfloat16", bits=16, lossless_from=frozenset({"bfloat16"}), error_budget=0.002),
    WeightFormat("float16", bits=16, lossless_from=frozenset({"float16"}), error_budget=0.0005),
    WeightFormat("int8", bits=8, error_budget=0.02),
)
"""int8: whole numbers -127..127 times a float32 scale for each output row. The budgets hold for weights without outliers beyond
four standard deviations within a row."""
