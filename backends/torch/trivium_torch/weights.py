"""Loaded weights: torch tensors, and matrices of whole numbers with a scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trivium.ops import Weight


@dataclass(frozen=True)
class Int8:
    """A weight-only format: numbers[..., out, in] int8 times scales[..., out, 1] float32."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice | Tensor) -> Int8:
        return Int8(self.numbers[index], self.scales[index])

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""
        return (self.numbers.to(torch.float32) * self.scales).to(dtype)

    @classmethod
    def rounded(cls, numbers: Tensor) -> Int8:
        """The nearest whole numbers, ties to even, of float32 numbers over their row's largest size / 127."""
        scales = numbers.abs().amax(dim=-1, keepdim=True) / 127
        whole = torch.round(numbers / torch.where(scales == 0, torch.inf, scales))
        return cls(whole.clamp(-127, 127).to(torch.int8), scales)


Resident = Tensor | Int8


def floats_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The checkpoint's tensor on the host in a float dtype; stored bfloat16 is not decoded on its way to bfloat16."""
    if weight.format == "bfloat16" and dtype == torch.bfloat16:
        bits = np.array(weight.data).view(np.int16).reshape(weight.shape)
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(np.array(weight.decode(), np.float32)).to(dtype)


def make_resident(weight: Weight, format: str, device: torch.device) -> Resident:
    """The weight in one of formats.FORMATS on the device."""
    if format == "int8":
        return Int8.rounded(floats_of(weight, torch.float32).to(device))
    return floats_of(weight, getattr(torch, format)).to(device)


def plain(weight: Resident, dtype: torch.dtype) -> Tensor:
    """A weight's numbers in a float dtype."""
    return weight.to(dtype)
