"""Dense decoders that differ from Llama in where they normalise, what they rotate, or what they scale.

Sources: OLMo Team 2024, "2 OLMo 2 Furious"; OLMo Team 2025, "OLMo 3"; Hugging Face 2025, "SmolLM3"; Cohere 2024-2025, model cards
of Command R7B and Command A; IBM 2024, "Granite 3.0"; Zhipu 2025, model card of GLM-4-0414; keys as in their config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.pieces import as_is
from trivium_families.plugin import Hook

OLMO_DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5}
OLMO3_DEFAULTS: RawConfig = {**OLMO_DEFAULTS, "sliding_window": 4096}
SMOLLM3_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}  # fmt: skip
COHERE2_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "layer_norm_eps": 1e-5, "rope_theta": 1e4, "logit_scale": 0.0625, "sliding_window": 4096,
    "sliding_window_pattern": 4, "tie_word_embeddings": True, "rope_interleaved": True,
}  # fmt: skip
GRANITE_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
GLM4_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "rope_theta": 1e4, "head_dim": 128, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5, "attention_bias": True, "rope_interleaved": True,
}  # fmt: skip


def build_olmo2(info: ModelInfo, max_model_len: int | None) -> Program:
    """OLMo 2: what a block gives is normalised, not what it gets."""
    d = Decoder(info, max_model_len)
    return _post_norm(d, (None,) * info.layers, (d.rotation(),) * 2)


def build_olmo3(info: ModelInfo, max_model_len: int | None) -> Program:
    """OLMo 3: as OLMo 2, with windows in three layers of four; only layers that see all positions have scaled frequencies."""
    d = Decoder(info, max_model_len)
    windows = info.windows(lambda layer: (layer + 1) % 4 != 0)
    return _post_norm(d, windows, (_rotation(d, "full_attention"), _rotation(d, "sliding_attention")))


def _rotation(d: Decoder, kind: str) -> Rotation:
    """`rope_parameters` holds both kinds of layers, or `rope_scaling` scales those that see all positions."""
    config = d.info.config
    params: Mapping[str, Any] = table(config, "rope_parameters")
    if "full_attention" not in params and "sliding_attention" not in params:
        params = {"full_attention": params or table(config, "rope_scaling")}
    rope = {"rope_theta": config["rope_theta"], **table(params, kind)}
    return d.rotation(f"rope.{kind}.inv_freq", {**config, "rope_parameters": rope})


def _post_norm(d: Decoder, windows: tuple[int | None, ...], rotations: tuple[Rotation, Rotation]) -> Program:
    """x + norm(attention(x)), then x + norm(mlp(x)).
    `rotations`: of layers that see all positions, and of those with a window."""
    x, bias = d.embed(), flag(d.info.config, "attention_bias", False)
    for i, window in enumerate(windows):
        layer = f"model.layers.{i}"
        y = flat_normed_attention(d, i, x, rotations[window is not None], bias=bias, window=window)
        x = d.op("add", x, d.norm(y, f"{layer}.post_attention_layernorm"))
        x = d.op("add", x, d.norm(d.mlp(x, f"{layer}.mlp"), f"{layer}.post_feedforward_layernorm"))
    return d.finish(x)


def flat_normed_attention(d: Decoder, i: int, x: Value, rotate: Rotation, *, bias: bool, window: int | None = None) -> Value:
    """The attention block of layer `i` on x, whose queries and keys are normalised over all heads before they are rotated."""
    info, attn = d.info, f"model.layers.{i}.self_attn"
    q, k = (
        d.op("reshape", d.norm(d.linear(x, f"{attn}.{p}_proj", heads * info.head_dim, bias=bias), f"{attn}.{p}_norm"),
             shape=("tokens", heads, info.head_dim))
        for p, heads in (("q", info.heads), ("k", info.kv_heads))
    )  # fmt: skip
    flat = d.linear(x, f"{attn}.v_proj", info.kv_heads * info.head_dim, bias=bias)
    v = d.op("reshape", flat, shape=("tokens", info.kv_heads, info.head_dim))
    return d.linear(d.attend(i, rotate(q), rotate(k), v, window=window), f"{attn}.o_proj", info.hidden_size, bias=bias)


def build_smollm3(info: ModelInfo, max_model_len: int | None) -> Program:
    """SmolLM3: Llama, where every fourth layer (or those that `no_rope_layers` marks with 0) rotates nothing."""
    config, d = info.config, Decoder(info, max_model_len)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        interval = count(config, "no_rope_layer_interval")
        rotated = [int((i + 1) % interval != 0) for i in range(info.layers)]
    if not isinstance(rotated, list | tuple) or len(rotated) != info.layers:
        raise CheckpointError(f"the configuration's 'no_rope_layers' must be a list of {info.layers} flags, not {rotated!r}",
                              param="no_rope_layers")  # fmt: skip
    bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    sliding = flag(config, "use_sliding_window", False)
    windows = info.windows(lambda layer: not rotated[layer]) if sliding else (None,) * info.layers
    rotate, x = d.rotation(), d.embed()
    for i, window in enumerate(windows):
        layer, y = f"model.layers.{i}", d.norm(x, f"model.layers.{i}.input_layernorm")
        y = d.attention(i, y, rotate if rotated[i] else as_is, bias=bias, out_bias=bias, window=window)
        x = d.op("add", x, y)
        x = d.op("add", x, d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp", bias=mlp_bias))
    return d.finish(x)


def build_granite(info: ModelInfo, max_model_len: int | None) -> Program:
    """Granite: Llama with constant factors on embeddings, scores, what blocks add, and logits."""
    config, d = info.config, Decoder(info, max_model_len)
    bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    scale, residual = number(config, "attention_multiplier"), number(config, "residual_multiplier")
    rotate, x = d.rotation(), d.embed(scale=number(config, "embedding_multiplier"))
    for i in range(info.layers):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        y = d.attention(i, y, rotate, bias=bias, out_bias=bias, scale=scale)
        x = d.op("add", x, d.op("scale", y, factor=residual))
        y = d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp", bias=mlp_bias)
        x = d.op("add", x, d.op("scale", y, factor=residual))
    return d.finish(x, scale=1 / number(config, "logits_scaling"))


def build_glm4(info: ModelInfo, max_model_len: int | None) -> Program:
    """GLM-4-0414: norms before and after each block, half of each head rotated in neighbouring pairs."""
    d, bias = Decoder(info, max_model_len), flag(info.config, "attention_bias", True)
    rotate, x = d.rotation(), d.embed()
    for i in range(info.layers):
        layer = f"model.layers.{i}"
        y = d.attention(i, d.norm(x, f"{layer}.input_layernorm"), rotate, bias=bias)
        x = d.op("add", x, d.norm(y, f"{layer}.post_self_attn_layernorm"))
        y = d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp", fused=True)
        x = d.op("add", x, d.norm(y, f"{layer}.post_mlp_layernorm"))
    return d.finish(x)


def read_cohere2(architecture: str, config: RawConfig) -> ModelInfo:
    """Cohere 2 calls its norm's epsilon after layer norm."""
    return read_info(architecture, {**config, "rms_norm_eps": config.get("layer_norm_eps")})


class CohereDecoder(Decoder):
    """Layer norms without a bias in place of RMS norms."""

    def norm(self, x: Value, name: str) -> Value:
        """Layer norm over the last dimension."""
        return self.op("layer_norm", x, self.b.weight(f"{name}.weight", x.shape[-1:]), None, eps=self.info.norm_eps)


def build_cohere2(info: ModelInfo, max_model_len: int | None) -> Program:
    """Cohere 2: both blocks of a layer read one norm; only layers with a window are rotated, in neighbouring pairs."""
    config, d = info.config, CohereDecoder(info, max_model_len)
    pattern, bias = count(config, "sliding_window_pattern"), flag(config, "attention_bias", False)
    rotate, x = d.rotation(), d.embed()
    for i, window in enumerate(info.windows(lambda layer: (layer + 1) % pattern != 0)):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        attended = d.attention(i, y, as_is if window is None else rotate, bias=bias, out_bias=bias, window=window)
        x = d.op("add", d.op("add", x, attended), d.mlp(y, f"{layer}.mlp"))
    return d.finish(x, scale=number(config, "logit_scale"))


olmo2 = Hook(Family(build_olmo2, OLMO_DEFAULTS))
olmo3 = Hook(Family(build_olmo3, OLMO3_DEFAULTS))
smollm3 = Hook(Family(build_smollm3, SMOLLM3_DEFAULTS))
granite = Hook(Family(build_granite, GRANITE_DEFAULTS))
glm4 = Hook(Family(build_glm4, GLM4_DEFAULTS))
cohere2 = Hook(Family(build_cohere2, COHERE2_DEFAULTS, read_cohere2))
