"""Gemma 3 (text): five layers with a window for each that sees all positions, each kind with its own rotary base; q and k norms.

Source: Gemma Team 2025, "Gemma 3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig, count, flag, table
from trivium.models.decoder import Decoder, Rotation
from trivium.models.gemma2 import cap_of, feed_forward, gemma_decoder, score_scale
from trivium.ops import Program

DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Gemma 3 text model."""
    bias = flag(info.config, "attention_bias", False)
    pattern = count(info.config, "sliding_window_pattern")
    d = gemma_decoder(info, max_model_len)
    rotate_all, rotate_near = _rotations(d)
    x = d.embed(scale=info.hidden_size**0.5)
    for i, window in enumerate(info.windows(lambda layer: (layer + 1) % pattern != 0)):
        layer, rotate = f"model.layers.{i}", rotate_all if window is None else rotate_near
        q, k, v = d.qkv(d.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", bias=bias)
        q = rotate(d.norm(q, f"{layer}.self_attn.q_norm"))
        k = rotate(d.norm(k, f"{layer}.self_attn.k_norm"))
        y = d.attend(i, q, k, v, window=window, scale=score_scale(info))
        y = d.linear(y, f"{layer}.self_attn.o_proj", info.hidden_size, bias=bias)
        x = feed_forward(d, d.b.add(x, d.norm(y, f"{layer}.post_attention_layernorm")), layer)
    return d.finish(x, softcap=cap_of(info, "final_logit_softcapping"))


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
