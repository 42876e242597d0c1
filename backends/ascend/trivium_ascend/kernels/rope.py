"""Rotary embedding, and storing keys and values in their pages.

Cosines and sines are computed in float32 for the positions of the step, once for all layers, and rounded to the activations' dtype,
in which the operators want them. npu_mrope turns queries and keys in one pass; a page write moves 2 bytes a number twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops import Call
from trivium_ascend.kernels.table import NpuKernel, first
from trivium_ascend.operators import npu
from trivium_ascend.pages import Blocks
from trivium_ascend.session import AscendSession
from trivium_torch.kernels.attention import kv_write as plain_write
from trivium_torch.kernels.dense import Args, Attrs, turns
from trivium_torch.kernels.dense import rope as plain_rope
from trivium_torch.kernels.fused import PATTERNS

MULTIPLE = 32
"""npu_mrope wants head size and rotated part in whole steps of so many numbers (16 would do in float32)."""
SCATTER = "npu_scatter_pa_kv_cache"
ROWS = "npu_scatter_nd_update_"


def step_table(
    session: AscendSession, positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(int32[tokens] 0, 1, 2 ..., cosines and sines of the step's tokens [tokens, 2 * half]): a table that holds no other
    position."""

    def make() -> tuple[Tensor, Tensor]:
        cos, sin = turns(session, positions, inv_freq, scale)
        rows = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return rows, torch.cat([cos, sin], dim=-1)[:, 0].to(dtype)

    return session.once(("mrope", id(positions), id(inv_freq), scale, dtype), make)  # type: ignore[no-any-return]


def full_turns(
    session: AscendSession, positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [tokens, 1, 2 * half], one for each number of a head."""

    def make() -> tuple[Tensor, Tensor]:
        cos, sin = (t.to(dtype) for t in turns(session, positions, inv_freq, scale))
        if interleaved:
            return twice(cos), twice(sin)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return session.once(("turns", id(positions), id(inv_freq), scale, dtype, interleaved), make)  # type: ignore[no-any-return]


def twice(x: Tensor) -> Tensor:
    """Each number of a row two times, side by side."""
    return torch.stack([x, x], dim=-1).flatten(-2)


def rope(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """The rotated part of each head by npu_rotary_mul; the rest passes through."""
    x, positions, inv_freq = args
    if not x.numel():
        return x  # type: ignore[no-any-return]
    cos, sin = full_turns(session, positions, inv_freq, attrs["scale"], x.dtype, attrs["interleaved"])
    width = cos.shape[-1]
    y = npu.npu_rotary_mul(x[..., :width].contiguous(), cos, sin, "interleave" if attrs["interleaved"] else "half")
    return y if width == x.shape[-1] else torch.cat([y, x[..., width:]], dim=-1)


def store(kv: Blocks, k: Tensor, v: Tensor) -> bool:
    """Writes the step's keys and values [tokens, heads, n] by the operator; False if the pages are of another kind than numbers."""
    if kv.scales:
        return False
    kept, slots = kv.step.writes()
    if slots.numel():
        rows = (x if kept is None else x[kept] for x in (k, v))
        k, v = (x.to(block.dtype).contiguous() for x, block in zip(rows, kv.blocks, strict=True))
        npu.npu_scatter_pa_kv_cache(k, v, *kv.blocks, slots, cache_mode="Norm")
    return True


def kv_write(session: AscendSession, args: Args, attrs: Attrs) -> Blocks:
    kv: Blocks = args[0]
    return kv if store(kv, args[1], args[2]) else plain_write(session, args, attrs)  # type: ignore[return-value]


def kv_scatter(session: AscendSession, args: Args, attrs: Attrs) -> Blocks:
    """Keys and values, each by a call of the operator that writes rows wherever it is told."""
    kv: Blocks = args[0]
    if kv.scales:
        return plain_write(session, args, attrs)  # type: ignore[return-value]
    kept, slots = kv.step.writes()
    if slots.numel():
        for x, block in zip(args[1:3], kv.blocks, strict=True):
            rows = (x if kept is None else x[kept]).to(block.dtype)
            npu.npu_scatter_nd_update_(block.flatten(0, 1), slots.to(torch.int64)[:, None], rows)
    return kv


def latent_scatter(session: AscendSession, args: Args, attrs: Attrs) -> Blocks:
    return kv_scatter(session, (args[0], args[1][:, None], args[2][:, None]), attrs)


def latent_write(session: AscendSession, args: Args, attrs: Attrs) -> Blocks:
    return kv_write(session, (args[0], args[1][:, None], args[2][:, None]), attrs)


def rope_write(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Blocks]:
    """npu_mrope on queries and keys together."""
    q, k, v, positions, inv_freq, kv = args
    rows, table = step_table(session, positions, inv_freq, attrs["scale"], q.dtype)
    mode = "interleave" if attrs["interleaved"] else "half"
    turned, key = npu.npu_mrope(rows, q.flatten(1), k.flatten(1), table, q.shape[-1], mrope_section=[0, 0, 0], rotary_mode=mode)
    return turned.view(q.shape), kv_write(session, (kv, key.view(k.shape), v), {})


def rope_write_apart(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Blocks]:
    """npu_rotary_mul on queries and keys apart: for heads of sizes that npu_mrope doesn't take."""
    q, k, v, positions, inv_freq, kv = args
    key = rope(session, (k, positions, inv_freq), attrs)
    return rope(session, (q, positions, inv_freq), attrs), kv_write(session, (kv, key, v), {})


def rope_scatter(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Blocks]:
    """Turned by plain torch, where only rows can be written."""
    q, k, v, positions, inv_freq, kv = args
    key = plain_rope(session, (k, positions, inv_freq), attrs)
    return plain_rope(session, (q, positions, inv_freq), attrs), kv_scatter(session, (kv, key, v), {})


def mrope_fits(call: Call) -> str | None:
    q, inv_freq = call.args[0], call.args[4]
    assert q is not None and inv_freq is not None
    width: Any = q.shape[-1]
    half: Any = inv_freq.shape[0]
    rotated = 2 * half
    if width % MULTIPLE or rotated % MULTIPLE:
        return f"npu_mrope takes heads and rotated parts of multiples of {MULTIPLE}, not {width} and {rotated}"
    return None


def rotary_fits(call: Call) -> str | None:
    x: Any = call.args[0]
    inv_freq: Any = call.args[2] if call.name == "rope" else call.args[4]
    heads, rotated = x.shape[1], 2 * inv_freq.shape[0]
    if rotated >= 896 or heads >= 1000:
        return f"npu_rotary_mul takes less than 896 numbers a head and 1000 heads, not {rotated} and {heads}"
    return None


KERNELS = (
    NpuKernel("rope", rope, "npu_rotary_mul", 10, rotary_fits, ("npu_rotary_mul",)),
    NpuKernel("kv_write", kv_write, SCATTER, 10, needs=(SCATTER,)),
    NpuKernel("latent_write", latent_write, SCATTER, 10, needs=(SCATTER,)),
    NpuKernel("kv_write", kv_scatter, ROWS, 8, needs=(ROWS,)),
    NpuKernel("latent_write", latent_scatter, ROWS, 8, needs=(ROWS,)),
    NpuKernel(PATTERNS["rope_write"], rope_write, f"npu_mrope, {SCATTER}", 10, mrope_fits, ("npu_mrope", SCATTER)),
    NpuKernel(
        PATTERNS["rope_write"], rope_write_apart, f"npu_rotary_mul, npu_rotary_mul, {SCATTER}", 5, first(rotary_fits),
        ("npu_rotary_mul", SCATTER),
    ),
    NpuKernel(PATTERNS["rope_write"], rope_scatter, f"rope, rope, {ROWS}", 4, needs=(ROWS,)),
)  # fmt: skip
