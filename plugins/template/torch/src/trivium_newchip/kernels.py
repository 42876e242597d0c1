"""The kernels of newchip that are better than plain torch. Each takes and returns torch tensors on the device.

What a kernel must compute is the docstring of the operator: `help(trivium.ops.OPERATORS['rope'].reference)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trivium.ops import Pattern
from trivium.plugin import Kernel


def _sum_norm(b: Any, x: Any, y: Any, weight: Any, *, eps: float) -> Any:
    total = b.add(x, y)
    return total, b.rms_norm(total, weight, eps=eps)


SUM_NORM = Pattern("newchip_sum_norm", _sum_norm)
"""What the fused kernel computes. trivium finds it in models and the kit holds the kernel to it; no test needs to be written."""


def sum_norm(session: Any, args: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual sum and its norm in one kernel."""
    x, y, weight = args
    total = x + y
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + attrs["eps"])
    return total, (wide * scale * weight.float()).to(total.dtype)


KERNELS = (Kernel(SUM_NORM, sum_norm, "newchip sum_norm"),)
