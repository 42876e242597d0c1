"""Qwen3 (dense): queries and keys are normalised per head before they are rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, flag
from trivium.models.decoder import Decoder
from trivium.models.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from trivium.models.qwen2 import windows
from trivium.ops import Program

DEFAULTS: RawConfig = {**QWEN2_DEFAULTS, "head_dim": 128}


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Qwen3 model."""
    bias = flag(info.config, "attention_bias", False)
    d = Decoder(info, max_model_len)
    rotate = d.rotation()
    x = d.embed()
    for i, window in enumerate(windows(info)):
        layer = f"model.layers.{i}"
        q, k, v = d.qkv(d.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", bias=bias)
        q = rotate(d.norm(q, f"{layer}.self_attn.q_norm"))
        k = rotate(d.norm(k, f"{layer}.self_attn.k_norm"))
        y = d.attend(i, q, k, v, window=window)
        x = d.b.add(x, d.linear(y, f"{layer}.self_attn.o_proj", info.hidden_size, bias=bias))
        x = d.b.add(x, d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x)
