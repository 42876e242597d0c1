"""DeepSeek V2, V3 and, in short contexts, V3.2: latent attention, and experts that are chosen in groups beside shared ones.

What is kept of a token is a latent vector, from which each head's keys and values are projections, and one rotated key for all
heads. The projections are absorbed: that of the keys goes to the queries, that of the values behind the attention, so that
attention reads the latents as they are stored.

Sources: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix B; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1; keys as in their
config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import LatentKV, Program, Value, Weight

from trivium_families.experts import shared_and_routed
from trivium_families.heads import HeadDecoder
from trivium_families.pieces import as_is
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, Rearranged, stack_experts

V2_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "first_k_dense_replace": 0, "topk_method": "greedy",
    "rope_interleaved": True,
}  # fmt: skip
V3_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "rope_interleave": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
_LATENT_EPS = 1e-6
_KV_B = re.compile(r"(model\.layers\.\d+\.self_attn)\.kv_b_proj\.weight")


def read_deepseek(architecture: str, config: RawConfig) -> ModelInfo:
    """What is rotated counts as the head; every head has keys of its own."""
    rotated = {"head_dim": config.get("qk_rope_head_dim"), "num_key_value_heads": config.get("num_attention_heads")}
    interleaved = config.get("rope_interleaved", config.get("rope_interleave"))
    return read_info(architecture, {**config, **rotated, "rope_interleaved": interleaved})


def build_v2(info: ModelInfo, max_model_len: int | None) -> Program:
    """DeepSeek-V2: experts by softmax; a group is worth its best expert."""
    config = info.config
    grouped = config.get("topk_method") == "group_limited_greedy"
    info = info if grouped else info._replace(config={**config, "n_group": 1, "topk_group": 1})
    d = Decoder(info, max_model_len)
    return latent_layers(d, shared_and_routed(d, scoring="softmax", normalize=False, correction=False))


def build_v3(info: ModelInfo, max_model_len: int | None) -> Program:
    """DeepSeek-V3, R1: experts by sigmoid and a bias for the choice; a group is worth its two best experts."""
    d, normalize = Decoder(info, max_model_len), flag(info.config, "norm_topk_prob", True)
    return latent_layers(d, shared_and_routed(d, scoring="sigmoid", normalize=normalize, correction=True))


def draft_v3(info: ModelInfo, max_model_len: int | None) -> Program:
    """The head of DeepSeek-V3: its layer stands behind the others in the checkpoint, with `num_nextn_predict_layers` 1."""
    if info.config.get("num_nextn_predict_layers") != 1:
        message = f"{info.architecture} must have a head of one layer ('num_nextn_predict_layers' 1) for its drafts, not "
        raise UnsupportedError(f"{message}{info.config.get('num_nextn_predict_layers')!r}", param="num_nextn_predict_layers")
    i, normalize = info.layers, flag(info.config, "norm_topk_prob", True)
    layer = f"model.layers.{i}"
    d = HeadDecoder(info, max_model_len, f"{layer}.shared_head.norm")
    feed_forward = shared_and_routed(d, scoring="sigmoid", normalize=normalize, correction=True)
    x = d.joined(f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj")
    x = d.op("add", x, _latent_attention(d, i, d.norm(x, f"{layer}.input_layernorm"), d.rotation(), as_is))
    return d.finish(d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm"))))


def build_v32(info: ModelInfo, max_model_len: int | None) -> Program:
    """DeepSeek-V3.2 in contexts of up to `index_topk` tokens, where its sparse attention reads all positions: DeepSeek-V3."""
    longest, chosen = max_model_len or info.max_positions, count(info.config, "index_topk")
    if longest > chosen:
        message = (
            f"{info.architecture} reads, in contexts of more than {chosen} tokens, only positions that an indexer chooses, and "
            f"no operator does that (sparse latent attention); {longest} were asked for: set max_model_len to {chosen} or less"
        )
        raise UnsupportedError(message, param="max_model_len")  # fmt: skip
    return build_v3(info, max_model_len)


def read_v32(architecture: str, config: RawConfig) -> ModelInfo:
    """`mlp_layer_types` counts the dense layers, which come first."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return read_deepseek(architecture, config)
    dense = kinds.count("dense") if isinstance(kinds, list | tuple) else -1
    if dense < 0 or any(kind != "sparse" for kind in kinds[dense:]):
        raise CheckpointError(f"the configuration's 'mlp_layer_types' must be a list of dense, then sparse layers, not {kinds!r}",
                              param="mlp_layer_types")  # fmt: skip
    return read_deepseek(architecture, {**config, "first_k_dense_replace": dense})


def refuse_v4(architecture: str, config: RawConfig) -> ModelInfo:
    """Raises UnsupportedError, which says what is missing."""
    message = (
        f"{architecture} is not supported: no operator does attention over compressed keys (chosen by an indexer, beside a window)"
    )
    raise UnsupportedError(f"{message}, and none its hyper-connections", param="architectures")


def build_v4(info: ModelInfo, max_model_len: int | None) -> Program:
    """DeepSeek-V4: refused by name; attention over compressed keys and hyper-connections have no operators yet."""
    raise UnsupportedError(f"{info.architecture} is not supported", param="architectures")


def latent_layers(d: Decoder, feed_forward: Callable[[int, Value], Value], sharpen: Rotation = as_is) -> Program:
    """Llama's graph with latent attention and `feed_forward(layer, x)`. `sharpen`: what is done to queries before all else."""
    rotate, x = d.rotation(), d.embed()
    for i in range(d.info.layers):
        layer = f"model.layers.{i}"
        x = d.op("add", x, _latent_attention(d, i, d.norm(x, f"{layer}.input_layernorm"), rotate, sharpen))
        x = d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm")))
    return d.finish(x)


def _latent_attention(d: Decoder, i: int, x: Value, rotate: Rotation, sharpen: Rotation) -> Value:
    """The attention block of layer `i`. rank: of the latent; nope, rope: numbers of a head's query that are not and that are
    rotated; its values have v_head_dim."""
    info, config, attn = d.info, d.info.config, f"model.layers.{i}.self_attn"
    rank, nope, rope, v_dim = (count(config, k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias = flag(config, "attention_bias", False)
    if config.get("q_lora_rank") is None:
        q = d.linear(x, f"{attn}.q_proj", info.heads * (nope + rope))
    else:
        low = _latent_norm(d, d.linear(x, f"{attn}.q_a_proj", count(config, "q_lora_rank"), bias=bias), f"{attn}.q_a_layernorm")
        q = d.linear(low, f"{attn}.q_b_proj", info.heads * (nope + rope))
    q = sharpen(d.op("reshape", q, shape=("tokens", info.heads, nope + rope)))
    both = d.linear(x, f"{attn}.kv_a_proj_with_mqa", rank + rope, bias=bias)
    latent = _latent_norm(d, d.op("slice", both, start=0, stop=rank), f"{attn}.kv_a_layernorm")
    key = rotate(d.op("reshape", d.op("slice", both, start=rank, stop=rank + rope), shape=("tokens", 1, rope)))
    kv = d.b.latent_write(d.b.state(f"kv.{i}", LatentKV(rank, rope)), latent, d.op("reshape", key, shape=("tokens", rope)))
    into = d.b.weight(f"{attn}.k_absorbed.weight", (info.heads, rank, nope))
    out = d.b.weight(f"{attn}.v_absorbed.weight", (info.heads, v_dim, rank))
    q_latent = d.op("head_linear", d.op("slice", q, start=0, stop=nope), into)
    q_rope = rotate(d.op("slice", q, start=nope, stop=nope + rope))
    heads = d.b.latent_attention(
        q_latent, q_rope, kv, d.b.input("query_starts"), d.b.input("context_lens"), scale=_scale(d, nope + rope)
    )
    y = d.op("reshape", d.op("head_linear", heads, out), shape=("tokens", info.heads * v_dim))
    return d.linear(y, f"{attn}.o_proj", info.hidden_size, bias=bias)


def _latent_norm(d: Decoder, x: Value, name: str) -> Value:
    return d.op("rms_norm", x, d.b.weight(f"{name}.weight", x.shape[-1:]), eps=_LATENT_EPS)


def _scale(d: Decoder, head_dim: int) -> float:
    """head_dim ** -0.5; where YaRN stretches the positions, times the square of its mscale_all_dim's attention factor."""
    rope = table(d.info.config, "rope_parameters") or table(d.info.config, "rope_scaling")
    scale: float = head_dim**-0.5
    if rope.get("mscale_all_dim") and (rope.get("rope_type") or rope.get("type") or "default") != "default":
        factor = number(rope, "factor")
        scale *= (0.1 * number(rope, "mscale_all_dim") * math.log(factor) + 1) ** 2 if factor > 1 else 1.0
    return scale


def absorb(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """kv_b_proj[heads * (nope + v), rank] as k_absorbed[heads, rank, nope] and v_absorbed[heads, v, rank]; experts stacked."""
    text = {**config, **table(config, "text_config")}
    nope, heads = count(text, "qk_nope_head_dim"), count(text, "num_attention_heads")

    def keys(array: np.ndarray) -> np.ndarray:
        return array.reshape(heads, -1, array.shape[-1])[:, :nope].swapaxes(1, 2)

    def values(array: np.ndarray) -> np.ndarray:
        return array.reshape(heads, -1, array.shape[-1])[:, nope:]

    arranged = dict[str, Make]()
    for name, make in stack_experts(config, tensors).items():
        if found := _KV_B.fullmatch(name):
            for part, take in (("k_absorbed", keys), ("v_absorbed", values)):
                arranged[f"{found[1]}.{part}.weight"] = partial(_rearranged, f"{found[1]}.{part}.weight", make, take)
        else:
            arranged[name] = make
    return arranged


def _rearranged(name: str, make: Make, take: Callable[[np.ndarray], np.ndarray]) -> Weight:
    return Rearranged(name, make(), take)


deepseek_v2 = Hook(Family(build_v2, V2_DEFAULTS, read_deepseek, absorb))
deepseek_v3 = Hook(Family(build_v3, V3_DEFAULTS, read_deepseek, absorb, draft=draft_v3))
deepseek_v32 = Hook(Family(build_v32, {**V3_DEFAULTS, "index_topk": 2048}, read_v32, absorb))
deepseek_v4 = Hook(Family(build_v4, V3_DEFAULTS, refuse_v4))
