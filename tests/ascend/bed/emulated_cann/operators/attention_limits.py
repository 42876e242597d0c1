"""What the documents of npu_fused_infer_attention_score and its v2 allow. S is the queries' length in one sequence, N heads, D head
dimension, H = N * D, T the tokens of all sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from emulated_cann.registry import Arguments, UnemulatedError, need

HALVES = (torch.float16, torch.bfloat16)
MASK_TYPES = (torch.bool, torch.int8, torch.uint8)
LAYOUTS = {  # input_layout -> rank of the query
    "BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3, "BNSD_BSND": 4, "BSH_NBSD": 3, "BSND_NBSD": 4, "BNSD_NBSD": 4,
    "TND_NTD": 3, "NTD_TND": 3,
}  # fmt: skip
COMPRESSED = 2048  # rows and columns of the mask of sparse modes 2, 3 and 4
LATENT = 512  # head dimension that stands for multi-head latent attention with one compressed key
UNUSED = ("pse", "query_padding", "kv_padding", "shared_key", "shared_value", "quant1", "quant2", "quant2_offset", "dequant1",
          "dequant2", "antiquant_scale", "antiquant_offset", "query_scale", "key_rope_scale")  # fmt: skip


def check(a: Arguments) -> None:
    for name in UNUSED:
        if getattr(a, name, None) is not None:
            raise UnemulatedError(f"fused attention with {name}")
    describe(a)
    check_heads(a)
    check_rope(a)
    (check_packed if a.packed else check_padded)(a)
    if a.block_table is not None:
        check_pages(a)
    check_quantised(a)
    check_mask(a)
    check_sink(a)


def describe(a: Arguments) -> None:
    """Adds what the other checks and the computation need: layouts, key, value, head dimension, batch, the longest query."""
    need(a.layout in LAYOUTS, f"input_layout {a.layout} is one of {', '.join(LAYOUTS)}")
    need(a.query.dim() == LAYOUTS[a.layout], f"the query has the rank of its layout {a.layout}: {tuple(a.query.shape)}")
    a.q_layout, _, a.out_layout = a.layout.partition("_")
    a.out_layout = a.out_layout or a.q_layout
    a.kv_heads = a.kv_heads or a.heads
    a.key, a.value = a.keys[0], a.values[0]
    a.packed = a.q_layout in ("TND", "NTD")
    a.dim = a.query.shape[-1] // a.heads if a.q_layout == "BSH" else a.query.shape[-1]
    a.value_dim = head_dim(a.value, a)
    a.batch = len(a.q_lens or ()) if a.packed else a.query.shape[0]
    a.query_length = None if a.packed else a.query.shape[{"BSH": 1, "BSND": 1, "BNSD": 2}[a.q_layout]]
    a.rope = getattr(a, "query_rope", None) is not None


def head_dim(cache: torch.Tensor, a: Arguments) -> int:
    flat = cache.dim() == 3 and (a.block_table is not None or a.q_layout == "BSH")
    return cache.shape[-1] // a.kv_heads if flat else cache.shape[-1]


def check_heads(a: Arguments) -> None:
    need(a.query.dtype in HALVES, f"query is float16 or bfloat16, not {a.query.dtype}")
    need(
        a.key.dtype == a.value.dtype and a.key.dtype in (*HALVES, torch.int8), f"no key of {a.key.dtype}, value of {a.value.dtype}"
    )
    need(a.key.dtype in (a.query.dtype, torch.int8), "key and value have the dtype of the query, or int8")
    need(all(t.is_contiguous() for t in (a.query, a.key, a.value)), "query, key and value are contiguous")
    need(a.heads % a.kv_heads == 0, f"num_heads {a.heads} is a multiple of num_key_value_heads {a.kv_heads}")
    need(a.heads // a.kv_heads <= 64, "num_heads is at most 64 times num_key_value_heads")
    need(a.heads <= 256 and a.dim <= 512, f"at most 256 heads of 512 elements, not {a.heads} of {a.dim}")
    multiple = 32 if a.key.dtype == torch.int8 else 16
    need(a.dim % multiple == 0, f"the head dimension {a.dim} is a multiple of {multiple}")
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(a.q_layout)
    need(axis is None or a.query.shape[axis] == a.heads, f"num_heads {a.heads} is the query's {tuple(a.query.shape)}")
    need(a.key.shape == a.value.shape or a.packed, f"key {tuple(a.key.shape)} and value {tuple(a.value.shape)} have one shape")
    need(a.inner_precise in (0, 1, 2, 3), f"inner_precise {a.inner_precise} is 0, 1, 2 or 3")
    need(a.query_length != 1 or a.inner_precise in (0, 1), "inner_precise is 0 or 1 for queries of one token")


def rising(numbers: list[int]) -> bool:
    return numbers[0] >= 0 and all(x <= y for x, y in pairwise(numbers))


def check_packed(a: Arguments) -> None:
    """TND and NTD."""
    tokens = a.query.shape[0 if a.q_layout == "TND" else 1]
    need(bool(a.q_lens) and bool(a.kv_lens), f"{a.layout} takes both actual sequence lengths")
    need(len(a.q_lens) <= 4096, f"{a.layout} takes at most 4096 sequences")
    need(rising(a.q_lens), f"actual_seq_qlen is cumulative in {a.layout}: {a.q_lens}")
    need(a.q_lens[-1] == tokens, f"the last actual_seq_qlen is T, {tokens}: {a.q_lens}")
    need(a.block_table is not None or rising(a.kv_lens), f"actual_seq_kvlen without block_table is cumulative: {a.kv_lens}")
    need(len(a.kv_lens) == len(a.q_lens), "both actual sequence lengths are as many as the sequences")
    if a.dim != LATENT:
        check_packed_dims(a)


def check_packed_dims(a: Arguments) -> None:
    multi_head, v_dim = a.heads == a.kv_heads, a.value_dim
    if a.rope:
        need(a.dim == v_dim == 128, f"{a.layout} with rope takes head dimension 128, not {a.dim}")
    else:
        wide = a.dim == 192 and v_dim in (128, 192)
        allowed = a.dim == v_dim == 128 or wide or (multi_head and a.dim == v_dim == 64)
        need(allowed, f"{a.layout} takes head dimension 128, or 192 with values of 128 or 192, or 64 without GQA: {a.dim}, {v_dim}")
    need(v_dim != 192 or (multi_head and a.block_table is None), "values of 192 go neither with GQA nor with pages")
    need(a.key.dtype != torch.int8, f"{a.layout} takes no quantised key and value")
    if multi_head:
        precise = (0,) if a.query.dtype == torch.bfloat16 else (0, 1)
        need(a.inner_precise in precise, f"{a.layout} without GQA takes inner_precise {precise} with {a.query.dtype}")
        need(a.block_table is None or a.key.dim() == 3, f"{a.layout} without GQA takes pages [blocks, block_size, KV*D] only")
        need(a.sparse_mode in (0, 3, 4), f"{a.layout} without GQA takes sparse_mode 0, 3 or 4")
        need(a.sparse_mode != 0 or a.mask is None, f"{a.layout} without GQA takes no mask with sparse_mode 0")


def check_padded(a: Arguments) -> None:
    """BSH, BSND and BNSD."""
    need(a.batch <= 65536, f"at most 65536 sequences, not {a.batch}")
    for name, lengths in (("actual_seq_qlen", a.q_lens), ("actual_seq_kvlen", a.kv_lens)):
        need(not lengths or len(lengths) == 1 or len(lengths) >= a.batch, f"{name} has 1 or at least {a.batch} numbers")
    longest = max((a.q_lens or [0])[: a.batch])
    need(a.query_length == 1 or longest <= a.query_length, f"actual_seq_qlen is at most the query's length {a.query_length}")
    one = a.out_layout in ("BNSD_BSND", "BNSD_NBSD") and a.query_length == 1
    need(not one, f"{a.layout} takes queries of more than one token")
    if a.block_table is None:
        s_axis = 2 if a.q_layout == "BNSD" else 1
        need(a.key.shape[0] == a.batch, f"key and value have the query's batch {a.batch}")
        need(max((a.kv_lens or [0])[: a.batch]) <= a.key.shape[s_axis], "actual_seq_kvlen is at most the keys' length")


def check_pages(a: Arguments) -> None:
    size, table = a.block_size, a.block_table
    quantised = a.key.dtype == torch.int8
    need(table.dtype == torch.int32 and table.dim() == 2, f"block_table is int32 [batch, blocks], not {table.dtype}")
    need(table.shape[0] == a.batch, f"block_table has {table.shape[0]} rows for {a.batch} sequences")
    if a.packed or a.rope:
        need(size % 16 == 0 and 0 < size <= 1024, f"block_size {size} is a multiple of 16 up to 1024")
    elif a.query_length == 1:
        multiple = 32 if quantised else 16
        need(size % multiple == 0 and 0 < size <= 512, f"block_size {size} is a multiple of {multiple} up to 512")
    else:
        need(size % 128 == 0 and 0 < size <= 512, f"block_size {size} is a multiple of 128 up to 512 for queries of several tokens")
        need(not quantised, "pages are not quantised for queries of several tokens")
    need(bool(a.kv_lens), "block_table takes actual_seq_kvlen")
    blocks = [-(-n // size) for n in kv_lengths(a)]
    need(table.shape[1] >= max(blocks), f"block_table has {table.shape[1]} columns, the longest sequence {max(blocks)} blocks")
    need(a.key.shape[0] >= sum(blocks), f"the cache has {a.key.shape[0]} blocks, the sequences together {sum(blocks)}")
    check_page_shape(a)


def check_page_shape(a: Arguments) -> None:
    size, shape = a.block_size, tuple(a.key.shape)
    need(len(shape) in (3, 4), f"pages have 3 or 4 dimensions: {shape}")
    if len(shape) == 3:
        need(shape[1] == size and shape[2] % a.kv_heads == 0, f"pages of 3 dimensions are [blocks, {size}, KV*D]: {shape}")
        need(shape[2] <= 65535, f"KV*D is at most 65535, not {shape[2]}")
    else:
        need(a.q_layout in ("BNSD", "TND"), f"pages of 4 dimensions go with BNSD and TND queries, not {a.q_layout}")
        need(shape[1:3] == (a.kv_heads, size), f"pages of 4 dimensions are [blocks, {a.kv_heads}, {size}, D]: {shape}")
    need(a.key.numel() < 2**31, "a cache has fewer than 2**31 elements")


def kv_lengths(a: Arguments) -> list[int]:
    """One number a sequence: the keys that it sees."""
    if not a.kv_lens:
        return [a.key.shape[2 if a.q_layout == "BNSD" else 1]] * a.batch
    lengths = list(a.kv_lens)
    if a.packed and a.block_table is None:
        return [end - start for start, end in pairwise([0, *lengths])]
    return lengths * a.batch if len(lengths) == 1 else lengths[: a.batch]


def check_rope(a: Arguments) -> None:
    key_rope = getattr(a, "key_rope", None)
    need(a.rope == (key_rope is not None), "query_rope and key_rope come together")
    if not a.rope:
        need(a.dim != LATENT or not a.packed, "head dimension 512 in TND takes query_rope and key_rope")
        return
    need(a.dim in (LATENT, 128), f"rope goes with head dimension 512 or 128, not {a.dim}")
    need(a.query_rope.dtype == a.query.dtype and key_rope.dtype == a.key.dtype, "the ropes have the dtypes of query and key")
    need(a.query_rope.is_contiguous() and key_rope.is_contiguous(), "query_rope and key_rope are contiguous")
    width = a.query_rope.shape[-1] // (a.heads if a.q_layout == "BSH" else 1)
    need(width == 64, f"query_rope has head dimension 64, not {width}")
    if a.dim == LATENT:
        powers = (1, 2, 4, 8, 16, 32, 64, 128)
        need(a.heads in powers and a.kv_heads == 1, f"head dimension 512 takes one key head and {powers} heads, not {a.heads}")
        need(a.sparse_mode in (0, 3, 4, 9), f"head dimension 512 takes sparse_mode 0, 3, 4 or 9, not {a.sparse_mode}")


def check_quantised(a: Arguments) -> None:
    """int8 key and value: scales by mode, 0 per channel or tensor, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and
    3 but in pages."""
    scales = (a.key_scale, a.value_scale)
    need((a.key_scale is None) == (a.value_scale is None), "dequant_scale_key and dequant_scale_value come together")
    need((a.key_offset is None) == (a.value_offset is None), "dequant_offset_key and dequant_offset_value come together")
    need((a.key.dtype == torch.int8) == (a.key_scale is not None), "int8 key and value take scales, others none")
    if a.key_scale is None:
        return
    need(not a.rope, "rope goes with no quantised key and value")
    mixed = (a.key_mode, a.value_mode) == (0, 1)
    need(a.key_mode == a.value_mode or (mixed and a.query.dtype == torch.float16), "key and value have one quantisation mode")
    several = a.query_length != 1
    need(a.key_mode in ((0, 1) if several else range(6)), f"no key_quant_mode {a.key_mode} for queries of {a.query_length} tokens")
    if several:
        need(a.query_length <= 16 and a.query.dtype == torch.bfloat16, "quantised keys with several tokens: at most 16, bfloat16")
    for scale, mode in zip(scales, (a.key_mode, a.value_mode)):
        check_scale(a, scale, mode)
    for offset, scale in ((a.key_offset, a.key_scale), (a.value_offset, a.value_scale)):
        need(
            offset is None or (offset.shape == scale.shape and offset.dtype == scale.dtype),
            "an offset has its scale's shape and dtype",
        )


def check_scale(a: Arguments, scale: torch.Tensor, mode: int) -> None:
    heads, dim, shape = a.kv_heads, a.value_dim, tuple(scale.shape)
    dtype = a.query.dtype if mode in (0, 2) else torch.float32
    need(scale.dtype == dtype, f"quantisation mode {mode} takes scales of {dtype}, not {scale.dtype}")
    size = a.block_size
    per_channel = [(heads, 1, dim), (heads, dim), (heads * dim,)]
    allowed = {
        0: [*per_channel, *((1, *s) for s in per_channel), (1,)],
        2: [(heads,)],
        4: [(a.key.shape[0], size)],
        5: [(a.key.shape[0], heads, size)],
    }
    if mode in allowed:
        need(shape in allowed[mode], f"quantisation mode {mode} takes scales of shape {allowed[mode]}, not {shape}")
    else:
        leading = {1: [(1, a.batch), (a.batch,)], 3: [(a.batch, heads)]}[mode]
        need(
            shape[:-1] in leading, f"quantisation mode {mode} takes scales of shape {leading[0]} and the keys' length, not {shape}"
        )
        need(shape[-1] >= max(kv_lengths(a)), "scales per token reach to the longest sequence")


def check_mask(a: Arguments) -> None:
    need(a.sparse_mode in (0, 1, 2, 3, 4, 9), f"sparse_mode {a.sparse_mode} is not implemented")
    need(a.sparse_mode != 9 or a.rope, "sparse_mode 9 takes query_rope and key_rope")
    if a.sparse_mode == 9:
        raise UnemulatedError("fused attention with a tree mask")
    if a.mask is None:
        need(a.sparse_mode == 0, f"sparse_mode {a.sparse_mode} takes atten_mask")
        return
    need(a.mask.dtype in MASK_TYPES, f"atten_mask is bool, int8 or uint8, not {a.mask.dtype}")
    need(a.mask.is_contiguous(), "atten_mask is contiguous")
    shape = tuple(a.mask.shape)
    if a.sparse_mode in (2, 3, 4):
        square = (COMPRESSED, COMPRESSED)
        need(
            shape in (square, (1, *square), (1, 1, *square)),
            f"sparse_mode {a.sparse_mode} takes the mask of 2048 x 2048, not {shape}",
        )
    else:
        need(not a.packed, f"{a.layout} takes no full mask in the emulation")
        check_full_mask(a, shape)


def check_full_mask(a: Arguments, shape: tuple[int, ...]) -> None:
    """[1|B, S, KV], [1|B, 1, S, KV], or [B, KV] for queries of one token and [S, KV] for others; sides may be rounded up."""
    longest = max(kv_lengths(a))
    need(shape[-1] >= longest, f"atten_mask has {shape[-1]} columns for {longest} keys")
    if len(shape) == 2:
        rows = a.batch if a.query_length == 1 else a.query_length
        need(shape[0] >= rows, f"atten_mask has {shape[0]} rows, not {rows}")
    else:
        need(shape[0] in (1, a.batch) and shape[-2] >= a.query_length, f"atten_mask is [1 or batch, (1,) S, KV]: {shape}")


def check_sink(a: Arguments) -> None:
    sink = getattr(a, "sink", None)
    if sink is None:
        return
    need(sink.dtype == torch.bfloat16 and tuple(sink.shape) == (a.heads,), f"learnable_sink is bfloat16 [{a.heads}]")
    need(a.layout in ("TND", "NTD_TND") and a.value_dim <= 128, "learnable_sink goes with TND and NTD_TND and values up to 128")


def inspect(a: Arguments) -> None:
    if a.sparse_mode in (2, 3, 4) and not ignores_mask(a):
        upper = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        need(torch.equal(a.mask.bool().reshape(upper.shape), upper), "the compressed mask is strictly upper triangular")
    if a.block_table is not None:
        for row, length in enumerate(kv_lengths(a)):
            used = a.block_table[row, : -(-length // a.block_size)]
            inside = used.numel() == 0 or (int(used.min()) >= 0 and int(used.max()) < a.key.shape[0])
            need(inside, f"block_table names blocks in 0..{a.key.shape[0] - 1}: {used.tolist()}")


def ignores_mask(a: Arguments) -> bool:
    """Queries of one token without rope ignore sparse_mode, pre_tokens and next_tokens."""
    return a.query_length == 1 and not a.rope
