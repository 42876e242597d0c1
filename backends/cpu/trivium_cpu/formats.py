"""Resident weight formats of the CPU backend, best first.

int4 and int8 are groups of 32 weights with a float16 scale (and minimum, or two-level scales, where the source has them),
laid out as native/linear/layout.h says. Blocks of the storage formats named in `lossless_from` are only rearranged: every
decoded float32 weight equals the checkpoint's own bit for bit. Anything else is rounded to nearest: int8 against the
group's largest magnitude, int4 with the scale, out of a few, of the least squared error. The error budgets hold for weights
without outliers beyond four standard deviations within a group of 32, which is far from what trained weights look like.
"""

from __future__ import annotations

from trivium.plugin import WeightFormat

_BLOCKS_4 = frozenset({"q4_0", "q4_1", "q4_k"})
_BLOCKS_8 = frozenset({"q5_0", "q5_1", "q8_0", "q5_k", "q6_k"}) | _BLOCKS_4

STORAGES = frozenset({"float32", "bfloat16", "float16"}) | _BLOCKS_8
"""Storage formats that are packed as they are; others are decoded to float32 first."""

FORMATS = (
    WeightFormat("int4", bits=4.5, lossless_from=_BLOCKS_4, error_budget=0.12),
    WeightFormat("int8", bits=8.5, lossless_from=_BLOCKS_8, error_budget=0.01),
    WeightFormat("bfloat16", bits=16, lossless_from=frozenset({"bfloat16"}), error_budget=0.002),
    WeightFormat("float16", bits=16, lossless_from=frozenset({"float16"}), error_budget=0.0005),
    WeightFormat("float32", bits=32, lossless_from=STORAGES),
)
