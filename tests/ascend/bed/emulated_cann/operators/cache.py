"""Writing keys and values into the pages of a cache, and reading them back. Limits: the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

PAGES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def check_scatter(a: Arguments) -> None:
    """npu_scatter_pa_kv_cache: key and value [tokens, heads, dim], caches [blocks, block_size, heads, dim]."""
    need(a.cache_mode in ("Norm", "PA_NZ"), f"cache_mode {a.cache_mode!r} is Norm or PA_NZ")
    if a.cache_mode != "Norm" or any(x is not None for x in (a.compress_lens, a.compress_offsets, a.seq_lens)):
        raise UnemulatedError("npu_scatter_pa_kv_cache but for cache_mode Norm without compression (the default mode is PA_NZ)")
    tensors = (a.key, a.key_cache, a.slots, a.value, a.value_cache)
    need(all(t.is_contiguous() for t in tensors), "key, value, caches and slot_mapping are contiguous")
    need(a.key.dtype == a.value.dtype == a.key_cache.dtype == a.value_cache.dtype, "key, value and caches have one dtype")
    need(a.key.dtype in PAGES, f"no caches of {a.key.dtype}")
    need(a.slots.dtype in (torch.int32, torch.int64) and a.slots.dim() == 1, "slot_mapping is int32 or int64 [tokens]")
    need(a.key.dim() == 3 and a.key_cache.dim() == 4, "key is [tokens, heads, dim] and its cache has 4 dimensions")
    need(a.key.shape[1:] == a.key_cache.shape[2:] and a.value.shape[1:] == a.value_cache.shape[2:], "heads and dim are the cache's")
    need(a.key.shape[0] == a.value.shape[0] == a.slots.shape[0], "key, value and slot_mapping have one number of tokens")


def inspect_scatter(a: Arguments) -> None:
    slots = a.key_cache.shape[0] * a.key_cache.shape[1]
    if a.slots.numel():
        low, high = int(a.slots.min()), int(a.slots.max())
        need(low >= 0 and high < slots, f"slot_mapping lies in [0, {slots - 1}]: {a.slots.tolist()}")
    need(a.slots.unique().numel() == a.slots.numel(), f"slot_mapping has no slot twice: {a.slots.tolist()}")


@operator(
    "aclnnScatterPaKvCache",
    "key key_cache slots value value_cache compress_lens compress_offsets seq_lens cache_mode:s scatter_mode:s strides:A offsets:A",
    check_scatter,
    inspect_scatter,
)
def scatter(a: Arguments) -> None:
    for x, cache in ((a.key, a.key_cache), (a.value, a.value_cache)):
        cache.view(-1, *cache.shape[2:])[a.slots.long()] = x


def check_gather(a: Arguments) -> None:
    """npu_gather_pa_kv_cache: the opposite way, sequence after sequence."""
    if a.cache_mode != "Norm":
        raise UnemulatedError("npu_gather_pa_kv_cache from FRACTAL_NZ pages")
    need(a.tables.dtype == torch.int32 and a.tables.dim() == 2, "block_tables are int32 [batch, blocks]")
    need(a.lengths.dtype == torch.int32 and a.lengths.dim() == 1, "seq_lens are int32 [batch]")
    need(
        a.lengths.numel() == a.tables.shape[0] + a.cumulative,
        "seq_lens have a number for each sequence, and a leading 0 if cumulative",
    )
    need(a.offsets is None or a.offsets.dtype == torch.int32, "seq_offset is int32")
    need(a.key.shape[1:] == a.key_cache.shape[2:] and a.value.shape[1:] == a.value_cache.shape[2:], "heads and dim are the cache's")


@operator("aclnnGatherPaKvCache", "key_cache value_cache tables lengths key value offsets cache_mode:s cumulative:b", check_gather)
def gather(a: Arguments) -> None:
    size, start = a.key_cache.shape[1], 0
    lengths = a.lengths.diff() if a.cumulative else a.lengths
    for row, length in enumerate(lengths.tolist()):
        skipped = 0 if a.offsets is None else int(a.offsets[row]) // size
        blocks = a.tables[row, skipped : skipped + -(-length // size)].long()
        for cache, out in ((a.key_cache, a.key), (a.value_cache, a.value)):
            out[start : start + length] = cache[blocks].flatten(0, 1)[:length]
        start += length


def check_scatter_nd(a: Arguments) -> None:
    need(
        a.indices.dtype in (torch.int32, torch.int64) and a.indices.dim() >= 2, "indices are int32 or int64 of 2 dimensions or more"
    )
    depth = a.indices.shape[-1]
    need(depth <= a.x.dim(), "the last dimension of indices is at most the rank of input")
    need(
        a.updates.shape == (*a.indices.shape[:-1], *a.x.shape[depth:]),
        "updates have indices' shape but the last, and the rest of input's",
    )
    need(a.updates.dtype == a.x.dtype, "updates have the dtype of input")


def inspect_scatter_nd(a: Arguments) -> None:
    sizes = torch.tensor(a.x.shape[: a.indices.shape[-1]])
    need(bool(((a.indices >= 0) & (a.indices < sizes)).all()), "indices lie within input")


@operator("aclnnScatterNdUpdate", "x indices updates", check_scatter_nd, inspect_scatter_nd)
def scatter_nd(a: Arguments) -> None:
    a.x[tuple(a.indices.long().unbind(-1))] = a.updates
