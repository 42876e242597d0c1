"""RMS norms. Each reads x once and writes y once, 2 bytes a number and way in 16 bits, and about 4 operations a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops import Call, InputScale
from trivium_ascend.kernels.table import HALVES, NpuKernel
from trivium_ascend.operators import npu
from trivium_ascend.session import AscendSession
from trivium_ascend.weights import Rounded
from trivium_torch.kernels.dense import Args, Attrs
from trivium_torch.kernels.fused import PATTERNS


def gamma(session: AscendSession, weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """offset + weight in a dtype, made once."""
    return session.kept(weight, ("gamma", offset, dtype), lambda: (weight + offset if offset else weight).to(dtype))  # type: ignore[no-any-return]


def rms_norm(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """The factor stays in float32 where the chip mixes dtypes."""
    x, weight = args
    if not x.numel():
        return x  # type: ignore[no-any-return]
    dtype = torch.float32 if session.chip.wide_gamma else x.dtype
    return npu.npu_rms_norm(x, gamma(session, weight, attrs["offset"], dtype), attrs["eps"])[0]  # type: ignore[no-any-return]


def add_norm(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """(x + y, its norm); the operator wants one dtype for all three."""
    x, y, weight = args
    if not x.numel():
        return x, x
    factor = gamma(session, weight, attrs["offset"], x.dtype)
    normed, _, total = npu.npu_add_rms_norm(x.contiguous(), y.contiguous(), factor, attrs["eps"])
    return total, normed


def add_norm_rounded(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor | Rounded]:
    """(x + y, its norm in 8 bits): for products that would round it themselves, each of them anew."""
    x, y, weight = args
    if not x.numel():
        return x, x
    factor = gamma(session, weight, attrs["offset"], x.dtype)
    whole, _, total, steps, _ = npu.npu_add_rms_norm_dynamic_quant(x.contiguous(), y.contiguous(), factor, epsilon=attrs["eps"])
    return total, Rounded(whole, steps, x.dtype)


def rounding_alike(rule: InputScale) -> NpuKernel:
    """The norm whose result is in 8 bits by a rule that all its readers have."""

    def run(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor | Rounded]:
        x, y, weight = args
        if not x.numel():
            return x, x
        factor = gamma(session, weight, attrs["offset"], x.dtype)
        wide, whole = (torch.float32, torch.int32) if x.dtype == torch.float16 else (x.dtype, x.dtype)

        def make() -> tuple[Tensor, Tensor]:
            return torch.full_like(factor, rule.scale, dtype=wide), torch.full_like(factor, rule.offset, dtype=whole)

        steps, offsets = session.kept(factor, ("alike", rule), make)
        y1, _, total = npu.npu_add_rms_norm_quant(x.contiguous(), y.contiguous(), factor, steps, offsets, epsilon=attrs["eps"])
        return total, Rounded(y1, None, x.dtype)

    name = "npu_add_rms_norm_quant"
    return NpuKernel(PATTERNS["add_norm"], run, name, 10, has_weight, (name,), HALVES)


def takes_rule(rule: InputScale, dtype: torch.dtype) -> bool:
    """Whether the norm's operator rounds by exactly this rule: with bfloat16 it takes the scale in bfloat16."""
    return dtype == torch.float16 or float(torch.tensor(rule.scale).to(torch.bfloat16)) == rule.scale


def has_weight(call: Call) -> str | None:
    return "the operator has no norm without a weight" if call.args[-1] is None else None


def in_rank(call: Call) -> str | None:
    value: Any = call.args[0]
    width = value.shape[-1]
    return None if isinstance(width, int) and width % 16 == 0 else f"a row of {width} numbers is not a multiple of 32 bytes"


KERNELS = (
    NpuKernel("rms_norm", rms_norm, "npu_rms_norm", 10, has_weight, ("npu_rms_norm",)),
    NpuKernel(PATTERNS["add_norm"], add_norm, "npu_add_rms_norm", 10, has_weight, ("npu_add_rms_norm",)),
)

ROUNDED = NpuKernel(
    PATTERNS["add_norm"], add_norm_rounded, "npu_add_rms_norm_dynamic_quant", 10, has_weight, ("npu_add_rms_norm_dynamic_quant",),
    HALVES,
)  # fmt: skip
"""Not in the table, since a call doesn't say how the weights are kept that read its result: see rounding.py."""
