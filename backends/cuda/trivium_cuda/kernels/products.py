"""Products of activations as they come with weights in any resident form, of all rows with one matrix or of some with each.

A tile's sum over the inputs goes forward in steps; for few rows the inputs are also split into parts that run side by side, whose
sums are then added in their order. The split depends on the matrix alone, tiles on the number of rows (unless `invariant`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.attention import TYPES
from trivium_cuda.kernels.common import capability, flat, from_e4m3

FILLING = 264
"""Programs that keep a large chip's memory busy."""
NATIVE_FP8 = 89
"""The first capability whose matrix units take e4m3; others get its numbers as float16, which holds them exactly."""
ROWS_DEPTH = 128
"""Inputs of a step of bytes with bytes: those that share a scale where there are several for a row."""


@dataclass(frozen=True)
class Matrix:
    """A weight[experts, n, k], or [n, k], as the kernel takes it.

    kind: "float", "int8" and "fp8" (numbers[..., n, k]; scales with the strides `scale_row` and, for blocks of 128 by 128,
    `scale_block`), "int4" and "mxfp4" (numbers uint8[..., k / 2, n], see int4.Packed).
    """

    kind: str
    numbers: Tensor
    n: int
    k: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    half: int = 16
    scale_row: int = 0
    scale_block: int = 0

    @property
    def packed(self) -> bool:
        return self.kind in ("int4", "mxfp4")

    @property
    def raw(self) -> Tensor:
        return self.numbers.view(torch.uint8) if self.numbers.dtype == torch.float8_e4m3fn else self.numbers


class Routes(NamedTuple):
    """Blocks of rows that belong to one expert each: experts int32[blocks] (-1: none), rows int32[blocks * size], a row of the
    result each, or their number where a block is not full; row r of the result is made of row r // divisor of x."""

    experts: Tensor
    rows: Tensor
    divisor: int
    size: int


class Plan(NamedTuple):
    """Tile and number of parts of a product."""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int


@triton.jit
def _power_of_two(e):
    """2 ** (e - 127) of a byte e < 255 as float32."""
    wide = e.to(tl.int32)
    return tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def _small_float(code):
    """The numbers of e2m1 codes as float16: its 3 bits of exponent and fraction are a float16's with a bias less by 14."""
    wide = code.to(tl.int16)
    return (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _scaled_half(
    acc, code, X, at, order, i, k, live, S, Z, g, group, c, n, inside,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """acc + x · numbers * scale of the inputs i, which are all of one group g; code: uint8[inputs, columns]. The last run may be
    filled up by a group that isn't there."""
    column, inside = i, inside & (g * group < k)
    if ORDERED:
        column = tl.load(order + i, mask=i < k, other=0)
    x = tl.load(X + at[:, None] + column[None, :], mask=live[:, None] & (i < k)[None, :], other=0.0).to(C)
    scale = tl.load(S + g * n + c, mask=inside, other=0)
    if KIND == "mxfp4":
        w, factor = _small_float(code).to(C), _power_of_two(scale)
    else:
        factor = scale.to(tl.float32)
        if ZEROS:
            w = code.to(C) - tl.load(Z + g * n + c, mask=inside, other=0.0).to(C)[None, :]
        else:
            w = code.to(C) - 8.0
    return acc + tl.dot(x, w.to(C), input_precision="ieee") * factor[None, :]


# Reads the weight once for every ROWS rows (n * k numbers of 2 to 0.5 bytes, and scales), x once for every COLUMNS columns, and
# does 2 * m * n * k operations. With parts it writes and reads 4 * parts * m * n bytes more.
@triton.jit
def _product(
    X, W, S, Z, order, bias, OUT, experts, rows_of,
    m, n, k, x_row, expert_w, expert_s, expert_o, group, scale_row, scale_block, share, divisor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    BIASED: tl.constexpr, ROUTED: tl.constexpr, PARTS: tl.constexpr, BLOCKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, inside = block * ROWS + tl.arange(0, ROWS), c < n
    if ROUTED:
        expert = tl.load(experts + block).to(tl.int64)
        if expert < 0:
            return
        row = tl.load(rows_of + row)
        W += expert * expert_w
        S += expert * expert_s
        Z += expert * expert_s
        bias += expert * n
        order += expert * expert_o
    live, at = row < m, (row // divisor).to(tl.int64) * x_row
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    low = part * share
    for start in range(low, tl.minimum(k, low + share), DEPTH):
        if KIND == "int4" or KIND == "mxfp4":
            half: tl.constexpr = DEPTH // 2
            j = tl.arange(0, half)
            byte = (start // 2 + j).to(tl.int64)
            code = tl.load(W + byte[:, None] * n + c[None, :], mask=inside[None, :], other=0)
            i, g = start + j, start // group
            acc = _scaled_half(acc, code & 15, X, at, order, i, k, live, S, Z, g, group, c, n, inside, KIND, ZEROS, ORDERED, C)
            i, g = start + half + j, (start + half) // group
            acc = _scaled_half(acc, code >> 4, X, at, order, i, k, live, S, Z, g, group, c, n, inside, KIND, ZEROS, ORDERED, C)
        else:
            i = start + tl.arange(0, DEPTH)
            x = tl.load(X + at[:, None] + i[None, :], mask=live[:, None] & (i < k)[None, :], other=0.0).to(C)
            w = tl.load(W + c.to(tl.int64)[None, :] * k + i[:, None], mask=inside[None, :] & (i < k)[:, None], other=0)
            if KIND == "fp8":
                w = from_e4m3(w)
            if BLOCKED:
                factor = tl.load(S + c // 128 * scale_row + start // 128 * scale_block, mask=inside, other=0.0)
                acc += tl.dot(x, w.to(C), input_precision="ieee") * factor[None, :]
            else:
                acc = tl.dot(x, w.to(C), acc, input_precision="ieee")
    if (KIND == "int8" or KIND == "fp8") and not BLOCKED:
        acc = acc * tl.load(S + c * scale_row, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIASED and PARTS == 1:
        acc += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = OUT + (part * m + row).to(tl.int64)[:, None] * n + c[None, :]
    tl.store(to, acc.to(OUT.dtype.element_ty), mask=live[:, None] & inside[None, :])


# Reads 4 * parts bytes and writes a number for each of a row's n sums.
@triton.jit
def _add_parts(PARTIAL, bias, OUT, size, n, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(PARTIAL + part * size + i, mask=i < size, other=0.0)
    if BIASED:
        total += tl.load(bias + i % n, mask=i < size, other=0.0).to(tl.float32)
    tl.store(OUT + i, total.to(OUT.dtype.element_ty), mask=i < size)


def plan(m: int, w: Matrix, dtype: torch.dtype, device: torch.device, *, invariant: bool, routed: int = 0) -> Plan:
    """`routed`: rows of a block of Routes."""
    chip, wide = capability(device), dtype == torch.float32
    roomy, warpgroups = chip in (80, 90, 100, 103), chip in (90, 100, 103)
    depth = 2 * w.half if w.packed else 32 if wide else 64 if m > 32 or w.scale_block else 128
    few = routed <= 16 if routed else invariant or m <= 32
    if few:
        stages = 1 if wide else 4 if roomy else 3
        parts = 1 if routed else parts_of(w.n, w.k, 64)
        return Plan(16, 64, depth, parts, 4, stages)
    if wide or (routed or m) <= 64 or (w.packed and not warpgroups):
        mixed = w.order is not None and not warpgroups  # where x lies is loaded first, and takes registers
        rows = 32 if wide or mixed else 64
        deep = roomy and (warpgroups or not w.packed)
        return Plan(routed or rows, 64, depth, 1, 4, 1 if wide or mixed else 3 if deep else 2)
    columns = 64 if w.packed else 128  # a group's own sum takes as many registers as the sum of all
    return Plan(routed or 128, columns, depth, 1, 8, 3 if roomy and not w.scale_block else 2)


def parts_of(n: int, k: int, columns: int) -> int:
    """Parts that fill a chip, of 512 inputs at least."""
    wanted = triton.cdiv(FILLING, triton.cdiv(n, columns))
    return int(max(1, min(wanted, k // 512, 16)))


def rows_plan(m: int, n: int, k: int, device: torch.device, *, kind: str, invariant: bool) -> Plan:
    """Of rows of bytes ("int8" or "fp8") with a matrix[n, k] of them. `parts` depends on the matrix alone."""
    chip = capability(device)
    warpgroups, stages = chip in (90, 100, 103), 3 if kind == "int8" or chip >= NATIVE_FP8 else 2
    if invariant or m <= 32:
        return Plan(16, 64, ROWS_DEPTH, parts_of(n, k, 64), 4, stages)
    if m <= 256 or (kind == "fp8" and not warpgroups):
        return Plan(64, 64, ROWS_DEPTH, 1, 4, stages)
    return Plan(128, 128, ROWS_DEPTH, 1, 8, stages)


def split(k: int, p: Plan) -> tuple[int, int]:
    """(inputs of a part, parts): whole steps, and no part without inputs."""
    share = triton.cdiv(triton.cdiv(k, p.depth), p.parts) * p.depth
    return share, triton.cdiv(k, share)


def product(
    x: Tensor, w: Matrix, bias: Tensor | None, out_dtype: torch.dtype, *, invariant: bool = False, routes: Routes | None = None,
    rows: int | None = None, tile: Plan | None = None,
) -> Tensor:  # fmt: skip
    """x[m, k] · wᵀ + bias in out_dtype, [m, n]; with `routes` [rows, n], each row by its expert's matrix. The products are of x's
    dtype, or float32 if the weight is; sums of float32. tile: None is plan's."""
    x = flat(x)
    m = x.shape[0] if rows is None else rows
    out = torch.empty((m, w.n), dtype=out_dtype, device=x.device)
    if not m:
        return out
    dtype = torch.promote_types(x.dtype, w.numbers.dtype) if w.kind == "float" else x.dtype
    p = tile or plan(m, w, dtype, x.device, invariant=invariant, routed=routes.size if routes else 0)
    share, parts = split(w.k, p)
    to = out if parts == 1 else torch.empty((parts, m, w.n), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(m, p.rows) if routes is None else len(routes.experts)
    scales, order = x if w.scales is None else w.scales, x if w.order is None else w.order
    each = order.stride(0) if w.order is not None and order.dim() > 1 else 0
    constants: dict[str, Any] = {
        "ROWS": p.rows, "COLUMNS": p.columns, "DEPTH": p.depth, "KIND": w.kind, "ZEROS": w.zeros is not None,
        "ORDERED": w.order is not None, "BIASED": bias is not None, "ROUTED": routes is not None, "PARTS": parts,
        "BLOCKED": w.scale_block > 0, "C": TYPES[dtype],
    }  # fmt: skip
    _product[(blocks, triton.cdiv(w.n, p.columns), parts)](
        x, w.raw, scales, scales if w.zeros is None else w.zeros, order, x if bias is None else bias,
        to, routes.experts if routes else x, routes.rows if routes else x, m, w.n, w.k, x.stride(0), w.numbers.stride(0),
        scales.stride(0), each, w.group, w.scale_row, w.scale_block, share, routes.divisor if routes else 1, num_warps=p.warps,
        num_stages=p.stages, **constants,
    )  # fmt: skip
    if parts > 1:
        add_parts(to, bias, out)
    return out


def add_parts(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out[m, n] = the sum of partial float32[parts, m, n] in their order, plus bias[n]."""
    _add_parts[(triton.cdiv(out.numel(), 1024),)](
        partial, out if bias is None else bias, out, out.numel(), out.shape[-1], PARTS=len(partial), BLOCK=1024,
        BIASED=bias is not None, num_warps=4,
    )  # fmt: skip
