"""Mixtures of experts that join the pieces of other families: attention of one, experts of another.

Sources: Qwen Team 2024, "Qwen1.5-MoE"; rednote-hilab 2025, "dots.llm1 Technical Report"; Upstage 2026, model card of Solar Open;
Muennighoff et al. 2024, "OLMoE"; MiniMax 2025, model card of MiniMax-M2; Z.ai 2026, model card of GLM-4.7-Flash; Tencent Youtu Lab
2026, model card of Youtu-LLM; Baidu 2025, "ERNIE 4.5 Technical Report"; keys as in their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, read_info
from trivium.ops import Program, Value

from trivium_families.deepseek import V3_DEFAULTS, absorb, build_v3, draft_v3, latent_layers, read_deepseek, read_v32
from trivium_families.dense import flat_normed_attention
from trivium_families.experts import experts_of, gated, layers, moe, shared_and_routed
from trivium_families.kin import stack
from trivium_families.pieces import rearranged, refuse_unless, split_experts
from trivium_families.plugin import Hook
from trivium_families.qwen_next import sparse
from trivium_families.stacked import Make, stack_experts

_LLAMA: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
QWEN2_DEFAULTS: RawConfig = {
    **_LLAMA, "num_key_value_heads": 16, "decoder_sparse_step": 1, "norm_topk_prob": False, "max_window_layers": 28,
    "sliding_window": 4096,
}  # fmt: skip
DOTS1_DEFAULTS: RawConfig = {**_LLAMA, "sliding_window": 4096, "first_k_dense_replace": 0, "norm_topk_prob": False}
SOLAR_DEFAULTS: RawConfig = {
    **_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 0,
}  # fmt: skip
MINIMAX_DEFAULTS: RawConfig = {**_LLAMA, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8}
GLM_LITE_DEFAULTS: RawConfig = {
    **V3_DEFAULTS, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
ERNIE_DEFAULTS: RawConfig = {
    **_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "rope_interleaved": True, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1,
}  # fmt: skip
_STATICS = re.compile(r"(model\.layers\.\d+\.mlp)(?:\.gate)?\.moe_statics\.e_score_correction_bias")
YOUTU_DEFAULTS: RawConfig = {**V3_DEFAULTS, "tie_word_embeddings": True}


def build_qwen2_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen1.5-MoE, Qwen2-MoE: experts beside a gated shared one, and biases on queries, keys and values."""
    sliding, below = flag(info.config, "use_sliding_window", False), count(info.config, "max_window_layers")
    windows = info.windows(lambda layer: layer % 2 == 0 and layer < below) if sliding else (None,) * info.layers
    d = Decoder(info, max_model_len)
    return layers(d, windows, sparse(d), bias=flag(info.config, "qkv_bias", True))


def build_dots1(info: ModelInfo, max_model_len: int | None) -> Program:
    """dots.llm1: DeepSeek's experts under Qwen3's attention; windows in the upper layers if asked for."""
    d, config = Decoder(info, max_model_len), info.config
    feed_forward = shared_and_routed(d, scoring="sigmoid", normalize=flag(config, "norm_topk_prob", False), correction=True)
    windows = info.windows(lambda layer: layer >= count(config, "max_window_layers", info.layers))
    bias = flag(config, "attention_bias", False)
    return layers(d, windows, feed_forward, bias=bias, out_bias=bias, qk_norm=True)


def build_solar(info: ModelInfo, max_model_len: int | None) -> Program:
    """Solar Open: DeepSeek's experts in every layer, under Llama's attention."""
    d, config = Decoder(info, max_model_len), info.config
    feed_forward = shared_and_routed(d, scoring="sigmoid", normalize=flag(config, "norm_topk_prob", True), correction=True)
    return layers(d, (None,) * info.layers, feed_forward, bias=flag(config, "attention_bias", False))


def build_olmoe(info: ModelInfo, max_model_len: int | None) -> Program:
    """OLMoE: experts in every layer; queries and keys are normalised over all heads."""
    refuse_unless(info, "clip_qkv", (), "no operator clips queries, keys and values")
    d, config = Decoder(info, max_model_len), info.config
    experts, chosen = experts_of(config, "num_experts")
    normalize, bias = flag(config, "norm_topk_prob", False), flag(config, "attention_bias", False)

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        return moe(d, x, block, experts=experts, chosen=chosen, inter=info.intermediate_size, normalize=normalize)

    return d.finish(stack(d, _flat(d, bias), feed_forward))


def build_minimax_m2(info: ModelInfo, max_model_len: int | None) -> Program:
    """MiniMax-M2: experts in every layer, chosen by sigmoid and a bias; queries and keys are normalised over all heads, and a part
    of each is rotated."""
    d, (experts, chosen) = Decoder(info, max_model_len), experts_of(info.config, "num_local_experts")

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.block_sparse_moe"
        sizes = {"experts": experts, "chosen": chosen, "inter": info.intermediate_size}
        return moe(d, x, block, **sizes, normalize=True, scoring="sigmoid", bias=f"{block}.e_score_correction_bias")

    return d.finish(stack(d, _flat(d, False), feed_forward))


def _flat(d: Decoder, bias: bool) -> Callable[[int, Value], Value]:
    rotate = d.rotation()
    return lambda i, y: flat_normed_attention(d, i, y, rotate, bias=bias)


def read_minimax(architecture: str, config: RawConfig) -> ModelInfo:
    """`rotary_dim` is how much of a head is rotated."""
    part = config.get("partial_rotary_factor") or count(config, "rotary_dim", 1) / count(config, "head_dim")
    return read_info(architecture, config if config.get("rotary_dim") is None else {**config, "partial_rotary_factor": part})


def build_glm_lite(info: ModelInfo, max_model_len: int | None) -> Program:
    """GLM-4.7-Flash: DeepSeek-V3 of another size."""
    return build_v3(info, max_model_len)


def build_ernie_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """ERNIE 4.5 with experts beside shared ones, chosen by softmax and a bias, in some layers; rotated in neighbouring pairs."""
    d, config, bias = Decoder(info, max_model_len), info.config, flag(info.config, "use_bias", False)
    experts, chosen, inter = (count(config, key) for key in ("moe_num_experts", "moe_k", "moe_intermediate_size"))
    first = 0 if config["moe_layer_start_index"] == 0 else count(config, "moe_layer_start_index")
    every = count(config, "moe_layer_interval")
    end, shared = config.get("moe_layer_end_index", -1), config.get("moe_num_shared_experts") or 0
    last = info.layers if end == -1 else count(config, "moe_layer_end_index")
    if chosen > experts:
        raise CheckpointError(
            f"the configuration's 'moe_k' ({chosen}) is more than its 'moe_num_experts' ({experts})", param="moe_k"
        )

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        if (i + 1) % every or not first <= i <= last:
            return d.mlp(x, block, bias=bias)
        correction = f"{block}.gate.e_score_correction_bias"
        y = moe(d, x, block, experts=experts, chosen=chosen, inter=inter, normalize=True, bias=correction)
        return d.op("add", y, gated(d, x, f"{block}.shared_experts", inter * shared)) if shared else y

    return layers(d, (None,) * info.layers, feed_forward, bias=bias, out_bias=bias)


def arrange_ernie(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """Experts stacked; moe_statics' bias, of one row, as a part of the router."""
    arranged = dict[str, Make]()
    for name, make in split_experts(stack_experts(config, tensors)).items():
        if found := _STATICS.fullmatch(name):
            name = f"{found[1]}.gate.e_score_correction_bias"
            make = rearranged(name, make, lambda a: a.reshape(-1))
        arranged[name] = make
    return arranged


def build_youtu(info: ModelInfo, max_model_len: int | None) -> Program:
    """Youtu-LLM: latent attention with dense blocks."""
    d = Decoder(info, max_model_len)
    return latent_layers(d, lambda i, x: d.mlp(x, f"model.layers.{i}.mlp"))


ernie_moe = Hook(Family(build_ernie_moe, ERNIE_DEFAULTS, read_info, arrange_ernie))
_STACK = partial(stack_experts, names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
qwen2_moe = Hook(Family(build_qwen2_moe, QWEN2_DEFAULTS, read_info, stack_experts))
dots1 = Hook(Family(build_dots1, DOTS1_DEFAULTS, read_info, stack_experts))
solar = Hook(Family(build_solar, SOLAR_DEFAULTS, read_info, stack_experts))
olmoe = Hook(Family(build_olmoe, {**_LLAMA, "rms_norm_eps": 1e-5}, read_info, stack_experts))
minimax_m2 = Hook(Family(build_minimax_m2, MINIMAX_DEFAULTS, read_minimax, _STACK))
glm_lite = Hook(Family(build_glm_lite, GLM_LITE_DEFAULTS, read_v32, absorb, draft=draft_v3))
youtu = Hook(Family(build_youtu, YOUTU_DEFAULTS, read_deepseek, absorb))
