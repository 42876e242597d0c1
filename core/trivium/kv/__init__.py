"""KV cache bookkeeping on the host: groups of layers, the pool of pages, the prefix cache and the block tables."""

from __future__ import annotations

from trivium.kv.cache import Copy, Hit, KVCache, Stream, root_key
from trivium.kv.groups import plan_groups
from trivium.kv.neutral import Layout
from trivium.kv.pool import BlockPool, Key, Ledger
from trivium.kv.tiers import Disk, Parcel, Tiers

__all__ = [
    "BlockPool", "Copy", "Disk", "Hit", "KVCache", "Key", "Layout", "Ledger", "Parcel", "Stream", "Tiers", "plan_groups",
    "root_key",
]  # fmt: skip
