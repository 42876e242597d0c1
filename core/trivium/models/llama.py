"""Llama and what shares its graph: SmolLM2, Llama 3 (scaled rotary frequencies), Mistral (sliding window).

Source: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B"; keys as in their config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, flag
from trivium.models.decoder import Decoder
from trivium.ops import Program

DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
MISTRAL_DEFAULTS: RawConfig = {**DEFAULTS, "sliding_window": 4096, "num_key_value_heads": 8}


def build_llama(info: ModelInfo, max_model_len: int | None) -> Program:
    """Attention over all positions; optional biases."""
    return _build(info, max_model_len, (None,) * info.layers)


def build_mistral(info: ModelInfo, max_model_len: int | None) -> Program:
    """Every layer attends within `sliding_window`, if there is one."""
    return _build(info, max_model_len, info.windows(lambda layer: True))


def _build(info: ModelInfo, max_model_len: int | None, windows: tuple[int | None, ...]) -> Program:
    bias, mlp_bias = flag(info.config, "attention_bias", False), flag(info.config, "mlp_bias", False)
    return Decoder(info, max_model_len).pre_norm(windows, bias=bias, out_bias=bias, mlp_bias=mlp_bias)
