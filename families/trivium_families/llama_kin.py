"""Mistral and Phi-3: Llama with windows, and with fused projections.

Sources: Jiang et al. 2023, "Mistral 7B"; Abdin et al. 2024, "Phi-3 Technical Report"; keys as in their config.json.
"""

from __future__ import annotations

from trivium.models import Decoder, Family, ModelInfo, RawConfig
from trivium.models.llama import LLAMA_DEFAULTS, build_llama
from trivium.ops import Program
from trivium_families.plugin import Hook

MISTRAL_DEFAULTS: RawConfig = {**LLAMA_DEFAULTS, "sliding_window": 4096, "num_key_value_heads": 8}
PHI3_DEFAULTS: RawConfig = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}


def build_mistral(info: ModelInfo, max_model_len: int | None) -> Program:
    """Mistral: every layer attends within `sliding_window`, if there is one."""
    return build_llama(info, max_model_len, info.windows(lambda layer: True))


def build_phi3(info: ModelInfo, max_model_len: int | None) -> Program:
    """Phi-3, Phi-3.5, Phi-4-mini: fused projections, LongRoPE, rotation of a part of each head, an optional window."""
    return Decoder(info, max_model_len).pre_norm(info.windows(lambda layer: True), fused=True)


MISTRAL = Family(build_mistral, MISTRAL_DEFAULTS)
mistral, phi3 = Hook(MISTRAL), Hook(Family(build_phi3, PHI3_DEFAULTS))
