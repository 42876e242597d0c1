"""Llama and the families that share its graph, each with what its configuration adds.

Sources: Touvron et al. 2023, "LLaMA"; Yang et al. 2024, "Qwen2 Technical Report"; Yang et al. 2025, "Qwen3 Technical Report"; keys
as in their config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, count, flag
from trivium.models.decoder import Decoder
from trivium.ops import Program

LLAMA_DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
QWEN2_DEFAULTS: RawConfig = {**LLAMA_DEFAULTS, "max_window_layers": 28}
QWEN3_DEFAULTS: RawConfig = {**QWEN2_DEFAULTS, "head_dim": 128}


def build_llama(info: ModelInfo, max_model_len: int | None, windows: tuple[int | None, ...] | None = None) -> Program:
    """Llama, SmolLM2: attention over all positions (or within `windows`); optional biases."""
    bias, mlp_bias = flag(info.config, "attention_bias", False), flag(info.config, "mlp_bias", False)
    return Decoder(info, max_model_len).pre_norm(windows or (None,) * info.layers, bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def build_qwen2(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen2, Qwen2.5: biases on queries, keys and values, and windows in the upper layers if asked for."""
    return Decoder(info, max_model_len).pre_norm(_upper_windows(info), bias=True)


def build_qwen3(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen3 (dense): queries and keys are normalised per head before they are rotated."""
    bias = flag(info.config, "attention_bias", False)
    return Decoder(info, max_model_len).pre_norm(_upper_windows(info), bias=bias, out_bias=bias, qk_norm=True)


def _upper_windows(info: ModelInfo) -> tuple[int | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, from layer `max_window_layers` on (or as `layer_types` says)."""
    if not flag(info.config, "use_sliding_window", False):
        return (None,) * info.layers
    return info.windows(lambda layer: layer >= count(info.config, "max_window_layers"))
