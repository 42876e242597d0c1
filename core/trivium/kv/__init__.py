"""KV cache bookkeeping on the host: groups of layers, the pool of pages, the prefix cache and the block tables."""

from __future__ import annotations

from trivium.kv.cache import Copy, Hit, KVCache, Stream, root_key
from trivium.kv.groups import plan_groups
from trivium.kv.pool import BlockPool, Key, Ledger

__all__ = ["BlockPool", "Copy", "Hit", "KVCache", "Key", "Ledger", "Stream", "plan_groups", "root_key"]
