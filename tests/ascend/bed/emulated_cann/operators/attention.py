"""Fused attention (aclnnFusedInferAttentionScore V2, V3, V4): layouts, pages, masks; limits of the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, need, operator

HALVES = (torch.float16, torch.bfloat16)
MASK = 2048
HEAD = (
    "query keys:L values:L pse mask q_lens:A kv_lens:A dequant1 quant1 dequant2 quant2 quant2_offset antiquant_scale antiquant_offset"
    " block_table query_padding kv_padding key_scale key_offset value_scale value_offset shared_key shared_value shared_len:A"
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
}


def check(a: Arguments) -> None:
    a.kv_heads = a.kv_heads or a.heads
    a.key, a.value = a.keys[0], a.values[0]
    check_heads(a)
    need(a.layout == "TND", f"input_layout {a.layout}: the emulation has TND so far")
    check_tnd(a)
    if a.block_table is not None:
        check_pages(a)
    check_mask(a)


def check_heads(a: Arguments) -> None:
    need(a.query.dtype in HALVES, f"query is float16 or bfloat16, not {a.query.dtype}")
    need(all(t.is_contiguous() for t in (a.query, a.key, a.value)), "query, key and value are contiguous")
    need(a.heads % a.kv_heads == 0 and a.heads // a.kv_heads <= 64, "num_heads is a multiple (at most 64) of num_key_value_heads")
    need(a.heads <= 256, f"at most 256 heads, not {a.heads}")
    need(a.key.shape == a.value.shape, "key and value have one shape")


def rising(numbers: list[int]) -> bool:
    return all(x <= y for x, y in zip(numbers, numbers[1:])) and numbers[0] >= 0


def check_tnd(a: Arguments) -> None:
    dim = a.query.shape[-1]
    need(bool(a.q_lens) and bool(a.kv_lens), "TND takes both actual sequence lengths")
    need(rising(a.q_lens), f"actual_seq_qlen is cumulative in TND: {a.q_lens}")
    need(a.q_lens[-1] == a.query.shape[0], f"the last actual_seq_qlen is T, {a.query.shape[0]}: {a.q_lens}")
    need(dim in (128, 192) or (dim == 64 and a.heads == a.kv_heads), f"TND takes head dim 128 or 192, 64 only without GQA: {dim}")
    need(len(a.q_lens) <= 4096, "TND takes at most 4096 sequences")
    need(a.block_table is not None or rising(a.kv_lens), f"actual_seq_kvlen without block_table is cumulative in TND: {a.kv_lens}")


def check_pages(a: Arguments) -> None:
    batch, size, table = len(a.q_lens), a.block_size, a.block_table
    need(table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == batch, f"block_table is int32 [{batch}, blocks]")
    need(size % 16 == 0 and 0 < size <= 1024, f"block_size {size} is a multiple of 16 up to 1024")
    need(len(a.kv_lens) >= batch, "block_table takes actual_seq_kvlen of each sequence")
    blocks = max(-(-n // size) for n in a.kv_lens[:batch])
    need(table.shape[1] >= blocks, f"block_table has {table.shape[1]} columns, the longest sequence {blocks} blocks")
    if a.key.dim() == 3:
        need(a.key.shape[1] == size and a.key.shape[2] % a.kv_heads == 0, "a cache of 3 dimensions is [blocks, block_size, KV*D]")
        need(a.key.shape[2] <= 65535, "KV*D is at most 65535")
    else:
        need(tuple(a.key.shape[1:3]) == (a.kv_heads, size), "a cache of 4 dimensions is [blocks, KV, block_size, D]")


def check_mask(a: Arguments) -> None:
    need(a.sparse_mode in (0, 1, 2, 3, 4, 9), f"sparse_mode {a.sparse_mode} is not implemented")
    if a.sparse_mode in (2, 3, 4):
        need(a.mask is not None and tuple(a.mask.shape[-2:]) == (MASK, MASK), "sparse_mode 2, 3 and 4 take the mask of 2048 x 2048")
    need(a.mask is None or a.mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask is bool, int8 or uint8")


def inspect(a: Arguments) -> None:
    if a.sparse_mode in (2, 3, 4):
        upper = torch.ones(MASK, MASK, dtype=torch.bool).triu(1)
        need(
            torch.equal(a.mask.bool().reshape(MASK, MASK), upper), "the mask of sparse_mode 2, 3 and 4 is strictly upper triangular"
        )


def rows_of(cache: torch.Tensor, blocks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[blocks * block_size, KV, D] of a cache in either layout."""
    picked = cache[blocks.long()]
    picked = picked.unflatten(-1, (kv_heads, -1)) if cache.dim() == 3 else picked.transpose(1, 2)
    return picked.flatten(0, 1)


def attend(a: Arguments) -> None:
    start = kv_start = 0
    for row, end in enumerate(a.q_lens):
        if a.block_table is not None:
            length = a.kv_lens[row]
            blocks = a.block_table[row, : -(-length // a.block_size)]
            key, value = (rows_of(cache, blocks, a.kv_heads)[:length] for cache in (a.key, a.value))
        else:
            key, value = a.key[kv_start : a.kv_lens[row]], a.value[kv_start : a.kv_lens[row]]
            kv_start = a.kv_lens[row]
        a.out[start:end] = one_sequence(a, a.query[start:end], key, value).to(a.out.dtype)
        start = end


def one_sequence(a: Arguments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """softmax(scale * q k^T) v for query [q, heads, D], key and value [kv, KV, D]; float32 [q, heads, D]."""
    key, value = (t.float().repeat_interleave(a.heads // a.kv_heads, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * a.scale
    q, kv = scores.shape[1:]
    if a.sparse_mode == 3:
        scores = scores.masked_fill(torch.ones(q, kv, dtype=torch.bool).triu(kv - q + 1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


for _version, _signature in SIGNATURES.items():
    operator(f"aclnnFusedInferAttentionScore{_version}", _signature, check, inspect)(attend)
