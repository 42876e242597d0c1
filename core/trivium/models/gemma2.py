"""Gemma 2: norms before and after each block, windows in every second layer, soft caps on scores and logits.

Source: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size"; keys as in its config.json.
"""

from __future__ import annotations

import math

from trivium.errors import CheckpointError, UnsupportedError
from trivium.models.config import ModelInfo, RawConfig, flag, number
from trivium.models.decoder import Decoder
from trivium.ops import Program, Value

DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Gemma 2 model."""
    bias = flag(info.config, "attention_bias", False)
    cap = cap_of(info, "attn_logit_softcapping")
    d = gemma_decoder(info, max_model_len)
    rotate = d.rotation()
    x = d.embed(scale=info.hidden_size**0.5)
    for i, window in enumerate(info.windows(lambda layer: layer % 2 == 0)):
        layer = f"model.layers.{i}"
        q, k, v = d.qkv(d.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", bias=bias)
        y = d.attend(i, rotate(q), rotate(k), v, window=window, scale=score_scale(info), softcap=cap)
        y = d.linear(y, f"{layer}.self_attn.o_proj", info.hidden_size, bias=bias)
        x = feed_forward(d, d.b.add(x, d.norm(y, f"{layer}.post_attention_layernorm")), layer)
    return d.finish(x, softcap=cap_of(info, "final_logit_softcapping"))


def gemma_decoder(info: ModelInfo, max_model_len: int | None) -> Decoder:
    """Gemma's checkpoints store norm weights minus one, unless the configuration's `norm_offset` is 0 (GGUF files)."""
    if flag(info.config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{info.architecture} with 'use_bidirectional_attention' is an encoder; only causal models run here",
                               param="use_bidirectional_attention")  # fmt: skip
    offset = info.config.get("norm_offset", 1.0)
    if offset not in (0.0, 1.0):
        raise CheckpointError(f"the configuration's 'norm_offset' must be 0 or 1, not {offset!r}", param="norm_offset")
    return Decoder(info, max_model_len, norm_offset=offset)


def score_scale(info: ModelInfo) -> float:
    """Attention scores are scaled by this, whatever head_dim is."""
    return 1 / math.sqrt(number(info.config, "query_pre_attn_scalar"))


def cap_of(info: ModelInfo, key: str) -> float | None:
    """A soft cap, None where the configuration has null."""
    return None if info.config.get(key) is None else number(info.config, key)


def feed_forward(d: Decoder, x: Value, layer: str) -> Value:
    """x + norm(mlp(norm(x)))"""
    y = d.mlp(d.norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
    return d.op("add", x, d.norm(y, f"{layer}.post_feedforward_layernorm"))
