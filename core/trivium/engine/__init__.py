"""The step loop, the life of a request, and its clock."""

from __future__ import annotations

from trivium.engine.async_engine import AsyncEngine
from trivium.engine.engine import Engine, EngineConfig, Stats
from trivium.engine.executor import Model
from trivium.engine.outputs import CompletionOutput, Logprob, Metrics, RequestOutput, TokenLogprobs

__all__ = [
    "AsyncEngine", "CompletionOutput", "Engine", "EngineConfig", "Logprob", "Metrics", "Model", "RequestOutput", "Stats",
    "TokenLogprobs",
]  # fmt: skip
