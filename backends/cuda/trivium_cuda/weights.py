"""Resident weights below 16 bits: rounding, and repacking of storage formats that have the same numbers.

int4: groups of 32 inputs with a float16 scale, code less 8; int4_g128 likewise in groups of 128. int4_asym_g128: a float16 scale
and a zero point for 128 inputs. fp8: float8_e4m3 with a float32 scale a row; int8: whole numbers likewise; w8a8_fp8 and w8a8: the
same, times activations that are rounded to 8 bits, too. mxfp4: e2m1 with a power of two for 32 inputs. What is
repacked keeps the groups (and blocks of scales) that it was stored with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trivium.errors import UnsupportedError
from trivium.ops import Weight
from trivium_cuda.kernels import fp8, int4, int8
from trivium_cuda.kernels.int4 import Packed
from trivium_cuda.kernels.products import Matrix
from trivium_cuda.kernels.quantise import Given, Kind
from trivium_torch.weights import Int8, Resident, floats_of, make_resident

F32 = torch.float32
E4M3_MAX, E2M1_MAX_EXPONENT = 448.0, 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
"""Inputs that a block of q4_0 and of MXFP4 has."""

Index = int | slice | Tensor


@dataclass(frozen=True)
class Int4:
    """weight[..., out, in] of 4 bits, whole numbers or MXFP4, as kernels.int4 has it."""

    packed: Packed

    @property
    def shape(self) -> torch.Size:
        codes = self.packed.codes
        return torch.Size((*codes.shape[:-2], codes.shape[-1], self.packed.inputs))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.packed if isinstance(t, Tensor))

    def __getitem__(self, index: Index) -> Int4:
        """Rows of a matrix, or one of several matrices."""
        at: Any = index if self.packed.codes.dim() > 2 else (slice(None), index)
        codes, scales, zeros = (None if t is None else t[at] for t in self.packed[:3])
        assert codes is not None and scales is not None
        order = self.packed.order
        if order is not None and order.dim() > 1:
            order = order[index]
        return Int4(self.packed._replace(codes=codes, scales=scales, zeros=zeros, order=order))

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""
        return int4.unpack(self.packed, dtype)


@dataclass(frozen=True)
class Float8:
    """numbers float8_e4m3fn[..., out, in] times scales float32: one ([1, 1]), one a row ([out, 1]) or one for 128 by 128."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def __getitem__(self, index: Index) -> Float8:
        """Rows of a matrix, or one of several matrices."""
        if self.numbers.dim() > 2:
            return Float8(self.numbers[index], self.scales[index])
        return Float8(self.numbers.view(torch.uint8)[index].view(torch.float8_e4m3fn), self._scales_of_rows()[index])

    def _scales_of_rows(self) -> Tensor:
        """[out, 1], or [out, blocks]."""
        rows, out = self.scales.shape[-2], self.shape[-2]
        return self.scales.expand(out, -1) if rows == 1 else self.scales if rows == out else _spread(self.scales, -2, out)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""
        scales, (out, inputs) = self.scales, self.shape[-2:]
        if scales.shape[-2] not in (1, out):
            scales = _spread(scales, -2, out)
        if scales.shape[-1] != 1:
            scales = _spread(scales, -1, inputs)
        return (self.numbers.to(F32) * scales).to(dtype)


def _spread(scales: Tensor, dim: int, size: int) -> Tensor:
    return torch.narrow(scales.repeat_interleave(128, dim=dim), dim, 0, size)


@dataclass(frozen=True)
class W8A8:
    """A weight of 8 bits whose product takes activations that are rounded to 8 bits of the same kind, too: each row by its largest
    size, or 128 numbers of it where the weight has a scale for 128 by 128; or as the checkpoint says (`given`), and then `shift`
    float32[out] is what the offset of the rounded adds to a product, to be taken away: None for an offset of 0."""

    weight: Int8 | Float8
    given: Given | None = None
    shift: Tensor | None = None

    @property
    def kind(self) -> Kind:
        """Of the rounded rows, see kernels.quantise."""
        if self.given is not None:
            return self.given
        if isinstance(self.weight, Int8):
            return "int8"
        return "fp8" if self.weight.scales.shape[-1] == 1 else "fp8 blocks"

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.shift is None else self.shift.nbytes)

    def __getitem__(self, index: Index) -> W8A8:
        """Rows of a matrix, or one of several matrices."""
        return W8A8(self.weight[index], self.given, None if self.shift is None else self.shift[index])

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""
        return self.weight.to(dtype)


CudaResident = Resident | Int4 | Float8 | W8A8


def matrix_of(weight: CudaResident) -> Matrix:
    """What a product takes with activations as they come."""
    if isinstance(weight, W8A8):
        weight = weight.weight
    if isinstance(weight, Int4):
        return weight.packed.matrix()
    if isinstance(weight, Float8):
        return fp8.matrix(weight.numbers, weight.scales)
    return int8.matrix(weight.numbers, weight.scales) if isinstance(weight, Int8) else Matrix("float", weight, *weight.shape[-2:])


def make(weight: Weight, format: str, device: torch.device) -> CudaResident:
    """The weight in one of formats.weight_formats on the device. UnsupportedError where its shape does not allow it."""
    if format not in _MAKERS:
        return cast(CudaResident, make_resident(weight, format, device))
    try:
        stored = _REPACKED.get((weight.format, format))
        return stored(weight, device) if stored is not None else _MAKERS[format](floats_of(weight, F32).to(device))
    except ValueError as e:
        what = f"{weight.name or 'a weight'} {list(weight.shape)}, stored as {weight.format}, can't be held as {format}"
        raise UnsupportedError(f"{what}: {e}; give quantize another format", param="quantize") from e


# Rounding.


def _grouped(x: Tensor, group: int) -> Tensor:
    """[..., out, in] as [..., out, groups, group]."""
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} inputs are not whole groups of {group}")
    return x.view(*x.shape[:-1], -1, group)


def round_int4(x: Tensor, group: int) -> Int4:
    """The number of largest size in a group becomes -8 times the scale, so that all 16 codes are used."""
    runs = _grouped(x, group)
    peak = runs.gather(-1, runs.abs().argmax(dim=-1, keepdim=True))
    scales = (peak / -8).to(torch.float16)
    codes = torch.round(runs / _nonzero(scales.to(F32))).clamp(-8, 7) + 8
    return Int4(int4.pack_int4(codes.flatten(-2).to(torch.uint8), scales[..., 0]))


def round_asymmetric(x: Tensor, group: int) -> Int4:
    """From the smallest to the largest number of a group, and 0 exactly."""
    runs = _grouped(x, group)
    low, high = runs.amin(dim=-1, keepdim=True).clamp(max=0), runs.amax(dim=-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).to(torch.float16)
    step = _nonzero(scales.to(F32))
    zeros = torch.round(-low / step).clamp(0, 15)
    codes = (torch.round(runs / step) + zeros).clamp(0, 15)
    return Int4(int4.pack_int4(codes.flatten(-2).to(torch.uint8), scales[..., 0], zeros[..., 0]))


def round_fp8(x: Tensor) -> Float8:
    """The largest number of a row becomes 448, the largest of e4m3."""
    scales = x.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
    return Float8((x / _nonzero(scales)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales)


def round_mxfp4(x: Tensor) -> Int4:
    """The exponent is that of the block's largest number less that of 6 (the rule of the specification); the nearest of e2m1, of
    two the one with the even code."""
    runs = _grouped(x, BLOCK)
    exponents = torch.frexp(runs.abs().amax(dim=-1, keepdim=True)).exponent - 1 - E2M1_MAX_EXPONENT
    exponents = exponents.clamp(-127, 127)
    table = torch.tensor(E2M1, device=x.device)
    between = (table[1:] + table[:-1]) / 2
    size = torch.ldexp(runs.abs(), -exponents)
    codes = torch.bucketize(size, between, right=True)
    tied = (codes > 0) & (size == between[(codes - 1).clamp(min=0)]) & (codes % 2 == 1)
    codes = codes - tied.to(codes.dtype) + 8 * (runs < 0).to(codes.dtype)
    return Int4(int4.pack_mxfp4(codes.flatten(-2).to(torch.uint8), (exponents[..., 0] + 127).to(torch.uint8)))


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.inf, scales)


# Repacking.


def _blocks(weight: Weight, size: int, device: torch.device) -> Tensor:
    """uint8[..., out, blocks, size] of GGML's blocks of 32 numbers."""
    rows = np.ascontiguousarray(weight.data).reshape(*weight.shape[:-1], weight.shape[-1] // BLOCK, size)
    return torch.from_numpy(rows.copy()).to(device)


def _halves(packed: Tensor) -> Tensor:
    """Bytes with number j in the low and j + 16 in the high half: uint8[..., blocks, 16] -> [..., blocks * 32]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(-2)


def repack_q4_0(weight: Weight, device: torch.device) -> Int4:
    """A float16 scale, then 16 bytes of codes; a number is scale * (code - 8)."""
    blocks = _blocks(weight, 18, device)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return Int4(int4.pack_int4(_halves(blocks[..., 2:]), scales))


def repack_mxfp4(weight: Weight, device: torch.device) -> Int4:
    """An exponent plus 127, then 16 bytes of e2m1."""
    blocks = _blocks(weight, 17, device)
    return Int4(int4.pack_mxfp4(_halves(blocks[..., 1:]), blocks[..., 0].contiguous()))


def repack_groups(weight: Weight, device: torch.device) -> Int4:
    """AWQ, GPTQ and others of 4 bits, from the parts that they are stored in."""
    parts = _parts(weight)
    codes, scales, zeros, order = (_tensor(parts.get(name), device) for name in ("codes", "scales", "zeros", "order"))
    assert codes is not None and scales is not None
    return Int4(int4.pack_int4(codes, _narrowed(scales), zeros, order))


def _narrowed(scales: Tensor) -> Tensor:
    """float32 scales in the 16 bits that they were stored in, if they were."""
    halves = (scales.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((half for half in halves if torch.equal(half.to(F32), scales)), scales)


def repack_fp8(weight: Weight, device: torch.device) -> Float8:
    """The bytes as they are, with one scale, one a row, or one for each 128 by 128."""
    parts = _parts(weight)
    codes, scales = _tensor(parts["codes"], device), _tensor(parts["scales"], device)
    assert codes is not None and scales is not None
    out, block, count = weight.shape[-2], parts["block"], tuple(scales.shape[-2:])
    if count != (1, 1) and block != (128, 128) and (block[0], count) != (1, (out, 1)):
        raise ValueError(f"scales for {block[0]} by {block[1]} numbers; one, one a row, or one for 128 by 128 are possible")
    return Float8(codes.view(torch.float8_e4m3fn), scales)


def repack_int8(weight: Weight, device: torch.device) -> Int8:
    """The numbers as they are, with a scale a row."""
    parts = _parts(weight)
    codes, scales = _tensor(parts["codes"], device), _tensor(parts["scales"], device)
    assert codes is not None and scales is not None
    return Int8(codes, scales.expand(*codes.shape[:-1], 1).contiguous())


def repack_w8a8(weight: Weight, device: torch.device) -> W8A8:
    """The same, with the checkpoint's own rounding of the inputs if it has one."""
    held, inputs = repack_int8(weight, device), weight.inputs
    if inputs is None or len(weight.shape) != 2:
        return W8A8(held)
    given = Given(*inputs)
    sums = held.numbers.sum(dim=-1, dtype=torch.int32).to(F32) * held.scales[:, 0]
    return W8A8(held, given, sums * (given.scale * given.offset) if given.offset else None)


def _parts(weight: Weight) -> Mapping[str, Any]:
    found = cast(Any, weight).parts()
    if found is None:
        raise ValueError("what it is stored as was rearranged")
    return cast(Mapping[str, Any], found)


def _tensor(array: Any, device: torch.device) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array)).to(device)


_MAKERS: Mapping[str, Callable[[Tensor], CudaResident]] = {
    "int4": lambda x: round_int4(x, 32), "int4_g128": lambda x: round_int4(x, 128),
    "int4_asym_g128": lambda x: round_asymmetric(x, 128), "fp8": round_fp8, "mxfp4": round_mxfp4,
    "int8": Int8.rounded, "w8a8": lambda x: W8A8(Int8.rounded(x)), "w8a8_fp8": lambda x: W8A8(round_fp8(x)),
}  # fmt: skip
_REPACKED: Mapping[tuple[str, str], Callable[[Weight, torch.device], CudaResident]] = {
    ("q4_0", "int4"): repack_q4_0, ("mxfp4", "mxfp4"): repack_mxfp4, ("awq", "int4_asym_g128"): repack_groups,
    ("gptq_4", "int4_asym_g128"): repack_groups, ("w4a16", "int4_asym_g128"): repack_groups,
    **{(stored, "fp8"): repack_fp8 for stored in ("fp8", "w8a8_fp8")},
    **{(stored, "w8a8_fp8"): lambda weight, device: W8A8(repack_fp8(weight, device)) for stored in ("fp8", "w8a8_fp8")},
    **{(stored, "int8"): repack_int8 for stored in ("w8a16", "w8a8")},
    **{(stored, "w8a8"): repack_w8a8 for stored in ("w8a16", "w8a8")},
}  # fmt: skip
"""(storage, resident): what needs no rounding."""
