"""Gemma 2: norms before and after each block, windows in every second layer, soft caps on scores and logits. Gemma 3 (text): five
layers with a window for each that sees all positions, each kind with its own rotary base; q and k norms.

Sources: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size"; Gemma Team 2025, "Gemma 3 Technical
Report"; keys as in their config.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, table
from trivium.models.decoder import Rotation
from trivium.ops import Program

from trivium_families.plugin import Hook

GEMMA2_DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3_DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip


def build_gemma2(info: ModelInfo, max_model_len: int | None) -> Program:
    """Gemma 2: norms around each block, windows in every second layer, soft caps on scores and logits."""
    d, softcap = gemma_decoder(info, max_model_len), cap_of(info, "attn_logit_softcapping")
    return gemma_layers(d, info.windows(lambda layer: layer % 2 == 0), (d.rotation(),) * 2, softcap=softcap)


def build_gemma3(info: ModelInfo, max_model_len: int | None) -> Program:
    """Gemma 3 (text): windows in five layers of six, each kind with its own rotary base; q and k norms."""
    pattern = count(info.config, "sliding_window_pattern")
    d = gemma_decoder(info, max_model_len)
    return gemma_layers(d, info.windows(lambda layer: (layer + 1) % pattern != 0), gemma3_rotations(d), qk_norm=True)


def gemma3_rotations(d: Decoder) -> tuple[Rotation, Rotation]:
    """The rotations of layers that see all positions and of those with a window: `rope_parameters` holds both kinds, or
    `rope_scaling` scales the former only."""
    config = d.info.config
    params = table(config, "rope_parameters") or table(config, "rope_scaling")
    if "full_attention" not in params and "sliding_attention" not in params:
        params = {"full_attention": params}
    full = {"rope_theta": config["rope_theta"], **table(params, "full_attention")}
    near = {"rope_theta": config["rope_local_base_freq"], **table(params, "sliding_attention")}
    everywhere = d.rotation("rope.full.inv_freq", {**config, "rope_parameters": full})
    return everywhere, d.rotation("rope.sliding.inv_freq", {**config, "rope_parameters": near})


def gemma_layers(
    d: Decoder, windows: Sequence[int | None], rotations: tuple[Rotation, Rotation],
    *, qk_norm: bool = False, softcap: float | None = None,
) -> Program:  # fmt: skip
    """Norms before and after each block. `rotations`: of layers that see all positions, and of those with a window."""
    info, bias = d.info, flag(d.info.config, "attention_bias", False)
    scale = 1 / math.sqrt(number(info.config, "query_pre_attn_scalar"))  # whatever head_dim is
    x = d.embed(scale=info.hidden_size**0.5)
    for i, window in enumerate(windows):
        layer, rotate = f"model.layers.{i}", rotations[window is not None]
        y = d.norm(x, f"{layer}.input_layernorm")
        y = d.attention(i, y, rotate, bias=bias, out_bias=bias, qk_norm=qk_norm, window=window, scale=scale, softcap=softcap)
        x = d.op("add", x, d.norm(y, f"{layer}.post_attention_layernorm"))
        y = d.mlp(d.norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
        x = d.op("add", x, d.norm(y, f"{layer}.post_feedforward_layernorm"))
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


def cap_of(info: ModelInfo, key: str) -> float | None:
    """A soft cap, None where the configuration has null."""
    return None if info.config.get(key) is None else number(info.config, key)


gemma2 = Hook(Family(build_gemma2, GEMMA2_DEFAULTS))
gemma3 = Hook(Family(build_gemma3, GEMMA3_DEFAULTS))
