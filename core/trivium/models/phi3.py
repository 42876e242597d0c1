"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, LongRoPE, rotation of a part of each head, an optional window.

Source: Abdin et al. 2024, "Phi-3 Technical Report"; keys as in its config.json.
"""

from __future__ import annotations

from trivium.models.config import ModelInfo, RawConfig
from trivium.models.decoder import Decoder
from trivium.ops import Program, Value

DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """The Program of a Phi-3 model."""
    d = Decoder(info, max_model_len)
    rotate = d.rotation()
    x = d.embed()
    for i, window in enumerate(info.windows(lambda layer: True)):
        layer = f"model.layers.{i}"
        q, k, v = _qkv(d, d.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        y = d.attend(i, rotate(q), rotate(k), v, window=window)
        x = d.b.add(x, d.linear(y, f"{layer}.self_attn.o_proj", info.hidden_size))
        x = d.b.add(x, _mlp(d, d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x)


def _qkv(d: Decoder, x: Value, attn: str) -> tuple[Value, Value, Value]:
    """qkv_proj holds the rows of queries, keys and values in this order."""
    heads, kv_heads, dim, fused = d.info.heads, d.info.kv_heads, d.info.head_dim, f"{attn}.qkv_proj"
    q = d.heads(x, f"{attn}.q_proj", heads, part=(fused, 0))
    k = d.heads(x, f"{attn}.k_proj", kv_heads, part=(fused, heads * dim))
    return q, k, d.heads(x, f"{attn}.v_proj", kv_heads, part=(fused, (heads + kv_heads) * dim))


def _mlp(d: Decoder, x: Value, mlp: str) -> Value:
    """gate_up_proj holds the rows of the gate, then those of the up projection."""
    inter = d.info.intermediate_size
    gate = d.linear(x, f"{mlp}.gate_proj", inter, part=(f"{mlp}.gate_up_proj", 0))
    up = d.linear(x, f"{mlp}.up_proj", inter, part=(f"{mlp}.gate_up_proj", inter))
    return d.linear(d.gated(gate, up), f"{mlp}.down_proj", d.info.hidden_size)
