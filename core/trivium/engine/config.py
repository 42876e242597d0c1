"""Limits and switches of one engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivium.engine.speculation.drafter import Speculative
from trivium.errors import InvalidRequestError


POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class EngineConfig:
    """max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens a step; longer prompts are computed in chunks.
    enable_prefix_caching: full pages are shared between requests (off: only within one). seed: requests without a seed get one that
    depends on this and their number; None: on chance. scheduling_policy: "fcfs" (by arrival; a request with a priority is refused)
    or "priority" (lower first, then by arrival). max_waiting_requests, max_waiting_tokens: more than these, beyond what finds a
    free seat, are refused with OverloadedError; None: no limit. speculative: a Speculative or a mapping of its fields.
    kv_host_bytes: memory for pages that the cache had to give away. kv_disk_path: a folder for those that don't fit there either,
    of at most kv_disk_bytes, which later runs find again."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int | None = None
    scheduling_policy: str = "priority"
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    speculative: Speculative | Mapping[str, Any] | None = None
    kv_host_bytes: int = 0
    kv_disk_path: str | os.PathLike[str] | None = None
    kv_disk_bytes: int = 10 << 30

    def __post_init__(self) -> None:
        lows = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "kv_host_bytes": 0, "kv_disk_bytes": 1}
        for name, low in {**lows, "max_waiting_requests": 1, "max_waiting_tokens": 1}.items():
            value = getattr(self, name)
            if (type(value) is not int or value < low) and not (value is None and name not in lows):
                raise InvalidRequestError(f"{name} must be an integer from {low} up, not {value!r}", param=name)
        if not isinstance(self.kv_disk_path, str | os.PathLike | None) or self.kv_disk_path == "":
            raise InvalidRequestError(f"kv_disk_path must be a folder or None, not {self.kv_disk_path!r}", param="kv_disk_path")
        if self.seed is not None and type(self.seed) is not int:
            raise InvalidRequestError(f"seed must be an integer or None, not {self.seed!r}", param="seed")
        if self.scheduling_policy not in POLICIES:
            message = f"scheduling_policy must be {' or '.join(POLICIES)}, not {self.scheduling_policy!r}"
            raise InvalidRequestError(message, param="scheduling_policy")
        object.__setattr__(self, "speculative", Speculative.of(self.speculative))
