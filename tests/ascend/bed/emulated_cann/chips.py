"""What differs between the chips, one row each: all that the emulation's checks look at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Chip:
    name: str
    soc: str
    """What aclrtGetSocName says, without the variant: torch-npu selects its paths by it."""
    bfloat16: bool = True
    mixed_norms: bool = True
    norm_bytes: int = 0
    rstd_of_add: bool = True
    quant_norm_elements: int = 0
    grouped_quantised: bool = True
    per_token: bool = True
    """Products of 8 bits take a scale for each token, biases that are not whole, and give more than float16 and int8."""
    int4: bool = True
    """Products of 16 bits take weights of 4."""
    flash_lengths: bool = True
    """The first attention operators take lengths of prompts, shared heads, masks of single queries and sparse modes."""
    absent: tuple[str, ...] = ()
    """Operators (beginnings of names) whose documents leave the chip out."""


CHIPS = (
    Chip(
        "310P", "Ascend310P", bfloat16=False, mixed_norms=False, norm_bytes=32, rstd_of_add=False, quant_norm_elements=32,
        grouped_quantised=False, per_token=False, int4=False,
        flash_lengths=False,
        absent=(
            "aclnnFusedInferAttentionScore", "aclnnScatterPaKvCache", "aclnnGatherPaKvCache", "aclnnDynamicQuant",
            "aclnnRopeWithSinCosCache", "aclnnAddRmsNormDynamicQuant", "aclnnApplyTopKTopP", "aclnnMoeGatingTopK",
        ),
    ),
    Chip("910B", "Ascend910B"),
    Chip("910C", "Ascend910_93", absent=("aclnnIncreFlashAttention",)),
    Chip(
        "950", "Ascend950",
        absent=(
            *(f"aclnnFusedInferAttentionScoreV{n}" for n in (2, 3, 4)), "aclnnIncreFlashAttention", "aclnnPromptFlashAttention",
        ),
    ),
)  # fmt: skip
VARIANTS = {"310P": "Ascend310P3", "910B": "Ascend910B1", "910C": "Ascend910_9391", "950": "Ascend950PR_9589"}


@cache
def chip() -> Chip:
    """The chip that this process emulates (environment variable EMULATED_SOC; 910B where it is not set)."""
    soc = os.environ.get("EMULATED_SOC", VARIANTS["910B"])
    found = [c for c in CHIPS if soc.startswith(c.soc)]
    if len(found) != 1:
        raise ValueError(f"EMULATED_SOC={soc}: one of {', '.join(VARIANTS.values())}")
    return found[0]
