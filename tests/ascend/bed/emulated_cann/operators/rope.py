"""Rotary embeddings (Su et al., 2021) on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from emulated_cann.registry import Arguments, need, operator

SECTIONS = ([], [0, 0, 0], [16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])


def check_cached(a: Arguments) -> None:
    """npu_mrope: head_size and the width of cos|sin are multiples of 32 elements in 16 bits, of 16 in float32."""
    multiple = 16 if a.query.dtype == torch.float32 else 32
    rotary = a.cos_sin.shape[-1]
    need(a.positions.dtype in (torch.int32, torch.int64), f"positions are int32 or int64, not {a.positions.dtype}")
    need(a.query.dtype == a.key.dtype == a.cos_sin.dtype, "query, key and cos_sin_cache have one dtype")
    need(a.query.dim() == a.key.dim() == 2, "query and key are [tokens, heads * head_size]")
    need(a.head_size % multiple == 0 and rotary % multiple == 0, f"head_size and rotary_dim are multiples of {multiple}")
    need(rotary <= a.head_size, f"rotary_dim {rotary} is at most head_size {a.head_size}")
    need(all(t.shape[-1] % a.head_size == 0 for t in (a.query, a.key)), "query and key hold whole heads")
    need((a.sections or []) in SECTIONS, f"mrope_section {a.sections} is none of {SECTIONS}")
    several = any(a.sections or [])
    need(a.positions.dim() == (2 if several else 1), "positions are [tokens], or [3 or 4, tokens] with an mrope_section")
    need(not several or sum(a.sections) == rotary // 2, "the sections add up to rotary_dim / 2")
    need(a.positions.shape[-1] == a.query.shape[0] == a.key.shape[0], "positions, query and key have one number of tokens")


def inspect_cached(a: Arguments) -> None:
    low, high = int(a.positions.min()), int(a.positions.max())
    need(0 <= low and high < a.cos_sin.shape[0], f"positions {low}..{high} lie within cos_sin_cache, {a.cos_sin.shape[0]} rows")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    """x [..., rotary_dim] by angles whose cos and sin are [..., rotary_dim / 2]."""
    first, second = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)


def angles(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, 1, rotary_dim / 2] in float32; with sections, each part of the width by its own row of positions."""
    rows = a.cos_sin[a.positions.long()].float()
    if rows.dim() == 3:
        halves = [torch.cat([p[i] for i, p in enumerate(h.split(a.sections, -1))], -1) for h in rows.chunk(2, -1)]
        return halves[0][:, None], halves[1][:, None]
    cos, sin = rows.chunk(2, -1)
    return cos[:, None], sin[:, None]


def cached_rope(a: Arguments) -> None:
    cos, sin = angles(a)
    width = 2 * cos.shape[-1]
    for x, y in ((a.query, a.query_out), (a.key, a.key_out)):
        heads = x.float().reshape(x.shape[0], -1, a.head_size)
        turned = rotate(heads[..., :width], cos, sin, a.halves)
        y.copy_(torch.cat((turned, heads[..., width:]), -1).reshape(y.shape))


CACHED = "positions query key cos_sin sections:A head_size:i halves:b"
declare: Callable[[str, str], object] = lambda name, tail: operator(name, f"{CACHED} {tail}", check_cached, inspect_cached)(
    cached_rope
)
declare("aclnnRopeWithSinCosCache", "query_out key_out")
declare("aclnnRopeWithSinCosCacheV2", "cache_mode:i query_out key_out")
