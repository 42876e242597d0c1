"""LFM2: most layers mix neighbouring tokens by a gated short convolution, the others by attention.

Sources: Liquid AI 2025, "LFM2 Technical Report"; keys as in their config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info
from trivium.ops import Program, Recurrent, Value

from trivium_families.experts import experts_of, moe
from trivium_families.pieces import split_experts
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, Rearranged, stack_experts

DEFAULTS: RawConfig = {
    "hidden_act": "silu", "norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": False,
    "tie_word_embeddings": True, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
}  # fmt: skip
_NAMES = (
    ("operator_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj"), ("self_attn.out_proj", "self_attn.o_proj"),
    ("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"), ("model.embedding_norm", "model.norm"),
)  # fmt: skip


def read(architecture: str, config: RawConfig) -> ModelInfo:
    """The feed-forward blocks have two thirds of the width that is given, rounded up, unless they are not to be adjusted."""
    inter = count(config, "block_ff_dim", count(config, "intermediate_size"))
    if flag(config, "block_auto_adjust_ff_dim", True):
        step, inter = count(config, "block_multiple_of"), int(number(config, "block_ffn_dim_multiplier") * int(2 * inter / 3))
        inter = -(-inter // step) * step
    tied = flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True))
    sizes = {"intermediate_size": inter, "rms_norm_eps": config.get("norm_eps"), "tie_word_embeddings": tied}
    return read_info(architecture, {**config, **sizes})


def kinds(info: ModelInfo) -> tuple[str, ...]:
    """What mixes the tokens of each layer: "full_attention" or "conv"."""
    found = info.config.get("layer_types")
    if found is None:
        attention = info.config.get("full_attn_idxs")
        found = ["full_attention" if attention is None or i in attention else "conv" for i in range(info.layers)]
    if not isinstance(found, list | tuple) or len(found) != info.layers:
        raise CheckpointError(f"the configuration's 'layer_types' must be a list of {info.layers} names, not {found!r}",
                              param="layer_types")  # fmt: skip
    if unknown := [kind for kind in found if kind not in ("full_attention", "conv")]:
        message = f"layer type {unknown[0]!r} is not supported; possible are full_attention and conv"
        raise UnsupportedError(message, param="layer_types")
    return tuple(found)


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """LFM2: gated short convolutions, and attention with q and k norms in some layers."""
    d = Decoder(info, max_model_len)
    return _layers(d, lambda i, x: d.mlp(x, f"model.layers.{i}.mlp"))


def build_moe(info: ModelInfo, max_model_len: int | None) -> Program:
    """LFM2 with experts, chosen by sigmoid and a bias, in all layers but the lowest."""
    d, config = Decoder(info, max_model_len), info.config
    experts, chosen = experts_of(config, "num_experts")
    dense = 0 if config.get("num_dense_layers") == 0 else count(config, "num_dense_layers")
    sizes = {"experts": experts, "chosen": chosen, "inter": count(config, "moe_intermediate_size")}
    normalize, scale = flag(config, "norm_topk_prob", True), number(config, "routed_scaling_factor", 1.0)
    biased = flag(config, "use_expert_bias", True)

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        if i < dense:
            return d.mlp(x, block)
        bias = f"{block}.expert_bias" if biased else None
        return moe(d, x, block, **sizes, normalize=normalize, bias=bias, scoring="sigmoid", scale=scale)

    return _layers(d, feed_forward)


def _layers(d: Decoder, feed_forward: Callable[[int, Value], Value]) -> Program:
    rotate, x = d.rotation(), d.embed()
    for i, kind in enumerate(kinds(d.info)):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        x = d.op("add", x, _convolution(d, i, y) if kind == "conv" else d.attention(i, y, rotate, qk_norm=True))
        x = d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm")))
    return d.finish(x)


def _convolution(d: Decoder, i: int, x: Value) -> Value:
    """out(c * conv(b * x)), where b, c and x are thirds of one projection, in this order."""
    hidden, conv = d.info.hidden_size, f"model.layers.{i}.conv"
    width, bias = count(d.info.config, "conv_L_cache"), flag(d.info.config, "conv_bias", False)
    thirds = d.linear(x, f"{conv}.in_proj", 3 * hidden, bias=bias)
    b, c, y = (d.op("slice", thirds, start=part * hidden, stop=(part + 1) * hidden) for part in range(3))
    state = d.b.state(f"conv.{i}", Recurrent((width - 1, hidden)))
    weight = d.b.weight(f"{conv}.conv.weight", (hidden, width))
    offset = d.b.weight(f"{conv}.conv.bias", (hidden,)) if bias else None
    starts, lengths = d.b.input("query_starts"), d.b.input("context_lens")
    y, _ = d.b.short_conv(d.op("mul", b, y), weight, offset, state, starts, lengths, kind=None)
    return d.linear(d.op("mul", c, y), f"{conv}.out_proj", hidden, bias=bias)


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """The names of other families; a convolution's weight [channels, 1, width] as [channels, width]."""
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        for old, new in _NAMES:
            name = name.replace(old, new)
        is_kernel = name.endswith(".conv.conv.weight")
        arranged[name] = partial(_flat, name, make) if is_kernel else make
    return arranged


def arrange_moe(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """As arrange, and experts stacked."""
    named = {name.replace("feed_forward.", "mlp."): make for name, make in arrange(config, tensors).items()}
    return split_experts(stack_experts(config, named, names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}))


def _flat(name: str, make: Make) -> Rearranged:
    return Rearranged(name, make(), lambda a: a[:, 0])


lfm2_moe = Hook(Family(build_moe, {**DEFAULTS, "block_auto_adjust_ff_dim": False, "num_dense_layers": 2}, read, arrange_moe))
lfm2 = Hook(Family(build, DEFAULTS, read, arrange))
