"""Products with quantised weights. A decode step reads each weight once: in, out numbers of 1 byte, or half a byte and 4 bytes
a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.session import AscendSession
from trivium_torch.kernels.dense import Args, Attrs
from trivium_torch.kernels.dense import embedding as plain_embedding

QUANTISED = "npu_dynamic_quant, npu_quant_matmul; npu_weight_quant_batchmatmul"


def linear(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    x, weight, bias = args
    return session.linear(x, weight, bias)


def embedding(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """Rows of a quantised table are gathered before they become numbers of 16 bits."""
    ids, weight = args
    if isinstance(weight, Tensor):
        return plain_embedding(session, args, attrs)
    rows: Any = weight[ids]
    return (rows.to(torch.float32) * attrs["scale"]).to(session.dtype)  # type: ignore[no-any-return]


KERNELS = (
    NpuKernel("linear", linear, f"torch linear ({QUANTISED} for quantised weights)", 10),
    NpuKernel("embedding", embedding, "torch embedding (of quantised rows)", 10),
)
