"""Families whose feed-forward block is a mixture of experts, and what they share.

Sources: Jiang et al. 2024, "Mixtral of Experts"; Yang et al. 2025, "Qwen3 Technical Report"; Zhipu 2025, "GLM-4.5"; keys
as in their config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info
from trivium.ops import Program, Value

from trivium_families.heads import stored_head
from trivium_families.plugin import Hook
from trivium_families.stacked import stack_experts

MIXTRAL_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
GLM4_MOE_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "norm_topk_prob": True,
}  # fmt: skip


def experts_of(config: RawConfig, key: str) -> tuple[int, int]:
    """(experts, experts a token), the first under `key`; CheckpointError if more are chosen than there are."""
    experts, chosen = count(config, key), count(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(f"the configuration's 'num_experts_per_tok' ({chosen}) is more than its {key!r} ({experts})",
                              param="num_experts_per_tok")  # fmt: skip
    return experts, chosen


def moe(
    d: Decoder,
    x: Value,
    block: str,
    *,
    experts: int,
    chosen: int,
    inter: int,
    normalize: bool,
    bias: str | None = None,
    **route: Any,
) -> Value:
    """y[tokens, hidden]: each token's `chosen` best of `experts`; `normalize`: their weights add up to one. `bias`: the tensor that
    is added to the scores when experts are chosen; `route`: further attributes of moe_route. Weights: BLOCK.gate, the router;
    BLOCK.experts.{gate,up,down}_proj, [experts, out, in]."""
    hidden = d.info.hidden_size
    correction = None if bias is None else d.b.weight(bias, (experts,))
    logits = d.linear(x, f"{block}.gate", experts)
    weights, ids = d.b.moe_route(logits, correction, top_k=chosen, normalize=normalize, **route)
    gate, up, down = (
        d.b.weight(f"{block}.experts.{name}.weight", (experts, *shape))
        for name, shape in (("gate_proj", (inter, hidden)), ("up_proj", (inter, hidden)), ("down_proj", (hidden, inter)))
    )
    return d.op("moe_experts", x, weights, ids, gate, up, down, kind=d.info.activation)


def gated(d: Decoder, x: Value, block: str, inter: int) -> Value:
    """The gated block `block` of another width than the model's: an expert that all tokens see."""
    gate, up = (d.linear(x, f"{block}.{name}_proj", inter) for name in ("gate", "up"))
    return d.linear(d.op("gated", gate, up, kind=d.info.activation), f"{block}.down_proj", d.info.hidden_size)


def shared_and_routed(d: Decoder, *, scoring: str, normalize: bool, correction: bool) -> Callable[[int, Value], Value]:
    """DeepSeek's feed-forward blocks: `first_k_dense_replace` layers with a gated block, then experts that are chosen in groups
    beside shared ones. `correction`: the router has a bias for the choice."""
    config = d.info.config
    experts, chosen = experts_of(config, "num_local_experts" if config.get("num_local_experts") is not None else "n_routed_experts")
    inter, shared = count(config, "moe_intermediate_size"), count(config, "n_shared_experts")
    dense = 0 if config.get("first_k_dense_replace") == 0 else count(config, "first_k_dense_replace")
    groups = count(config, "n_group", 1)
    route = {"scoring": scoring, "scale": number(config, "routed_scaling_factor", 1.0), "groups": groups,
             "top_groups": count(config, "topk_group", 1) if groups > 1 else 1}  # fmt: skip

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        if i < dense:
            return d.mlp(x, block)
        bias = f"{block}.gate.e_score_correction_bias" if correction else None
        y = moe(d, x, block, experts=experts, chosen=chosen, inter=inter, normalize=normalize, bias=bias, **route)
        return d.op("add", y, gated(d, x, f"{block}.shared_experts", inter * shared))

    return feed_forward


def layers(d: Decoder, windows: tuple[int | None, ...], feed_forward: Callable[[int, Value], Value], **options: bool) -> Program:
    """Llama's graph with `feed_forward(layer, x)` in place of its gated block. `options` are those of Decoder.attention."""
    rotate, x = d.rotation(), d.embed()
    for i, window in enumerate(windows):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        x = d.op("add", x, d.attention(i, y, rotate, window=window, **options))
        x = d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm")))
    return d.finish(x)


def build_mixtral(info: ModelInfo, max_model_len: int | None) -> Program:
    """Mixtral: Mistral with experts in every layer; the weights of the chosen ones add up to one."""
    d = Decoder(info, max_model_len)
    experts, chosen = experts_of(info.config, "num_local_experts")

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.block_sparse_moe"
        return moe(d, x, block, experts=experts, chosen=chosen, inter=info.intermediate_size, normalize=True)

    return layers(d, info.windows(lambda layer: True), feed_forward)


def build_qwen3_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer that is not among `mlp_only_layers`."""
    config, d = info.config, Decoder(info, max_model_len)
    experts, chosen = experts_of(config, "num_local_experts" if config.get("num_local_experts") is not None else "num_experts")
    inter, step, dense = (
        count(config, "moe_intermediate_size"),
        count(config, "decoder_sparse_step"),
        config.get("mlp_only_layers") or (),
    )
    normalize, bias = flag(config, "norm_topk_prob", False), flag(config, "attention_bias", False)

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        if i in dense or (i + 1) % step:
            return d.mlp(x, block)
        return moe(d, x, block, experts=experts, chosen=chosen, inter=inter, normalize=normalize)

    sliding = flag(config, "use_sliding_window", False)
    windows = info.windows(lambda layer: True) if sliding else (None,) * info.layers
    return layers(d, windows, feed_forward, bias=bias, out_bias=bias, qk_norm=True)


def build_glm4_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """GLM-4.5, 4.6, 4.7: DeepSeek's experts under ordinary attention, of whose heads half is rotated."""
    d = Decoder(info, max_model_len)
    return layers(d, (None,) * info.layers, _glm4_experts(d), **_glm4_options(info))


def draft_glm4_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """The head of GLM-4.5: its layer stands behind the others in the checkpoint."""
    d = stored_head(info, max_model_len)
    rotate, options = d.rotation(), _glm4_options(info)
    return d.stored(lambda i, x: d.attention(i, x, rotate, **options), _glm4_experts(d))


def _glm4_experts(d: Decoder) -> Callable[[int, Value], Value]:
    return shared_and_routed(d, scoring="sigmoid", normalize=flag(d.info.config, "norm_topk_prob", True), correction=True)


def _glm4_options(info: ModelInfo) -> dict[str, bool]:
    return {"bias": flag(info.config, "attention_bias", False), "qk_norm": flag(info.config, "use_qk_norm", False)}


_stack_mixtral = partial(stack_experts, names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
mixtral = Hook(Family(build_mixtral, MIXTRAL_DEFAULTS, read_info, _stack_mixtral))
glm4_moe = Hook(Family(build_glm4_moe, GLM4_MOE_DEFAULTS, read_info, stack_experts, draft=draft_glm4_moe))
qwen3_moe = Hook(Family(build_qwen3_moe, QWEN3_DEFAULTS, read_info, stack_experts))
