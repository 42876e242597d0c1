"""Limits and switches of one engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivium.engine.speculation.config import Speculative
from trivium.errors import InvalidRequestError


@dataclass(frozen=True)
class EngineConfig:
    """max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens a step; longer prompts are computed in chunks.
    enable_prefix_caching: full pages are shared between requests (off: only within one). seed: requests without a seed get one that
    depends on this and their number; None: on chance. speculative: a Speculative or a mapping of its fields. kv_host_bytes: memory
    for pages that the cache had to give away. kv_disk_path: a folder for those that don't fit there either, of at most
    kv_disk_bytes, which later runs find again."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int | None = None
    speculative: Speculative | Mapping[str, Any] | None = None
    kv_host_bytes: int = 0
    kv_disk_path: str | os.PathLike[str] | None = None
    kv_disk_bytes: int = 10 << 30

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("kv_host_bytes", 0), ("kv_disk_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidRequestError(f"{name} must be an integer from {low} up, not {value!r}", param=name)
        if not isinstance(self.kv_disk_path, str | os.PathLike | None) or self.kv_disk_path == "":
            raise InvalidRequestError(f"kv_disk_path must be a folder or None, not {self.kv_disk_path!r}", param="kv_disk_path")
        if self.seed is not None and type(self.seed) is not int:
            raise InvalidRequestError(f"seed must be an integer or None, not {self.seed!r}", param="seed")
        object.__setattr__(self, "speculative", Speculative.of(self.speculative))
