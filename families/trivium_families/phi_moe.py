"""Phi-3.5-MoE: layer norms with biases, and two experts a token by SparseMixer.

Sources: Abdin et al. 2024, "Phi-3 Technical Report"; Liu et al. 2024, "GRIN: GRadient-INformed MoE"; keys as in its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.experts import experts_of
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, stack_experts

DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 16,
    "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
}  # fmt: skip


class LayerNormDecoder(Decoder):
    """Layer norms, with biases, in place of RMS norms."""

    def norm(self, x: Value, name: str) -> Value:
        """Layer norm over the last dimension."""
        weight, bias = (self.b.weight(f"{name}.{part}", x.shape[-1:]) for part in ("weight", "bias"))
        return self.op("layer_norm", x, weight, bias, eps=self.info.norm_eps)


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """Phi-3.5-MoE: layer norms, biases, and two experts a token by SparseMixer."""
    config, d = info.config, LayerNormDecoder(info, max_model_len)
    bias, rotate, x = flag(config, "attention_bias", False), _rotation(d, max_model_len or info.max_positions), d.embed()
    for i, window in enumerate(info.windows(lambda layer: True)):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        x = d.op("add", x, d.attention(i, y, rotate, bias=bias, out_bias=bias, window=window))
        x = d.op("add", x, _experts(d, d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x, bias=flag(config, "lm_head_bias", False))


def _rotation(d: Decoder, longest: int) -> Rotation:
    """LongRoPE's attention factor is given for contexts up to the original length and for longer ones."""
    config = d.info.config
    rope: dict[str, Any] = {**(table(config, "rope_parameters") or table(config, "rope_scaling"))}
    if "short_mscale" in rope and "long_mscale" in rope:
        original = config.get("original_max_position_embeddings") or count(rope, "original_max_position_embeddings")
        rope["attention_factor"] = number(rope, "long_mscale" if longest > original else "short_mscale")
    return d.rotation(config={**config, "rope_parameters": rope})


def _experts(d: Decoder, x: Value, block: str) -> Value:
    config, hidden, inter = d.info.config, d.info.hidden_size, d.info.intermediate_size
    experts, chosen = experts_of(config, "num_local_experts")
    logits = d.linear(x, f"{block}.router", experts)
    weights, ids = d.b.sparse_mixer_route(logits, top_k=chosen, jitter=number(config, "router_jitter_noise"))
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    matrices = [d.b.weight(f"{block}.experts.{name}_proj.weight", (experts, *shape)) for name, shape in shapes.items()]
    return d.op("moe_experts", x, weights, ids, *matrices, kind=d.info.activation)


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """Experts stacked, block and router under the names of other families."""
    stacked = stack_experts(config, tensors, names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): make for name, make in stacked.items()}
    return {name.replace(".mlp.gate.weight", ".mlp.router.weight"): make for name, make in renamed.items()}


phi_moe = Hook(Family(build, DEFAULTS, read_info, arrange))
