"""Rotation of queries and keys, with the norm before it and the store of keys and values behind it in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import largest, power, quantised, to_bfloat16


class Store(NamedTuple):
    """Rows of a paged state as trivium_torch keeps them: numbers[kv_heads, slots, n], and for int8 and float8_e4m3fn
    scales[kv_heads, slots, 1] bfloat16. Scales with a stride of 0 along the slots are given; others are made with each row."""

    numbers: Tensor
    scales: Tensor | None = None

    @property
    def kind(self) -> str:
        """Empty for floats, else "int8", "fp8" or "fp8 given"; ValueError for bytes without scales."""
        if self.scales is None:
            if self.numbers.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
                raise ValueError(f"numbers of {self.numbers.dtype} are stored with scales, and there are none")
            return ""
        if self.numbers.dtype == torch.int8:
            return "int8"
        return "fp8" if self.scales.stride(1) else "fp8 given"

    @property
    def raw(self) -> Tensor:
        """The numbers as kernels take them: float8 as uint8."""
        return self.numbers.view(torch.uint8) if self.numbers.dtype == torch.float8_e4m3fn else self.numbers

    def arguments(self) -> tuple[Any, ...]:
        """(numbers, scales, stride of a head's numbers, of its scales, of a slot's scale)."""
        scales = self.numbers if self.scales is None else self.scales
        return self.raw, scales, self.numbers.stride(0), scales.stride(0), scales.stride(1)


@triton.jit
def row_scale(top, SCALES, at, KIND: tl.constexpr):
    """The scale of a row whose largest size is `top`: read, or made and stored in bfloat16."""
    if KIND == "fp8 given":
        scale = tl.load(SCALES + at).to(tl.float32)
    else:
        scale = to_bfloat16(tl.div_rn(top, largest(top, KIND)))
        tl.store(SCALES + at, scale.to(tl.bfloat16))
    return scale


@triton.jit
def as_stored(x, scale, STORED: tl.constexpr, KIND: tl.constexpr):
    """float32 x in the form of a store."""
    if KIND == "":
        y = x.to(STORED)
    elif KIND == "int8":
        y = quantised(x, scale, "int8")
    else:
        y = quantised(x, scale, "fp8")
    return y


@triton.jit
def put(x, c, n, head, slot, NUMBERS, SCALES, head_stride, scale_head, scale_slot, KIND: tl.constexpr):
    """Stores a row x, float32[BLOCK] with zeros beyond n, at slot >= 0."""
    scale = 1.0
    if KIND != "":
        scale = row_scale(tl.max(tl.abs(x), 0), SCALES, head * scale_head + slot * scale_slot, KIND)
    tl.store(NUMBERS + head * head_stride + slot * n + c, as_stored(x, scale, NUMBERS.dtype.element_ty, KIND), mask=c < n)


# Reads and writes a row of n numbers for each of a token's key and value heads.
@triton.jit
def _write(
    X, token_stride, head_stride_x, slots, NUMBERS, SCALES, head_stride, scale_head, scale_slot, n,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        c = tl.arange(0, BLOCK)
        x = tl.load(X + token * token_stride + head * head_stride_x + c, mask=c < n, other=0.0).to(tl.float32)
        put(x, c, n, head, slot, NUMBERS, SCALES, head_stride, scale_head, scale_slot, KIND)


# A program takes one head of one token: reads its n numbers and writes them; a key head's program also moves the value head.
# About 6 n operations, 10 n with the norm, and a cosine and a sine for each pair.
@triton.jit
def _turn(
    Q, K, V, OUT, QW, KW, positions, inv_freq, slots, heads, half, n, q_token, q_head, k_token, k_head, v_token, v_head, factor,
    eps, offset, KN, KS, k_store, k_scale_head, k_scale_slot, VN, VS, v_store, v_scale_head, v_scale_slot,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    WRITE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i, r = tl.arange(0, HALF), tl.arange(0, REST)
    pair, over = i < half, 2 * half + r < n
    first, second, rest = (2 * i, 2 * i + 1, 2 * half + r) if INTERLEAVED else (i, half + i, 2 * half + r)
    is_key = head >= heads
    row = K + token * k_token + (head - heads) * k_head if is_key else Q + token * q_token + head * q_head
    a = tl.load(row + first, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=pair, other=0.0).to(tl.float32)
    c = tl.load(row + rest, mask=over, other=0.0).to(tl.float32)
    dtype = Q.dtype.element_ty
    if NORM:
        square = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
        root = tl.sqrt(square / n + eps)
        weight = KW if is_key else QW
        a = (a / root * (offset + tl.load(weight + first, mask=pair, other=0.0).to(tl.float32))).to(dtype).to(tl.float32)
        b = (b / root * (offset + tl.load(weight + second, mask=pair, other=0.0).to(tl.float32))).to(dtype).to(tl.float32)
        c = (c / root * (offset + tl.load(weight + rest, mask=over, other=0.0).to(tl.float32))).to(dtype).to(tl.float32)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + i, mask=pair, other=0.0)
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    x, y = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if not is_key:
        out = OUT + (token * heads + head) * n
        tl.store(out + first, x, mask=pair)
        tl.store(out + second, y, mask=pair)
        tl.store(out + rest, c.to(dtype), mask=over)
    elif WRITE:
        slot = tl.load(slots + token)
        if slot >= 0:
            at, scale, key = head - heads, 1.0, KN + (head - heads) * k_store + slot * n
            if KIND != "":
                size = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0), tl.max(tl.abs(y.to(tl.float32)), 0))
                scale = row_scale(tl.maximum(size, tl.max(tl.abs(c), 0)), KS, at * k_scale_head + slot * k_scale_slot, KIND)
            stored = KN.dtype.element_ty
            tl.store(key + first, as_stored(x.to(tl.float32), scale, stored, KIND), mask=pair)
            tl.store(key + second, as_stored(y.to(tl.float32), scale, stored, KIND), mask=pair)
            tl.store(key + rest, as_stored(c, scale, stored, KIND), mask=over)
            d = tl.arange(0, BLOCK)
            value = tl.load(V + token * v_token + at * v_head + d, mask=d < n, other=0.0).to(tl.float32)
            put(value, d, n, at, slot, VN, VS, v_store, v_scale_head, v_scale_slot, KIND)


def _store_rows(store: Store, x: Tensor, slots: Tensor) -> None:
    """x[tokens, heads, n]."""
    tokens, heads, n = x.shape
    if tokens:
        _write[(tokens, heads)](
            x, x.stride(0), x.stride(1), slots, *store.arguments(), n, BLOCK=power(n), KIND=store.kind, num_warps=1
        )


def kv_write(keys: Store, values: Store, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """The operator kv_write of k, v[tokens, kv_heads, n]; slots int64[tokens]."""
    _store_rows(keys, k, slots)
    _store_rows(values, v, slots)


def latent_write(latents: Store, ropes: Store, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """The operator latent_write of latent[tokens, rank], rope[tokens, rope_dim]."""
    kv_write(latents, ropes, latent[:, None], rope[:, None], slots)


def _launch(
    q: Tensor, k: Tensor | None, v: Tensor | None, weights: tuple[Tensor, Tensor] | None, positions: Tensor, inv_freq: Tensor,
    stores: tuple[Store, Store] | None, slots: Tensor | None,
    *, interleaved: bool, scale: float, eps: float = 0.0, offset: float = 0.0,
) -> Tensor:  # fmt: skip
    tokens, heads, n = q.shape
    out = torch.empty((tokens, heads, n), dtype=q.dtype, device=q.device)
    k, v = q if k is None else k, q if v is None else v
    keys, values = stores or (Store(q), Store(q))
    half, programs = inv_freq.shape[0], heads + (k.shape[1] if stores else 0)
    if keys.kind != values.kind:
        raise ValueError(f"keys are stored as {keys.kind or 'floats'}, values as {values.kind or 'floats'}")
    if tokens:
        _turn[(tokens, programs)](
            q, k, v, out, *(weights or (q, q)), positions, inv_freq, positions if slots is None else slots, heads, half, n,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), float(scale), float(eps), float(offset),
            *keys.arguments(), *values.arguments(), HALF=power(half), REST=power(n - 2 * half, 1), BLOCK=power(n),
            INTERLEAVED=interleaved, NORM=weights is not None, WRITE=stores is not None, KIND=keys.kind, num_warps=1,
        )  # fmt: skip
    return out


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, *, interleaved: bool = False, scale: float = 1.0) -> Tensor:
    """The operator rope of x[tokens, heads, n]; positions int32[tokens], inv_freq float32[half]."""
    return _launch(x, None, None, None, positions, inv_freq, None, None, interleaved=interleaved, scale=scale)


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, inv_freq: Tensor, keys: Store, values: Store, slots: Tensor,
    *, interleaved: bool = False, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """rope of q and k, kv_write of k and v; q turned, [tokens, heads, n]. Keys are rounded to q's dtype before they are stored."""
    return _launch(q, k, v, None, positions, inv_freq, (keys, values), slots, interleaved=interleaved, scale=scale)


def norm_rope_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, positions: Tensor, inv_freq: Tensor, keys: Store,
    values: Store, slots: Tensor, *, eps: float, offset: float = 0.0, interleaved: bool = False, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """rms_norm of each head of q and k (rounded to their dtype), then rope_write."""
    return _launch(
        q, k, v, (q_weight, k_weight), positions, inv_freq, (keys, values), slots, interleaved=interleaved, scale=scale, eps=eps,
        offset=offset,
    )  # fmt: skip
