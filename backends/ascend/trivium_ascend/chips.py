"""What each generation of chips has, in one table: everything else in this package asks it and never a chip's name.

Names are those that torch_npu.npu.get_device_name() gives. Which operator runs where is stated by torch-npu's documentation of
each. Bandwidth and arithmetic are assumptions for the roofline of docs/ascend.md: round figures, neither measured nor taken from a
data sheet that is named here. Nothing else reads them, so a wrong one changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FUSED = frozenset({
    "npu_rms_norm", "npu_add_rms_norm", "npu_add_rms_norm_dynamic_quant", "npu_swiglu", "npu_rotary_mul", "npu_mrope",
    "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score_v2", "npu_dynamic_quant", "npu_quant_matmul",
    "npu_weight_quant_batchmatmul", "npu_grouped_matmul", "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2", "npu_moe_token_unpermute", "npu_format_cast", "npu_quantize", "npu_trans_quant_param",
    "npu_add_rms_norm_quant",
})  # fmt: skip
"""Operators that A2 and A3 have."""

_INFERENCE = frozenset({
    "npu_rms_norm", "npu_add_rms_norm", "npu_add_rms_norm_quant", "npu_swiglu", "npu_format_cast", "npu_quantize",
    "npu_trans_quant_param", "npu_quant_matmul", "npu_weight_quant_batchmatmul", "npu_prompt_flash_attention",
    "npu_incre_flash_attention", "npu_scatter_nd_update_",
})  # fmt: skip
"""Those that the inference cards have in a form that is used here. The last three are used nowhere else. npu_rotary_mul is not
among them: torch-npu runs it there by CANN's older interface (aclopCompileAndExecute), which was not verified."""


@dataclass(frozen=True)
class Chip:
    """One generation. `dtypes`: of activations, best first. `operators`: fused ones that it has. `wide_gamma`: a norm of 16
    bits takes its weight in float32. `int4`: products take weights of 4 bits. `tiles`: quantised products gain by FRACTAL_NZ.
    `graphs`: steps can be captured. `streams`: what a process may use for captured graphs; each graph takes one and each layer's
    attention in it one task group. Assumed are `bandwidth`, bytes a second of its memory, and
    `half` and `int8`, multiply-adds counted as two, a second, in 16 and 8 bits; 0: nothing is assumed."""

    name: str
    series: str
    dtypes: tuple[str, ...]
    operators: frozenset[str]
    wide_gamma: bool
    int4: bool
    tiles: bool
    graphs: bool
    streams: int
    bandwidth: float = 0.0
    half: float = 0.0
    int8: float = 0.0

    def lacks(self, *operators: str) -> str | None:
        """Why a kernel made of these operators can't run here; None if it can."""
        gone = sorted(set(operators) - self.operators)
        return f"{self.series} has no {', '.join(gone)}" if gone else None


_ALL = ("bfloat16", "float16", "float32")

CHIPS: Mapping[str, Chip] = {
    "310P": Chip(
        "310P", "Atlas inference (310P)", ("float16", "float32"), _INFERENCE, False, False, False, False, 0, 204e9, 70e12, 140e12
    ),
    "910B": Chip("910B", "Atlas A2 (910B)", _ALL, FUSED, True, True, True, True, 1800, 1.6e12, 376e12, 752e12),
    "910_93": Chip("910C", "Atlas A3 (910C)", _ALL, FUSED, True, True, True, True, 1800, 1.6e12, 400e12, 800e12),
    "950": Chip("950", "Ascend 950", _ALL, FUSED, True, True, True, True, 1800, 1.6e12, 500e12, 1000e12),
}
"""By what follows "Ascend" in the device's name. 910C: one of its two dies, which is what torch counts as a device; half of the
arithmetic and bandwidth that is assumed of the package."""

OTHER = Chip("other", "this chip", ("float16", "float32"), frozenset(), False, False, False, False, 0)
"""One that the table doesn't know: plain torch operations only."""


def chip_of(name: str) -> Chip:
    """The chip of a device's name, for example "Ascend910B1", "Ascend910_9391" or "Ascend310P3"."""
    rest = name.removeprefix("Ascend")
    return next((chip for prefix, chip in CHIPS.items() if rest.startswith(prefix)), OTHER)
