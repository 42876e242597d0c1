"""The gated unit: npu_swiglu reads gate and up side by side, 4 bytes an output number in 16 bits, and writes 2."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops import Call
from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.operators import npu
from trivium_ascend.session import AscendSession
from trivium_torch.kernels.dense import Args, Attrs
from trivium_torch.kernels.fused import PATTERNS


def swiglu(both: Tensor) -> Tensor:
    """silu(first half) * second half of both[tokens, 2 * n]."""
    if not both.numel():
        return both[..., : both.shape[-1] // 2]
    return npu.npu_swiglu(both.contiguous())  # type: ignore[no-any-return]


def gate_up(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """One product with both weights where they lie together (see joined.py), else one each and a copy."""
    x, wg, bg, wu, bu = args
    joined = session.joined(wg, wu)
    if joined is not None:
        bias = None if bg is None or bu is None else session.kept(bg, ("joined", id(bu)), lambda: torch.cat([bg, bu]))
        return swiglu(session.linear(x, joined, bias))
    return swiglu(torch.cat([session.linear(x, wg, bg), session.linear(x, wu, bu)], dim=-1))


def gated(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    return swiglu(torch.cat([args[0], args[1]], dim=-1))


def is_plain_silu(call: Call) -> str | None:
    attrs = call.attrs
    if attrs["kind"] != "silu" or attrs["limit"] is not None or attrs["alpha"] != 1 or attrs["up_offset"]:
        return "npu_swiglu is silu without limit, alpha and offset"
    if len(call.args) == 5 and (call.args[2] is None) != (call.args[4] is None):
        return "one of the projections has a bias and the other has none"
    return None


KERNELS = (
    NpuKernel(PATTERNS["gate_up"], gate_up, "linear, npu_swiglu", 10, is_plain_silu, ("npu_swiglu",)),
    NpuKernel("gated", gated, "npu_swiglu", 10, is_plain_silu, ("npu_swiglu",)),
)
