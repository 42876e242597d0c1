"""The first operators of attention: prompts (npu_prompt_flash_attention), and single queries (npu_incre_flash_attention), in the
layout BSH. Limits: their documents; those of 310P by the table of chips."""

from __future__ import annotations

import torch
from emulated_cann.chips import chip
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

HALVES = (torch.float16, torch.bfloat16)
MASKS = (torch.bool, torch.int8, torch.uint8)
NO_LIMIT = 2147483647


def check_common(a: Arguments, unused: tuple[str, ...]) -> None:
    used = [name for name in unused if getattr(a, name) is not None]
    if used or a.layout != "BSH":
        raise UnemulatedError(f"flash attention in {a.layout} with {', '.join(used) or 'nothing else'}")
    dtypes = HALVES if chip().bfloat16 else HALVES[:1]
    need(a.query.dtype in dtypes, f"query is {dtypes}, not {a.query.dtype}")
    need(
        a.query.dim() == a.key.dim() == 3 and a.key.shape == a.value.shape,
        "query, key and value have 3 dimensions, the last two alike",
    )
    need(all(t.is_contiguous() and t.dtype == a.query.dtype for t in (a.query, a.key, a.value)), "all are contiguous, of one dtype")
    a.kv_heads = a.kv_heads or a.heads
    need(a.heads % a.kv_heads == 0 and a.heads // a.kv_heads <= 64, f"{a.heads} heads share {a.kv_heads}, at most 64 one")
    a.dim = a.query.shape[-1] // a.heads
    need(
        a.heads <= 256 and a.dim <= 512 and a.dim % 16 == 0,
        f"at most 256 heads of multiples of 16 up to 512, not {a.heads} of {a.dim}",
    )


# ---- prompts ----

PROMPT_UNUSED = ("pse", "dequant1", "quant1", "dequant2", "quant2", "quant2_offset")


def check_prompt(a: Arguments) -> None:
    check_common(a, PROMPT_UNUSED)
    batch, queries, keys = a.query.shape[0], a.query.shape[1], a.key.shape[1]
    need(a.key.shape[0] == batch and a.key.shape[2] == a.kv_heads * a.dim, "key is [B, S, KV*D]")
    need(a.heads * a.dim < 65535, "N*D is below 65535")
    if not chip().flash_lengths:
        need(not a.q_lens and not a.kv_lens, f"no actual_seq_lengths on {chip().name}")
        need(a.kv_heads == a.heads, f"num_key_value_heads is 0 on {chip().name}")
        need(a.sparse_mode == 0 and a.pre == NO_LIMIT, f"sparse_mode 0 and all pre_tokens on {chip().name}")
        need(a.next in (0, NO_LIMIT), f"next_tokens is 0 or {NO_LIMIT} on {chip().name}, not {a.next}")
        need(batch <= 128 and max(queries, keys) <= 65535, f"at most 128 sequences of 65535 on {chip().name}")
    if a.sparse_mode != 0 or a.q_lens or a.kv_lens:
        raise UnemulatedError("npu_prompt_flash_attention with lengths or a sparse mode")
    if a.mask is not None:
        need(a.mask.dtype in MASKS and a.mask.is_contiguous(), f"atten_mask is bool, int8 or uint8, not {a.mask.dtype}")
        shapes = ((queries, keys), *((b, queries, keys) for b in (1, batch)), *((b, 1, queries, keys) for b in (1, batch)))
        need(tuple(a.mask.shape) in shapes, f"atten_mask is one of {shapes}, not {tuple(a.mask.shape)}")


def inspect_prompt(a: Arguments) -> None:
    need(a.mask is None or not a.mask.bool().all(-1).any(), "no row of atten_mask hides every key")


@operator(
    "aclnnPromptFlashAttentionV3",
    "query key value pse mask q_lens:A kv_lens:A dequant1 quant1 dequant2 quant2 quant2_offset heads:i scale:d pre:i next:i"
    " layout:s kv_heads:i sparse_mode:i inner_precise:i out",
    check_prompt,
    inspect_prompt,
)
def prompt(a: Arguments) -> None:
    """Without a mask pre_tokens and next_tokens are ignored."""
    queries, keys = a.query.shape[1], a.key.shape[1]
    for row in range(len(a.query)):
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if a.mask is not None:
            mask = a.mask.bool().reshape(-1, queries, keys)
            i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
            hidden = mask[row if len(mask) > 1 else 0] | (j > i + a.next) | (j < i - a.pre)
        a.out[row] = attended(a, a.query[row], a.key[row], a.value[row], hidden)


def attended(a: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """q[S, N*D] over k and v [KV, KV_N*D], in float32."""
    q, k, v = (x.float().unflatten(-1, (-1, a.dim)) for x in (q, k, v))
    k, v = (x.repeat_interleave(a.heads // a.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * a.scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


# ---- single queries ----

SINGLE_UNUSED = (
    "pse", "dequant1", "quant1", "dequant2", "quant2", "quant2_offset", "antiquant_scale", "antiquant_offset", "kv_padding", "mask"
)  # fmt: skip


def check_single(a: Arguments) -> None:
    a.key, a.value = a.keys[0], a.values[0]
    check_common(a, SINGLE_UNUSED)
    if a.block_table is None:
        raise UnemulatedError("npu_incre_flash_attention without pages")
    batch, size, table = a.query.shape[0], a.block_size, a.block_table
    most = 65535 if chip().flash_lengths else 256
    need(batch <= most and a.query.shape[1] == 1, f"at most {most} sequences of one query, not {tuple(a.query.shape[:2])}")
    need(a.inner_precise in (0, 1), "inner_precise is 0 or 1")
    need(table.dtype == torch.int32 and table.dim() == 2 and len(table) == batch, f"block_table is int32 [{batch}, blocks]")
    need(len(a.lens or ()) == batch, "pages take an actual_seq_length for each sequence")
    need(max(a.lens) <= (262144 if chip().flash_lengths else 65536), "sequences are too long")
    need(
        size > 0 and size % 16 == 0 and a.key.shape[1:] == (size, a.kv_heads * a.dim),
        f"pages are [blocks, {size}, KV*D], size by 16",
    )
    need(a.key.shape[2] <= 65535, "KV*D is at most 65535")
    blocks = [-(-n // size) for n in a.lens]
    need(table.shape[1] >= max(blocks), f"block_table has {table.shape[1]} columns, the longest sequence {max(blocks)} blocks")
    need(len(a.key) >= sum(blocks), f"the cache has {len(a.key)} blocks, the sequences together {sum(blocks)}")


def inspect_single(a: Arguments) -> None:
    for row, length in enumerate(a.lens):
        used = a.block_table[row, : -(-length // a.block_size)]
        need(int(used.min()) >= 0 and int(used.max()) < len(a.key), f"block_table names blocks in 0..{len(a.key) - 1}")


@operator(
    "aclnnIncreFlashAttentionV4",
    "query keys:L values:L pse mask lens:A dequant1 quant1 dequant2 quant2 quant2_offset antiquant_scale antiquant_offset"
    " block_table kv_padding heads:i scale:d layout:s kv_heads:i block_size:i inner_precise:i out",
    check_single,
    inspect_single,
)
def single(a: Arguments) -> None:
    for row, length in enumerate(a.lens):
        blocks = a.block_table[row, : -(-length // a.block_size)].long()
        k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (a.key, a.value))
        a.out[row] = attended(a, a.query[row], k, v, torch.zeros(1, length, dtype=torch.bool))
