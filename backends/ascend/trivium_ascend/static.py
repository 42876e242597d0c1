"""Products whose inputs are rounded to 8 bits by a scale that the checkpoint has, the same for all tokens (ops.InputScale)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.ops import InputScale
from trivium_ascend.operators import npu


@dataclass(frozen=True)
class Static:
    """What the product of one matrix needs beside its numbers. step float32[1], offset int32[1]: of `rule`, on the device. sums
    int32[out]: -offset * the sum of each row of numbers. factors [out]: step * the rows' scales, as the product takes them in
    the activations' dtype: float32 where that is bfloat16, else packed in int64."""

    rule: InputScale
    step: Tensor
    offset: Tensor
    sums: Tensor
    factors: Tensor

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.factors.nbytes

    def rounded(self, x: Tensor) -> Tensor:
        """int8[tokens, in] of x[tokens, in]."""
        return npu.npu_quantize(x, self.step, self.offset, torch.qint8, 1)  # type: ignore[no-any-return]

    def product(self, whole: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, out] of whole inputs int8[tokens, in] and numbers int8[in, out]."""
        return npu.npu_quant_matmul(whole, numbers, self.factors, bias=self.sums, output_dtype=dtype)  # type: ignore[no-any-return]

    def beside(self, other: Static) -> Static:
        """That of one matrix whose outputs are this one's and then the other's; both have one rule."""
        sums, factors = torch.cat([self.sums, other.sums]), torch.cat([self.factors, other.factors])
        return Static(self.rule, self.step, self.offset, sums, factors)


def make_static(rule: InputScale, numbers: Tensor, scales: Tensor, device: torch.device, dtype: torch.dtype) -> Static:
    """For numbers int8[out, in] and scales float32[out, 1] on the host."""
    sums = (-rule.offset * numbers.sum(dim=-1, dtype=torch.int64)).to(torch.int32)
    factors = scales[:, 0] * rule.scale
    if dtype == torch.float16:
        on_device = npu.npu_trans_quant_param(nearest19(factors).to(device))
    else:
        on_device = factors.to(device)
    step = torch.tensor([rule.scale], dtype=torch.float32, device=device)
    return Static(rule, step, torch.tensor([rule.offset], dtype=torch.int32, device=device), sums.to(device), on_device)


def nearest19(x: Tensor) -> Tensor:
    """Positive float32 rounded to 10 bits of fraction, ties up: what products keep of a scale when they give float16, where the
    rest would be cut off."""
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & -0x2000).view(torch.float32)
