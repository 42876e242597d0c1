"""Writing keys and values into the pages of a cache, and reading them back."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, need, operator

PAGES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def check_scatter(a: Arguments) -> None:
    """npu_scatter_pa_kv_cache, cache_mode "Norm": key and value [tokens, heads, dim], caches [blocks, block_size, heads, dim]."""
    need(a.cache_mode in ("Norm", "PA_NZ"), f"cache_mode {a.cache_mode!r} is Norm or PA_NZ")
    need(a.cache_mode == "Norm", "cache_mode PA_NZ writes FRACTAL_NZ pages: the emulation has pages in ND only")
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
    need(0 <= int(a.slots.min()) and int(a.slots.max()) < slots, f"slot_mapping lies in [0, {slots - 1}]: {a.slots.tolist()}")
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
