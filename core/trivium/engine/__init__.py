"""The step loop, the life of a request, and its clock."""

from __future__ import annotations

from trivium.engine.config import EngineConfig
from trivium.engine.engine import Engine
from trivium.engine.executor import Model
from trivium.engine.migration import RequestState
from trivium.engine.outputs import CompletionOutput, Logprob, Metrics, RequestOutput, TokenLogprobs
from trivium.engine.pooling import PoolingParams
from trivium.engine.runner import Stats

__all__ = [
    "CompletionOutput", "Engine", "EngineConfig", "Logprob", "Metrics", "Model", "PoolingParams", "RequestOutput",
    "RequestState", "Stats", "TokenLogprobs",
]  # fmt: skip
