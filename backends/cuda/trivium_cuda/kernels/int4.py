"""Weights of four bits: whole numbers with scales and zero points in groups (AWQ, GPTQ), and the small floats of MXFP4."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivium_cuda.kernels.products import Matrix, product

MX_GROUP = 32


class Packed(NamedTuple):
    """codes uint8[..., in / 2, out]: the inputs in runs of 2 * half; byte j of a run has input j in its low and input half + j in
    its high bits, so that both are neighbours of their like in a tile. scales[..., groups, out]: of int4 any float type; of MXFP4
    uint8, an exponent plus 127. zeros[..., groups, out], exact in the activations' dtype; None: 8. order int32[..., in] or None:
    input i of the codes is input order[i] of x. group: inputs of a group. inputs: their number without what fills up the last
    run."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group: int
    inputs: int

    @property
    def half(self) -> int:
        return half_of(self.group)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros, self.order) if t is not None)

    @property
    def shape(self) -> torch.Size:
        """Of the weight: [..., out, in]."""
        return torch.Size([*self.codes.shape[:-2], self.codes.shape[-1], self.inputs])

    def matrix(self) -> Matrix:
        kind = "mxfp4" if self.scales.dtype == torch.uint8 else "int4"
        return Matrix(
            kind, self.codes, self.codes.shape[-1], self.inputs, self.scales, self.zeros, self.order, self.group, self.half
        )


def half_of(group: int) -> int:
    """Half of a run: what a product takes in one step must be of one group."""
    for half in (64, 32, 16):
        if group % half == 0:
            return half
    raise ValueError(f"groups of {group} inputs are not a multiple of 16")


def _runs(codes: Tensor, half: int) -> Tensor:
    """uint8[..., out, in] -> uint8[..., in / 2, out], filled up with zeros to whole runs."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (2 * half)))
    run = codes.unflatten(-1, (-1, 2, half))
    packed: Tensor = run[..., 0, :] | run[..., 1, :] << 4
    return packed.flatten(-2).transpose(-1, -2).contiguous()


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None) -> Packed:
    """Packs weight[..., o, i] = scales[..., o, g] * (codes[..., o, i] - zeros[..., o, g]), g = i / group: codes uint8[..., out, in]
    below 16, groups of in / groups inputs. ValueError for groups that are no multiple of 16, and of all inputs no multiple."""
    inputs, groups = codes.shape[-1], scales.shape[-1]
    group = inputs // groups if groups > 1 else -(-inputs // 128) * 128
    if groups > 1 and inputs % groups:
        raise ValueError(f"{inputs} inputs can't be {groups} groups of one size")
    turned = scales.transpose(-1, -2).contiguous()
    points = None if zeros is None else zeros.to(scales.dtype).transpose(-1, -2).contiguous()
    where = None if order is None else order.to(torch.int32)
    return Packed(_runs(codes, half_of(group)), turned, points, where, group, inputs)


def pack_mxfp4(codes: Tensor, exponents: Tensor) -> Packed:
    """Packs e2m1 codes uint8[..., out, in] below 16 with exponents plus 127, uint8[..., out, in / 32]
    (OCP 2023, "Microscaling Formats (MX) Specification 1.0")."""
    if codes.shape[-1] != MX_GROUP * exponents.shape[-1]:
        raise ValueError(f"{codes.shape[-1]} inputs are not {exponents.shape[-1]} blocks of {MX_GROUP}")
    scales = exponents.transpose(-1, -2).contiguous()
    return Packed(_runs(codes, half_of(MX_GROUP)), scales, None, None, MX_GROUP, codes.shape[-1])


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """weight[..., out, in] itself; in the order of x."""
    codes = packed.codes.transpose(-1, -2).unflatten(-1, (-1, packed.half))
    both = torch.stack([codes & 15, codes >> 4], dim=-2).flatten(-3)[..., : packed.inputs]
    of = torch.arange(packed.inputs, device=codes.device) // packed.group
    scales = packed.scales.transpose(-1, -2)
    if scales.dtype == torch.uint8:
        small = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        table = torch.cat([small, -small])
        weight = torch.ldexp(table[both.long()], scales[..., of].to(torch.int32) - 127)
    else:
        points = 8.0 if packed.zeros is None else packed.zeros.transpose(-1, -2)[..., of].to(torch.float32)
        weight = scales[..., of].to(torch.float32) * (both.to(torch.float32) - points)
    if packed.order is not None:
        weight = weight.gather(-1, torch.argsort(packed.order)[..., None, :].expand(weight.shape))
    return weight.to(dtype)


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """The operator linear of x[..., in] with a packed matrix, in x's dtype. Numbers less their zero points are exact; scales are
    applied to float32 sums of a group."""
    y = product(x, packed.matrix(), bias, x.dtype, invariant=invariant)
    return y.view(*x.shape[:-1], y.shape[-1])
