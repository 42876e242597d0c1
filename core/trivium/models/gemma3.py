"""Gemma 3 (text): five layers with a window for each that sees all positions, each kind with its own rotary base; q and k norms.

Source: Gemma Team 2025, "Gemma 3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, count, table
from trivium.models.decoder import Decoder, Rotation
from trivium.models.gemma2 import gemma_decoder, gemma_layers
from trivium.ops import Program

DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Gemma 3 text model."""
    pattern = count(info.config, "sliding_window_pattern")
    d = gemma_decoder(info, max_model_len)
    return gemma_layers(d, info.windows(lambda layer: (layer + 1) % pattern != 0), _rotations(d), qk_norm=True)


def _rotations(d: Decoder) -> tuple[Rotation, Rotation]:
    """The rotations of layers that see all positions and of those with a window: `rope_parameters` holds both kinds, or
    `rope_scaling` scales the former only."""
    config = d.info.config
    params = table(config, "rope_parameters") or table(config, "rope_scaling")
    if "full_attention" not in params and "sliding_attention" not in params:
        params = {"full_attention": params}
    full = {"rope_theta": config["rope_theta"], **table(params, "full_attention")}
    near = {"rope_theta": config["rope_local_base_freq"], **table(params, "sliding_attention")}
    return (
        d.rotation("rope.full.inv_freq", {**config, "rope_parameters": full}),
        d.rotation("rope.sliding.inv_freq", {**config, "rope_parameters": near}),
    )
