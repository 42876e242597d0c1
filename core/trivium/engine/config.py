"""Limits and switches of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivium.engine.speculation.config import Speculative
from trivium.errors import InvalidRequestError


@dataclass(frozen=True)
class EngineConfig:
    """max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens a step; longer prompts are computed in chunks.
    enable_prefix_caching: full pages are shared between requests (off: only within one). seed: requests without a seed get one that
    depends on this and their number; None: on chance. speculative: a Speculative or a mapping of its fields."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int | None = None
    speculative: Speculative | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequestError(f"{name} must be an integer from 1 up, not {value!r}", param=name)
        if self.seed is not None and type(self.seed) is not int:
            raise InvalidRequestError(f"seed must be an integer or None, not {self.seed!r}", param="seed")
        object.__setattr__(self, "speculative", Speculative.of(self.speculative))
