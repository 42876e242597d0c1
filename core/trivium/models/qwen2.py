"""Qwen2 and Qwen2.5: Llama's graph with biases on queries, keys and values, and windows in the upper layers if asked for.

Source: Yang et al. 2024, "Qwen2 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, count, flag
from trivium.models.decoder import Decoder
from trivium.ops import Program

DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_window_layers": 28}


def windows(info: ModelInfo) -> tuple[int | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, from layer `max_window_layers` on (or as `layer_types` says)."""
    if not flag(info.config, "use_sliding_window", False):
        return (None,) * info.layers
    return info.windows(lambda layer: layer >= count(info.config, "max_window_layers"))


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Qwen2 model."""
    return Decoder(info, max_model_len).pre_norm(windows(info), bias=True)
