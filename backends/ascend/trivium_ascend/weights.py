"""Quantised weights as torch-npu's products take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from trivium.ops import InputScale, Weight
from trivium_ascend.chips import Chip
from trivium_ascend.operators import npu
from trivium_ascend.static import Static, make_static
from trivium_torch.weights import floats_of

FRACTAL_NZ, ND = 29, 2
"""Layouts of memory, as CANN numbers them: tiles of 16 by 32 bytes, and rows."""
PLAIN = frozenset({"float32", "float16", "bfloat16"})
GROUPS = (128, 64, 32)
"""Sizes of groups that are tried for weights that are on lattices; the product takes multiples of 32."""
GROUP = 64
WIDEST = 65535
"""Inputs and outputs that a product takes."""
BITS8, BITS4 = 127, 7
ROWS = frozenset({"w8a8", "w8a16"})
"""Formats of whole numbers of 8 bits with one scale, or one a row: their parts() say it."""
STATIC = "npu_quantize", "npu_quant_matmul", "npu_trans_quant_param"
DYNAMIC = "npu_dynamic_quant", "npu_quant_matmul"
WIDE = "npu_weight_quant_batchmatmul"
"""What products need that round activations all alike, token by token, and not at all."""


class Quantised(Protocol):
    """What kernels and trivium_torch know of such a weight, [..., out, in]."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: int | slice | Tensor) -> Quantised: ...

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""

    def product(self, x: Tensor) -> Tensor | None:
        """x[tokens, in] · weightᵀ in x's dtype (16 bits), by one fused operator; None if it doesn't take these sizes."""


@dataclass(frozen=True)
class Rows8:
    """numbers[..., out, in] int8 times scales[..., out, 1] float32. `rounds`: activations are rounded to 8 bits, too, token by
    token or by `static`. `fused`: the chip has the product that leaves them as they are."""

    numbers: Tensor
    scales: Tensor
    rounds: bool
    static: Static | None = None
    fused: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.static is None else self.static.nbytes)

    def __getitem__(self, index: int | slice | Tensor) -> Rows8:
        return Rows8(self.numbers[index], self.scales[index], self.rounds)

    def to(self, dtype: torch.dtype) -> Tensor:
        return (self.numbers.to(torch.float32) * self.scales).to(dtype)

    def product(self, x: Tensor | Rounded) -> Tensor | None:
        if self.numbers.dim() != 2 or max(self.shape) > WIDEST:
            return None
        if self.rounds:
            return rounded_product(x, self.numbers.t(), self)
        if not self.fused or isinstance(x, Rounded):
            return None
        return npu.npu_weight_quant_batchmatmul(x, self.numbers.t(), self.scales[:, 0].to(x.dtype))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Tiles8:
    """Rows8 of a matrix whose numbers lie as FRACTAL_NZ, int8[in, out]: no view of them may be taken."""

    numbers: Tensor
    scales: Tensor
    static: Static | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size(reversed(self.numbers.shape))

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.static is None else self.static.nbytes)

    def rows(self) -> Rows8:
        """The same as rows, a copy."""
        return Rows8(npu.npu_format_cast(self.numbers, ND).t().contiguous(), self.scales, True, self.static)

    def __getitem__(self, index: int | slice | Tensor) -> Rows8:
        return self.rows()[index]

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.rows().to(dtype)

    def product(self, x: Tensor | Rounded) -> Tensor | None:
        return None if max(self.shape) > WIDEST else rounded_product(x, self.numbers, self)


@dataclass(frozen=True)
class Rounded:
    """Activations in 8 bits: whole int8[tokens, in] times steps float32[tokens]; without steps, by the rule that the weight has,
    too. dtype: of 16 bits, that of products."""

    whole: Tensor
    steps: Tensor | None
    dtype: torch.dtype


def rounded_product(x: Tensor | Rounded, numbers: Tensor, weight: Rows8 | Tiles8) -> Tensor:
    """x[tokens, in] rounded to 8 bits, times numbers[in, out] and the weight's scales: by the weight's own rule, or by the largest
    size in each row / 127."""
    static = weight.static
    if static is not None:
        whole = static.rounded(x) if isinstance(x, Tensor) else x.whole
        return static.product(whole, numbers, x.dtype)
    if isinstance(x, Tensor):
        whole, steps = npu.npu_dynamic_quant(x)
        x = Rounded(whole, steps, x.dtype)
    return npu.npu_quant_matmul(x.whole, numbers, weight.scales[:, 0], pertoken_scale=x.steps, output_dtype=x.dtype)  # type: ignore[no-any-return]


TOKENS = "tokens"


def rounding(weight: Any) -> InputScale | str | None:
    """How a weight's product takes activations that are Rounded: all alike, or token by TOKENS; None: not at all."""
    rows = isinstance(weight, Rows8) and weight.rounds and weight.numbers.dim() == 2
    if not (rows or isinstance(weight, Tiles8)) or max(weight.shape) > WIDEST:
        return None
    return TOKENS if weight.static is None else weight.static.rule


@dataclass(frozen=True)
class Groups4:
    """(number + offset) * scale for each group of inputs. numbers int32[in, wide / 8], eight of 4 bits each, the first output
    in the lowest; scales and offsets [in / group, wide] in the activations' dtype. out: outputs, filled up to `wide`, a
    multiple of 8."""

    numbers: Tensor
    scales: Tensor
    offsets: Tensor
    out: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.out, self.numbers.shape[0]))

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + self.offsets.nbytes

    @property
    def group(self) -> int:
        return self.numbers.shape[0] // self.scales.shape[0]

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        return self.to(torch.float32)[index]

    def to(self, dtype: torch.dtype) -> Tensor:
        places = torch.arange(0, 32, 4, dtype=torch.int32, device=self.numbers.device)
        codes = (self.numbers[..., None] >> places & 15).flatten(1)
        whole = codes - ((codes >> 3) << 4)  # the fourth bit is a sign
        grouped = whole.to(torch.float32).view(-1, self.group, whole.shape[1]) + self.offsets.to(torch.float32)[:, None]
        numbers: Tensor = (grouped * self.scales.to(torch.float32)[:, None]).flatten(0, 1)
        return numbers.t()[: self.out].to(dtype)

    def product(self, x: Tensor) -> Tensor | None:
        if max(self.shape) > WIDEST or x.dtype != self.scales.dtype:
            return None
        group = self.group
        y = npu.npu_weight_quant_batchmatmul(x, self.numbers, self.scales, self.offsets, antiquant_group_size=group)
        return y if y.shape[1] == self.out else y[:, : self.out]  # type: ignore[no-any-return]


def lattice(x: Tensor, steps: int) -> Tensor:
    """The greatest float32 s of which all numbers of a row of x[..., n] are whole multiples: Euclid's algorithm on pairs, whose
    remainders are exact in floating point. Rows that are on no lattice of few points give anything: check the result."""
    a = x.abs()
    while a.shape[-1] > 1:
        if a.shape[-1] % 2:
            a = torch.cat([a, torch.zeros_like(a[..., :1])], dim=-1)
        a = _common(a[..., ::2], a[..., 1::2], steps)
    return a


def _common(a: Tensor, b: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        a, b = torch.maximum(a, b), torch.minimum(a, b)
        a = torch.where(b > 0, torch.fmod(a, b), a)
    return torch.maximum(a, b)


def rows8(x: Tensor, stored: bool) -> tuple[Tensor, Tensor]:
    """(numbers int8, scales) of float32 x[..., n]: those that a stored grid has, else the nearest over the largest size / 127."""
    scales = x.abs().amax(dim=-1, keepdim=True) / BITS8
    if stored:
        exact = lattice(x, 12)
        whole = torch.round(x / torch.where(exact > 0, exact, 1))
        fits = ((whole * exact == x) & (whole.abs() <= BITS8)).all(dim=-1, keepdim=True)
        scales = torch.where(fits, exact, scales)
    whole = torch.round(x / torch.where(scales == 0, torch.inf, scales))
    return whole.clamp(-BITS8, BITS8).to(torch.int8), scales


def groups4(x: Tensor, group: int, dtype: torch.dtype, stored: bool) -> tuple[Tensor, Tensor, Tensor, bool]:
    """(numbers, scales, offsets, whether all are exact) of float32 x[out, in]: int32[in, out], and [in / group, out] in a dtype."""
    parts = x.view(len(x), -1, group)
    low, high = parts.amin(dim=-1, keepdim=True).clamp(max=0), parts.amax(dim=-1, keepdim=True).clamp(min=0)
    scales, exact = ((high - low) / 15).to(dtype).to(torch.float32), torch.zeros((), dtype=torch.bool)
    if stored:
        found = lattice(parts, 8)
        points = torch.round(parts / torch.where(found > 0, found, 1))
        width = points.amax(dim=-1, keepdim=True) - points.amin(dim=-1, keepdim=True)
        fits = (points * found == parts).all(dim=-1, keepdim=True) & (width <= 15)
        scales, exact = torch.where(fits, found.to(dtype).to(torch.float32), scales), fits.all()
        low = torch.where(fits, points.amin(dim=-1, keepdim=True) * scales, low)
        parts = torch.where(fits, points * scales, parts)
    safe = torch.where(scales == 0, 1, scales)
    offsets = torch.round(low / safe) + 8
    whole = (torch.round(parts / safe) - offsets).clamp(-8, 7).to(torch.int32).flatten(1).t().contiguous()
    return whole, *(t[..., 0].t().contiguous().to(dtype) for t in (scales, offsets)), bool(exact)  # type: ignore[return-value]


def pack4(whole: Tensor) -> Tensor:
    """int32[in, out] within -8..7 as int32[in, out / 8], the first in the lowest bits, as the product takes them."""
    codes = (whole & 15).view(len(whole), -1, 8).to(torch.int64)
    packed = (codes << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def make_quantised(weight: Weight, format: str, device: torch.device, dtype: torch.dtype, chip: Chip) -> Rows8 | Groups4:
    """A weight in one of the quantised formats, in rows, as the chip multiplies it. What 4 bits can't hold (experts, inputs that
    are not whole groups) has 8."""
    columns = weight.shape[-1]
    if format == "int4" and chip.int4 and len(weight.shape) == 2 and columns % GROUPS[-1] == 0 and columns > GROUPS[-1]:
        return _make4(floats_of(weight, torch.float32), weight.format not in PLAIN, device, dtype)
    numbers, scales = stored8(weight) or rows8(floats_of(weight, torch.float32), weight.format not in PLAIN)
    static = None
    if format == "w8a8" and weight.inputs is not None and chip.lacks(*STATIC) is None and dtype != torch.float32:
        static = make_static(weight.inputs, numbers, scales, device, dtype)
    rounds = static is not None or (format == "w8a8" and chip.lacks(*DYNAMIC) is None)
    return Rows8(numbers.to(device), scales.to(device), rounds, static, chip.lacks(WIDE) is None)


def stored8(weight: Weight) -> tuple[Tensor, Tensor] | None:
    """(numbers int8, scales float32[out, 1]) that a weight is stored as; None for any other."""
    parts = cast(Any, weight).parts() if weight.format in ROWS else None
    if parts is None or (parts["scales"] < 0).any():
        return None
    numbers = np.array(parts["codes"], np.int8)
    scales = np.array(np.broadcast_to(parts["scales"], (*numbers.shape[:-1], 1)), np.float32)
    return torch.from_numpy(numbers), torch.from_numpy(scales)


def _make4(x: Tensor, stored: bool, device: torch.device, dtype: torch.dtype) -> Groups4:
    out = x.shape[0]
    x = torch.nn.functional.pad(x, (0, 0, 0, -out % 8))
    sizes = [g for g in GROUPS if x.shape[1] % g == 0 and g < x.shape[1]]
    tried = ((group, groups4(x, group, dtype, True)) for group in sizes if stored)
    exact = next((found[:3] for _, found in tried if found[3]), None)
    whole, scales, offsets = exact or groups4(x, GROUP if GROUP in sizes else GROUPS[-1], dtype, stored)[:3]
    return Groups4(pack4(whole).to(device), scales.to(device), offsets.to(device), out)


def tiled(made: Any) -> Any:
    """Rows8 that an 8-bit product takes, as tiles; anything else as it is."""
    if not isinstance(made, Rows8) or not made.rounds or made.numbers.dim() != 2 or max(made.shape) > WIDEST:
        return made
    return Tiles8(npu.npu_format_cast(made.numbers.t().contiguous(), FRACTAL_NZ), made.scales, made.static)


def _rule(weight: Rows8) -> InputScale | None:
    return None if weight.static is None else weight.static.rule


def joined(a: Any, b: Any) -> Any:
    """One weight whose outputs are a's and then b's; None where they are of different kinds."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype:
        return torch.cat([a, b], dim=-2)
    if isinstance(a, Rows8) and isinstance(b, Rows8) and a.rounds == b.rounds and _rule(a) == _rule(b):
        static = None if a.static is None or b.static is None else a.static.beside(b.static)
        numbers, scales = torch.cat([a.numbers, b.numbers], dim=-2), torch.cat([a.scales, b.scales], dim=-2)
        return Rows8(numbers, scales, a.rounds, static, a.fused)
    if isinstance(a, Groups4) and isinstance(b, Groups4) and a.group == b.group and a.out % 8 == 0:
        numbers, scales = torch.cat([a.numbers, b.numbers], dim=1), torch.cat([a.scales, b.scales], dim=1)
        return Groups4(numbers, scales, torch.cat([a.offsets, b.offsets], dim=1), a.out + b.out)
    return None


@dataclass(frozen=True)
class Part:
    """Outputs start..stop of a weight [..., out, in] that was joined with another: what is left of either."""

    whole: Any
    start: int
    stop: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.whole.shape[:-2], self.stop - self.start, self.whole.shape[-1]))

    @property
    def nbytes(self) -> int:
        return int(self.whole.nbytes * (self.stop - self.start) // self.whole.shape[-2])

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        return self.to(torch.float32)[index]

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.whole.to(dtype)[..., self.start : self.stop, :]  # type: ignore[no-any-return]

    def product(self, x: Tensor) -> Tensor | None:
        return None
