"""What launchers and kernels share: sizes, the device's capability, rounding, small functions."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HOST = 80
"""The capability that kernels are laid out for where there is no device: in Triton's interpreter, or compiled ahead of time."""


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability(device: torch.device) -> int:
    """10 * major + minor of a device's compute capability."""
    return _capability(device) if device.type == "cuda" else HOST


class Rows(NamedTuple):
    """Quantised rows: numbers[rows, n] int8 or float8_e4m3fn, times scales float32: [rows, 1], or [rows, n / 128]."""

    numbers: Tensor
    scales: Tensor


def power(n: int, least: int = 1) -> int:
    """The next power of two, but `least`."""
    return max(least, int(triton.next_power_of_2(n)))


def warps(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers: 16 to 32 a thread."""
    return min(max(block // 512, 1), 16)


def flat(x: Tensor) -> Tensor:
    """x[..., n] as [rows, n] with a contiguous last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def first_tile(starts, seq, G, ROWS: tl.constexpr):
    """The number of the first tile of a sequence: there is one more for each than rows need, so that no table is needed."""
    return tl.load(starts + seq) * G // ROWS + seq


@triton.jit
def sequence_of(tile, starts, seqs, G, ROWS: tl.constexpr):
    """The sequence whose tile this is, by bisection."""
    low, high = 0, seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        here = first_tile(starts, middle, G, ROWS) <= tile
        low, high = tl.where(here, middle, low), tl.where(here, high, middle - 1)
    return low


@triton.jit
def round_even(x):
    """Nearest whole number of float32 |x| < 2**22, ties to even: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_bfloat16(x):
    """float32 rounded to what a bfloat16 holds, ties to even, still as float32; by whole numbers, so that it is so everywhere."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32 as the bytes of float8_e4m3fn, to nearest, ties to even; |x| > 448 becomes 448. By whole numbers, since chips below
    capability 89 have no such conversion (OCP 2023, "8-bit floating point specification")."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = round_even(size * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """The bytes of float8_e4m3fn as float16, exactly (the two codes of NaN become ±480): its 4 bits of exponent are a float16's
    with a bias less by 8."""
    wide = code.to(tl.int16)
    bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def largest(x, KIND: tl.constexpr):
    """The number that a row's largest size is stored as."""
    return 127.0 if KIND == "int8" else 448.0


@triton.jit
def quantised(x, scale, KIND: tl.constexpr):
    """float32 x over its scale as bytes: int8, or those of float8_e4m3fn; a scale of 0 gives zeros."""
    q = tl.div_rn(x, tl.where(scale == 0.0, float("inf"), scale) + tl.zeros_like(x))
    if KIND == "int8":
        code = round_even(tl.minimum(tl.maximum(q, -127.0), 127.0)).to(tl.int8)
    else:
        code = to_e4m3(q)
    return code


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """From the exponential of -2|x|, which can't overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, KIND: tl.constexpr, alpha):
    """The operator `activation` on float32; silu with its factor alpha."""
    if KIND == "silu":
        y = x * sigmoid(alpha * x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "quick_gelu":
        y = x * sigmoid(1.702 * x)
    elif KIND == "sigmoid":
        y = sigmoid(x)
    elif KIND == "tanh":
        y = tanh(x)
    else:
        tl.static_assert(KIND == "softplus", "unknown activation")
        y = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return y


@triton.jit
def gate(g, up, limit, alpha, up_offset, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """The operator `gated` on float32."""
    if LIMITED:
        g = tl.minimum(g, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return activate(g, KIND, alpha) * (up + up_offset)
