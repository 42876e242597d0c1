"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, LongRoPE, rotation of a part of each head, an optional window.

Source: Abdin et al. 2024, "Phi-3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig
from trivium.models.decoder import Decoder
from trivium.ops import Program

DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Phi-3 model."""
    return Decoder(info, max_model_len).pre_norm(info.windows(lambda layer: True), fused=True)
