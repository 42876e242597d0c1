"""Qwen3 (dense): queries and keys are normalised per head before they are rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models import qwen2
from trivium.models.config import ModelInfo, RawConfig, flag
from trivium.models.decoder import Decoder
from trivium.ops import Program

DEFAULTS: RawConfig = {**qwen2.DEFAULTS, "head_dim": 128}


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Qwen3 model."""
    bias = flag(info.config, "attention_bias", False)
    return Decoder(info, max_model_len).pre_norm(qwen2.windows(info), bias=bias, out_bias=bias, qk_norm=True)
