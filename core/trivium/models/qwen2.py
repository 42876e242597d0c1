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
    d = Decoder(info, max_model_len)
    rotate = d.rotation()
    x = d.embed()
    for i, window in enumerate(windows(info)):
        layer = f"model.layers.{i}"
        q, k, v = d.qkv(d.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", bias=True)
        y = d.attend(i, rotate(q), rotate(k), v, window=window)
        x = d.b.add(x, d.linear(y, f"{layer}.self_attn.o_proj", info.hidden_size))
        x = d.b.add(x, d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x)
