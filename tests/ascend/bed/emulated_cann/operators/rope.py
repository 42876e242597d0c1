"""Rotary embeddings (Su et al., 2021). Limits: the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    """x [..., dim] by angles whose cos and sin are [..., dim / 2]; pairs are (i, i + dim / 2), or neighbours."""
    first, second = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)


# ---- by position in a cache of cos and sin: npu_mrope ----

SECTIONS = ([], [0, 0, 0], [16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])


def check_cached(a: Arguments) -> None:
    """head_size and the width of cos|sin are multiples of 32 elements in 16 bits, of 16 in float32."""
    multiple = 16 if a.query.dtype == torch.float32 else 32
    rotary = a.cos_sin.shape[-1]
    need(a.positions.dtype in (torch.int32, torch.int64), f"positions are int32 or int64, not {a.positions.dtype}")
    need(a.query.dtype == a.key.dtype == a.cos_sin.dtype, "query, key and cos_sin_cache have one dtype")
    need(a.query.dtype in FLOATS, f"query is a float, not {a.query.dtype}")
    need(a.query.dim() == a.key.dim() == a.cos_sin.dim() == 2, "query and key are [tokens, heads * head_size]")
    need(a.head_size % multiple == 0 and rotary % multiple == 0, f"head_size and rotary_dim are multiples of {multiple}")
    need(rotary <= a.head_size, f"rotary_dim {rotary} is at most head_size {a.head_size}")
    need(all(t.shape[-1] % a.head_size == 0 for t in (a.query, a.key)), "query and key hold whole heads")
    check_sections(a, rotary)
    need(a.positions.shape[-1] == a.query.shape[0] == a.key.shape[0], "positions, query and key have one number of tokens")


def check_sections(a: Arguments, rotary: int) -> None:
    sections = a.sections or []
    need(sections in SECTIONS, f"mrope_section {sections} is none of {SECTIONS}")
    several = any(sections)
    need(a.positions.dim() == (2 if several else 1), "positions are [tokens], or [3 or 4, tokens] with an mrope_section")
    need(not several or sum(sections) == rotary // 2, f"mrope_section {sections} adds up to rotary_dim / 2")
    need(not several or a.positions.shape[0] == len(sections), "positions have a row for each section")


def inspect_cached(a: Arguments) -> None:
    low, high = int(a.positions.min()), int(a.positions.max())
    need(low >= 0 and high < a.cos_sin.shape[0], f"positions {low}..{high} lie within cos_sin_cache, {a.cos_sin.shape[0]} rows")


def angles(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, 1, rotary_dim / 2] in float32; with sections, each part of the width by its own row of positions."""
    rows = a.cos_sin[a.positions.long()].float()
    if rows.dim() == 3:
        halves = [torch.cat([p[i] for i, p in enumerate(h.split(a.sections, -1))], -1) for h in rows.chunk(2, -1)]
        return halves[0][:, None], halves[1][:, None]
    cos, sin = rows.chunk(2, -1)
    return cos[:, None], sin[:, None]


def cached_rope(a: Arguments) -> None:
    if getattr(a, "cache_mode", 0) != 0:
        raise UnemulatedError("npu_mrope with a cache_mode")
    cos, sin = angles(a)
    width = 2 * cos.shape[-1]
    for x, y in ((a.query, a.query_out), (a.key, a.key_out)):
        heads = x.float().reshape(x.shape[0], -1, a.head_size)
        turned = rotate(heads[..., :width], cos, sin, a.halves)
        y.copy_(torch.cat((turned, heads[..., width:]), -1).reshape(y.shape))


CACHED = "positions query key cos_sin sections:A head_size:i halves:b"
operator("aclnnRopeWithSinCosCache", f"{CACHED} query_out key_out", check_cached, inspect_cached)(cached_rope)
operator("aclnnRopeWithSinCosCacheV2", f"{CACHED} cache_mode:i query_out key_out", check_cached, inspect_cached)(cached_rope)


# ---- by cos and sin of full width ----


def check_rotary_mul(a: Arguments) -> None:
    """x [B, N, S, D], [B, S, N, D], [S, B, N, D] or [T, N, D]; cos and sin have 1 where heads are (and perhaps the batch)."""
    dim = a.x.shape[-1]
    need(a.x.dim() in (3, 4), f"x has 3 or 4 dimensions, not {a.x.dim()}")
    need(dim % 2 == 0 and dim < 896, f"the head dimension {dim} is even and below 896")
    need(a.x.dtype in FLOATS and a.x.dtype == a.cos.dtype == a.sin.dtype, "x, r1 and r2 have one floating dtype")
    need(a.cos.shape == a.sin.shape and a.cos.shape[-1] == dim, "r1 and r2 have one shape, as wide as x")
    need(a.cos.dim() == a.x.dim(), "r1 has as many dimensions as x")
    fits = all(c in (1, n) for c, n in zip(a.cos.shape, a.x.shape))
    need(fits, f"r1 {tuple(a.cos.shape)} broadcasts to x {tuple(a.x.shape)}")
    need(all(n < 1000 for n in batch_and_heads(a)), f"batch and heads are below 1000: {tuple(a.x.shape)}")
    need(a.mode in (0, 1), f"rotary_mode {a.mode} is half or interleave")
    if getattr(a, "rotate", None) is not None:
        raise UnemulatedError("npu_rotary_mul with a rotate matrix")


def batch_and_heads(a: Arguments) -> list[int]:
    """The sizes of x along which r1 is one number: the batch and the heads."""
    return [n for c, n in zip(a.cos.shape, a.x.shape) if c == 1 and n > 1]


def rotary_mul(a: Arguments) -> None:
    """x * cos + turned(x) * sin, where turned is (-second, first) of halves or of neighbours."""
    x = a.x.float()
    if a.mode == 0:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a.y.copy_(x * a.cos.float() + turned * a.sin.float())


operator("aclnnRotaryPositionEmbedding", "x cos sin mode:i y", check_rotary_mul)(rotary_mul)
operator("aclnnRotaryPositionEmbeddingV2", "x cos sin mode:i rotate y", check_rotary_mul)(rotary_mul)


def check_apply(a: Arguments) -> None:
    """npu_apply_rotary_pos_emb writes query and key in place."""
    need(a.layout in (1, 4), "layout is BSND or TND")
    need(a.query.dim() == a.key.dim() == (4 if a.layout == 1 else 3), "query and key are [B, S, N, D] or [T, N, D]")
    need(a.mode == "half", f"rotary_mode is half, not {a.mode}")
    dim = a.query.shape[-1]
    need(dim in (64, 128) and a.key.shape[-1] == dim, f"the head dimension is 64 or 128, not {dim}")
    need(a.query.dtype == a.key.dtype == a.cos.dtype == a.sin.dtype and a.query.dtype in FLOATS, "one floating dtype for all")
    heads = a.query.dim() - 2
    need(a.query.shape[:heads] == a.key.shape[:heads] == a.cos.shape[:heads], "batch and tokens are equal")
    need(a.cos.shape == a.sin.shape and a.cos.shape[heads:] == (1, dim), "cos and sin are [..., 1, D]")


@operator("aclnnApplyRotaryPosEmbV2", "query key cos sin layout:i mode:s", check_apply)
def apply_rotary(a: Arguments) -> None:
    for x in (a.query, a.key):
        first, second = x.float().chunk(2, -1)
        x.copy_(x.float() * a.cos.float() + torch.cat((-second, first), -1) * a.sin.float())
