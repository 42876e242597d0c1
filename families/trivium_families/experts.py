"""Families whose feed-forward block is a mixture of experts, and what they share.

Sources: Jiang et al. 2024, "Mixtral of Experts"; Yang et al. 2025, "Qwen3 Technical Report"; keys
as in their config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, read_info
from trivium.ops import Program, Value

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


def experts_of(config: RawConfig, key: str) -> tuple[int, int]:
    """(experts, experts a token), the first under `key`; CheckpointError if more are chosen than there are."""
    experts, chosen = count(config, key), count(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(f"the configuration's 'num_experts_per_tok' ({chosen}) is more than its {key!r} ({experts})",
                              param="num_experts_per_tok")  # fmt: skip
    return experts, chosen


def moe(d: Decoder, x: Value, block: str, *, experts: int, chosen: int, inter: int, normalize: bool) -> Value:
    """y[tokens, hidden]: each token's `chosen` best of `experts` by the softmax of the router's logits, `normalize`: their weights
    add up to one. Weights: BLOCK.gate, the router; BLOCK.experts.{gate,up,down}_proj, [experts, out, in]."""
    hidden = d.info.hidden_size
    weights, ids = d.b.moe_route(d.linear(x, f"{block}.gate", experts), None, top_k=chosen, normalize=normalize)
    gate, up, down = (
        d.b.weight(f"{block}.experts.{name}.weight", (experts, *shape))
        for name, shape in (("gate_proj", (inter, hidden)), ("up_proj", (inter, hidden)), ("down_proj", (hidden, inter)))
    )
    return d.op("moe_experts", x, weights, ids, gate, up, down, kind=d.info.activation)


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


_stack_mixtral = partial(stack_experts, names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
mixtral = Hook(Family(build_mixtral, MIXTRAL_DEFAULTS, read_info, _stack_mixtral))
qwen3_moe = Hook(Family(build_qwen3_moe, QWEN3_DEFAULTS, read_info, stack_experts))
