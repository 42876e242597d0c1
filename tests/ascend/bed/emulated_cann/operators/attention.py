"""Fused attention (aclnnFusedInferAttentionScore V2 to V5): softmax(scale * q k^T + mask) v, sequence by sequence, in float32."""

from __future__ import annotations

from itertools import pairwise

import torch
from emulated_cann.operators.attention_limits import check, ignores_mask, inspect, kv_lengths
from emulated_cann.registry import Arguments, operator

HEAD = (
    "query keys:L values:L pse mask q_lens:A kv_lens:A dequant1 quant1 dequant2 quant2 quant2_offset"
    " antiquant_scale antiquant_offset block_table query_padding kv_padding key_scale key_offset value_scale value_offset"
    " shared_key shared_value shared_len:A"
)
ROPE = "query_rope key_rope key_rope_scale"
TAIL = (
    "heads:i scale:d pre:i next:i layout:s kv_heads:i sparse_mode:i inner_precise:i block_size:i antiquant_mode:i want_lse:b"
    " key_mode:i value_mode:i"
)
SIGNATURES = {
    "V2": f"{HEAD} {TAIL} out lse",
    "V3": f"{HEAD} {ROPE} {TAIL} out lse",
    "V4": f"{HEAD} {ROPE} query_scale sink {TAIL} query_mode:i out lse",
    "V5": f"{HEAD} {ROPE} query_scale sink q_start kv_start {TAIL} query_mode:i pse_type:i out lse",
}


def attend(a: Arguments) -> None:
    queries, ropes = query_rows(a, a.query), query_rows(a, a.query_rope) if a.rope else None
    out, lse = query_rows(a, a.out, a.out_layout), lse_rows(a)
    if not a.packed:
        a.out.zero_()
    for row, length in enumerate(kv_lengths(a)):
        key, value = (dequantised(a, row, length, which) for which in ("key", "value"))
        scores = torch.einsum("qhd,khd->hqk", queries[row].float(), per_head(a, key))
        if ropes is not None:
            rope = per_head(a, rows(a, a.key_rope, row, length).float())
            scores = scores + torch.einsum("qhd,khd->hqk", ropes[row].float(), rope)
        scores = masked(a, scores * a.scale, row)
        weights, total = softmax(a, scores)
        out[row].copy_(torch.einsum("hqk,khd->qhd", weights, per_head(a, value)))
        if lse is not None:
            lse[row].copy_(total.transpose(0, 1)[..., None])


def per_head(a: Arguments, x: torch.Tensor) -> torch.Tensor:
    """Key heads repeated for the query heads that share them (grouped-query attention)."""
    return x.repeat_interleave(a.heads // a.kv_heads, 1)


def query_rows(a: Arguments, x: torch.Tensor, layout: str = "") -> list[torch.Tensor]:
    """Views [S, N, D], one a sequence, of a tensor in the query's layout (or another); short sequences lose their padding."""
    layout = layout or a.q_layout
    if a.packed:
        tokens = x if layout == "TND" else x.transpose(0, 1)
        return [tokens[start:end] for start, end in pairwise([0, *a.q_lens])]
    order = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (1, 2, 0, 3)}
    batch = x.unflatten(-1, (a.heads, -1)) if layout == "BSH" else x.permute(order[layout])
    lengths = list(a.q_lens or [])
    if not lengths or a.query_length == 1:
        return list(batch)
    return [t[:n] for t, n in zip(batch, lengths * a.batch if len(lengths) == 1 else lengths)]


def lse_rows(a: Arguments) -> list[torch.Tensor] | None:
    """lse is [T, N, 1] for packed queries and [B, N, S, 1] for others."""
    if not a.want_lse:
        return None
    if a.packed:
        return [a.lse[start:end] for start, end in pairwise([0, *a.q_lens])]
    return [t.transpose(0, 1)[: len(q)] for t, q in zip(a.lse, query_rows(a, a.query))]


def rows(a: Arguments, cache: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """Keys [length, KV, D] of a sequence, out of pages in either layout or out of a tensor in the query's layout."""
    if a.block_table is not None:
        blocks = cache[a.block_table[row, : -(-length // a.block_size)].long()]
        heads = blocks.unflatten(-1, (a.kv_heads, -1)) if cache.dim() == 3 else blocks.transpose(1, 2)
        return heads.flatten(0, 1)[:length]
    if a.packed:
        start = sum(kv_lengths(a)[:row])
        return (cache if a.q_layout == "TND" else cache.transpose(0, 1))[start : start + length]
    one = cache[row]
    if a.q_layout == "BSH":
        return one.unflatten(-1, (a.kv_heads, -1))[:length]
    return (one.transpose(0, 1) if a.q_layout == "BNSD" else one)[:length]


def dequantised(a: Arguments, row: int, length: int, which: str) -> torch.Tensor:
    """(x + offset) * scale in float32 for int8 keys or values, x as it is for others: [length, KV, D]."""
    x = rows(a, getattr(a, which), row, length).float()
    scale, offset, mode = (getattr(a, f"{which}_{part}") for part in ("scale", "offset", "mode"))
    if scale is None:
        return x
    if offset is not None:
        x = x + spread(a, offset.float(), mode, row, length)
    return x * spread(a, scale.float(), mode, row, length)


def spread(a: Arguments, values: torch.Tensor, mode: int, row: int, length: int) -> torch.Tensor:
    """Scales of a quantisation mode for one sequence, broadcastable to [length, KV, D]."""
    if mode == 0:
        return values.reshape(1, a.kv_heads, -1) if values.numel() > 1 else values.reshape(1, 1, 1)
    if mode == 1:
        return values.reshape(a.batch, -1)[row, :length, None, None]
    if mode == 2:
        return values.reshape(1, a.kv_heads, 1)
    if mode == 3:
        return values[row, :, :length].transpose(0, 1)[..., None]
    pages = values[a.block_table[row, : -(-length // a.block_size)].long()]
    if mode == 4:
        return pages.flatten()[:length, None, None]
    return pages.transpose(1, 2).flatten(0, 1)[:length, :, None]


def masked(a: Arguments, scores: torch.Tensor, row: int) -> torch.Tensor:
    """Scores [N, S, KV] with -inf where the sparse mode or the mask hides a key."""
    s, kv = scores.shape[1:]
    i, j = torch.arange(s)[:, None], torch.arange(kv)[None]
    hidden = torch.zeros(s, kv, dtype=torch.bool)
    if a.sparse_mode in (0, 1) and a.mask is not None:
        hidden = full_mask(a, row, s, kv)
    if not ignores_mask(a):
        if a.sparse_mode == 0 and a.mask is not None:
            hidden = hidden | (j > i + a.next) | (j < i - a.pre)
        elif a.sparse_mode == 2:
            hidden = j > i
        elif a.sparse_mode == 3:
            hidden = j > i + kv - s
        elif a.sparse_mode == 4:
            hidden = (j > i + kv - s + a.next) | (j < i + kv - s - a.pre)
    return scores.masked_fill(hidden, float("-inf"))


def full_mask(a: Arguments, row: int, s: int, kv: int) -> torch.Tensor:
    mask = a.mask.bool()
    if mask.dim() == 2:
        return mask[row : row + 1, :kv] if a.query_length == 1 else mask[:s, :kv]
    mask = mask[:, 0] if mask.dim() == 4 else mask
    return mask[row if len(mask) > 1 else 0, :s, :kv]


def softmax(a: Arguments, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, S, KV] and log of the sum of exponentials [N, S]; a learnable sink takes its share and gives nothing."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:2], float("-inf"))
    sink = getattr(a, "sink", None)
    total = scores.logsumexp(-1)
    if sink is not None:
        total = torch.logaddexp(total, sink.float()[:, None])
    return (scores - total[..., None]).exp(), total


for _version, _signature in SIGNATURES.items():
    operator(f"aclnnFusedInferAttentionScore{_version}", _signature, check, inspect)(attend)
