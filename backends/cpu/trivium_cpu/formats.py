"""Resident weight formats of the CPU backend, best first.

int4 and int8 are groups of 32 weights with a float16 scale (and minimum, or two-level scales, where the source has them);
_g64, _g128 and _channel have one scale for 64, for 128, for a whole row; _asym a float16 minimum (groups of 32) or a zero point
(64, 128). int4_i8 has an 8-bit step and offset in groups of 32 under a float32 scale for 256: products stay whole numbers
throughout 256 inputs, which is fastest with many rows and rounds inputs more coarsely. native/linear/layout.h says where the bytes
are, native/linear/round.cpp how weights are rounded. Blocks of the storage formats named in `lossless_from` are only rearranged:
every decoded float32 weight equals the checkpoint's own bit for bit. A row may end within a group. The error budgets hold for
weights without outliers beyond four standard deviations within 32 numbers, which is far from what trained weights look like.
"""

from __future__ import annotations

from trivium.plugin import WeightFormat

_BLOCKS_4 = frozenset({"q3_k", "q4_0", "q4_1", "q4_k", "tq1_0", "tq2_0"})
_BLOCKS_8 = frozenset({"iq4_nl", "iq4_xs", "mxfp4", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"}) | _BLOCKS_4

STORAGES = frozenset({"float32", "bfloat16", "float16"}) | _BLOCKS_8
"""Storage formats that are packed as they are; others are decoded to float32 first."""

FORMATS = (
    WeightFormat("int4", bits=4.5, lossless_from=_BLOCKS_4, error_budget=0.12),
    WeightFormat("int4_g64", bits=4.25, error_budget=0.13),
    WeightFormat("int4_g128", bits=4.125, error_budget=0.15),
    WeightFormat("int4_asym", bits=5, lossless_from=_BLOCKS_4, error_budget=0.1),
    WeightFormat("int4_asym_g64", bits=4.5, error_budget=0.12),
    WeightFormat("int4_asym_g128", bits=4.25, error_budget=0.14),
    WeightFormat("int4_i8", bits=4.625, error_budget=0.12),
    WeightFormat("int8", bits=8.5, lossless_from=_BLOCKS_8, error_budget=0.01),
    WeightFormat("int8_channel", bits=8, error_budget=0.02),
    WeightFormat("bfloat16", bits=16, lossless_from=frozenset({"bfloat16"}), error_budget=0.002),
    WeightFormat("float16", bits=16, lossless_from=frozenset({"float16"}), error_budget=0.0005),
    WeightFormat("float32", bits=32, lossless_from=STORAGES),
)
