"""DeepSeek V2, V3 and V3.2: latent attention, and experts that are chosen in groups beside shared ones.

What is kept of a token is a latent vector, from which each head's keys and values are projections, and one rotated key for all
heads. The projections are absorbed: that of the keys goes to the queries, that of the values behind the attention, so that
attention reads the latents as they are stored.

Sources: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix B; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1; DeepSeek-AI
2025, "DeepSeek-V3.2"; keys as in their config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import LatentKV, Program, Value, Weight

from trivium_families.experts import shared_and_routed
from trivium_families.heads import HeadDecoder, stored_head
from trivium_families.pieces import as_is, per_layer
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
Choose = Callable[[int, Value, Value], Value]
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
    """The head of DeepSeek-V3: its layer stands behind the others in the checkpoint."""
    d = stored_head(info, max_model_len)
    return _head_layer(d, None)


def draft_v32(info: ModelInfo, max_model_len: int | None) -> Program:
    """The head of DeepSeek-V3.2, whose layer has an indexer, too."""
    d, chosen = stored_head(info, max_model_len), count(info.config, "index_topk")
    return _head_layer(d, _indexer(d, chosen, interleaved=False) if (max_model_len or info.max_positions) > chosen else None)


def _head_layer(d: HeadDecoder, choose: Choose | None) -> Program:
    feed_forward = shared_and_routed(d, scoring="sigmoid", normalize=flag(d.info.config, "norm_topk_prob", True), correction=True)
    rotate = d.rotation()
    return d.stored(lambda i, x: _latent_attention(d, i, x, rotate, choose=choose), feed_forward)


def build_v32(info: ModelInfo, max_model_len: int | None) -> Program:
    """DeepSeek-V3.2: DeepSeek-V3 whose attention, where contexts can be longer, reads `index_topk` positions that an indexer
    chooses."""
    d = Decoder(info, max_model_len)
    return _sparse_layers(d, max_model_len, lambda chosen: _indexer(d, chosen, interleaved=False))


def build_glm_dsa(info: ModelInfo, max_model_len: int | None) -> Program:
    """GLM-5: DeepSeek-V3.2 of another size, some of whose layers may read the positions that a lower one has chosen."""
    d, kinds = Decoder(info, max_model_len), _indexer_kinds(info)
    return _sparse_layers(d, max_model_len, lambda chosen: _shared(_indexer(d, chosen, interleaved=True), kinds))


def _sparse_layers(d: Decoder, max_model_len: int | None, indexer: Callable[[int], Choose]) -> Program:
    longest, chosen = max_model_len or d.info.max_positions, count(d.info.config, "index_topk")
    normalize = flag(d.info.config, "norm_topk_prob", True)
    feed_forward = shared_and_routed(d, scoring="sigmoid", normalize=normalize, correction=True)
    return latent_layers(d, feed_forward, choose=indexer(chosen) if longest > chosen else None)


def _indexer_kinds(info: ModelInfo) -> Sequence[str]:
    """`indexer_types`, or `index_topk_pattern` of F and S, or every `index_topk_freq`-th layer from a certain one on: "full" for a
    layer with an indexer of its own, the first of which is layer 0."""
    config, names = info.config, {"F": "full", "S": "shared"}
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [names.get(letter, letter) for letter in pattern]
    every, first = count(config, "index_topk_freq", 1), count(config, "index_skip_topk_offset", 2)
    found = pattern or ["shared" if max(i - first + 1, 0) % every else "full" for i in range(info.layers)]
    kinds = per_layer(info, "indexer_types", lambda i: found[i] if i < len(found) else "")
    if kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        message = f"the configuration's 'indexer_types' must be full or shared, the first one full, not {kinds!r}"
        raise CheckpointError(message, param="indexer_types")
    return kinds


def _shared(choose: Choose, kinds: Sequence[str]) -> Choose:
    """In layers that are "shared", what was chosen last."""
    last = list[Value]()

    def chosen(i: int, x: Value, low: Value) -> Value:
        if kinds[i] == "full":
            last.append(choose(i, x, low))
        return last[-1]

    return chosen


def _indexer(d: Decoder, chosen: int, *, interleaved: bool) -> Choose:
    """The positions that layer `i` reads, from its input x and the compressed queries. What is rotated stands first in queries and
    keys of the indexer; stored keys have it in their second part."""
    config, rotate = d.info.config, d.rotation("rope.index.inv_freq", {**d.info.config, "rope_interleaved": interleaved})
    heads, dim, rope = (count(config, key) for key in ("index_n_heads", "index_head_dim", "qk_rope_head_dim"))

    def parts(x: Value) -> tuple[Value, Value]:
        x = rotate(x)
        return d.op("slice", x, start=rope, stop=dim), d.op("slice", x, start=0, stop=rope)

    def choose(i: int, x: Value, low: Value) -> Value:
        at, b = f"model.layers.{i}.self_attn.indexer", d.b
        q = d.op("concat", *parts(d.op("reshape", d.linear(low, f"{at}.wq_b", heads * dim), shape=("tokens", heads, dim))))
        norm = (b.weight(f"{at}.k_norm.{name}", (dim,)) for name in ("weight", "bias"))
        key = d.op("layer_norm", d.linear(x, f"{at}.wk", dim), *norm, eps=_LATENT_EPS)
        plain, turned = parts(d.op("reshape", key, shape=("tokens", 1, dim)))
        keys = b.latent_write(
            b.state(f"index.{i}", LatentKV(dim - rope, rope)), d.op("reshape", plain, shape=("tokens", dim - rope)),
            d.op("reshape", turned, shape=("tokens", rope)),
        )  # fmt: skip
        weights = d.op("scale", d.linear(x, f"{at}.weights_proj", heads), factor=(heads * dim) ** -0.5)
        return d.op("top_positions", q, weights, keys, b.input("query_starts"), b.input("context_lens"), top_k=chosen)

    return choose


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


def latent_layers(
    d: Decoder, feed_forward: Callable[[int, Value], Value], sharpen: Rotation = as_is, choose: Choose | None = None
) -> Program:
    """Llama's graph with latent attention and `feed_forward(layer, x)`. `sharpen`: what is done to queries before all else;
    `choose`: the positions that are read (None: all)."""
    rotate, x = d.rotation(), d.embed()
    for i in range(d.info.layers):
        layer = f"model.layers.{i}"
        x = d.op("add", x, _latent_attention(d, i, d.norm(x, f"{layer}.input_layernorm"), rotate, sharpen, choose))
        x = d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm")))
    return d.finish(x)


def _latent_attention(
    d: Decoder, i: int, x: Value, rotate: Rotation, sharpen: Rotation = as_is, choose: Choose | None = None
) -> Value:
    """The attention block of layer `i`. rank: of the latent; nope, rope: numbers of a head's query that are not and that are
    rotated; its values have v_head_dim."""
    info, config, attn = d.info, d.info.config, f"model.layers.{i}.self_attn"
    rank, nope, rope, v_dim = (count(config, k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, low = flag(config, "attention_bias", False), x
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
    args = q_latent, q_rope, kv, d.b.input("query_starts"), d.b.input("context_lens")
    if choose is None:
        heads = d.b.latent_attention(*args, scale=_scale(d, nope + rope))
    else:
        heads = d.b.sparse_latent_attention(*args, choose(i, x, low), scale=_scale(d, nope + rope))
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
deepseek_v32 = Hook(Family(build_v32, {**V3_DEFAULTS, "index_topk": 2048}, read_v32, absorb, draft=draft_v32))
DSA_DEFAULTS: RawConfig = {**V3_DEFAULTS, "rms_norm_eps": 1e-5, "index_topk": 2048, "n_group": 1, "topk_group": 1}
glm_dsa = Hook(Family(build_glm_dsa, DSA_DEFAULTS, read_v32, absorb))
deepseek_v4 = Hook(Family(build_v4, V3_DEFAULTS, refuse_v4))
