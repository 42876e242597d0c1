"""Hybrids of attention and Mamba-2: Granite 4, Nemotron-H and Falcon H1.

Sources: IBM 2025, model cards of Granite 4.0; NVIDIA 2025, "Nemotron-H" and "Nemotron Nano"; Technology Innovation Institute 2025,
"Falcon-H1"; keys as in their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.experts import experts_of
from trivium_families.mamba2 import Mamba2, arrange_mamba2, limits, mamba2, scaled
from trivium_families.pieces import as_is, layer_kinds, refuse_unless, split_experts
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, stack_experts

GRANITE_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON_DEFAULTS: RawConfig = {
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_experts_per_tok": 2,
}  # fmt: skip
FALCON_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": 8, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_norm_before_gate": True,
    "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip
_MIXERS = ("full_attention", "linear_attention")
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _mamba_sizes(config: RawConfig, inner: int, **more: Any) -> Mamba2:
    """The block's sizes under the keys of Granite and Falcon; `inner` numbers make up the heads."""
    heads, dim = count(config, "mamba_n_heads"), config.get("mamba_d_head")
    dim = inner // heads if dim in (None, "auto") else count(config, "mamba_d_head")
    if heads * dim != inner:
        raise CheckpointError(f"the configuration's 'mamba_n_heads' ({heads}) of {dim} numbers do not make up {inner}",
                              param="mamba_n_heads")  # fmt: skip
    groups, state, width = (count(config, key) for key in ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    conv_bias, bias = flag(config, "mamba_conv_bias", True), flag(config, "mamba_proj_bias", False)
    return Mamba2(heads, dim, groups, state, width, conv_bias, bias, bias, limits(config))._replace(**more)


def _granite_sizes(config: RawConfig) -> Mamba2:
    return _mamba_sizes(config, count(config, "mamba_expand") * count(config, "hidden_size"))


def read_granite(architecture: str, config: RawConfig) -> ModelInfo:
    """A model without experts has no width of them."""
    inter = config.get("intermediate_size") or config.get("shared_intermediate_size")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return read_info(architecture, {**config, "intermediate_size": inter, "layer_types": _new_kinds(kinds)})


def _new_kinds(kinds: Any) -> Any:
    return [_OLD_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list | tuple) else kinds


def build_granite(info: ModelInfo, max_model_len: int | None) -> Program:
    """Granite 4: Mamba-2 in most layers, attention in some, experts beside a block that all tokens see, constant factors."""
    config, d = info.config, Decoder(info, max_model_len)
    refuse_unless(info, "position_embedding_type", ("rope", "nope"), "positions are rotated or not used at all")
    rotate: Rotation = d.rotation() if config.get("position_embedding_type") == "rope" else as_is
    scale, residual = number(config, "attention_multiplier"), number(config, "residual_multiplier")
    bias, sizes, x = (
        flag(config, "attention_bias", False),
        _granite_sizes(config),
        d.embed(scale=number(config, "embedding_multiplier")),
    )
    for i, kind in enumerate(layer_kinds(info, _MIXERS, lambda i: "linear_attention")):
        layer, y = f"model.layers.{i}", d.norm(x, f"model.layers.{i}.input_layernorm")
        if kind == "linear_attention":
            y = mamba2(d, i, y, f"{layer}.mamba", sizes)
        else:
            y = d.attention(i, y, rotate, bias=bias, out_bias=bias, scale=scale)
        x = d.op("add", x, scaled(d, y, residual))
        y = _granite_blocks(d, d.norm(x, f"{layer}.post_attention_layernorm"), layer)
        x = d.op("add", x, scaled(d, y, residual))
    return d.finish(x, scale=1 / number(config, "logits_scaling"))


def _granite_blocks(d: Decoder, x: Value, layer: str) -> Value:
    """The block that all tokens see, gate and up projection in one tensor, and the experts if there are any."""
    config, hidden, shared = d.info.config, d.info.hidden_size, f"{layer}.shared_mlp"
    width = count(config, "shared_intermediate_size")
    gate, up = (
        d.linear(x, f"{shared}.{name}_proj", width, part=(f"{shared}.input_linear", first))
        for name, first in (("gate", 0), ("up", width))
    )
    y = d.linear(d.op("gated", gate, up, kind=d.info.activation), f"{shared}.output_linear", hidden)
    if config.get("num_local_experts") == 0:
        return y
    block, inter = f"{layer}.block_sparse_moe", d.info.intermediate_size
    experts, chosen = experts_of(config, "num_local_experts")
    weights, ids = d.b.moe_route(d.linear(x, f"{block}.router", experts), None, top_k=chosen, scoring="softmax_topk")
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    matrices = [d.b.weight(f"{block}.experts.{name}_proj.weight", (experts, *shape)) for name, shape in shapes.items()]
    return d.op("add", d.op("moe_experts", x, weights, ids, *matrices, kind=d.info.activation), y)


def arrange_granite(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """input_linear and output_linear of the experts as the projections of each, the router under its own name."""
    names = (("block_sparse_moe.input_linear", "block_sparse_moe.experts.gate_up_proj"),
             ("block_sparse_moe.output_linear", "block_sparse_moe.experts.down_proj"),
             ("block_sparse_moe.router.layer", "block_sparse_moe.router"))  # fmt: skip
    return arrange_mamba2(split_experts(_renamed(tensors, names)), _granite_sizes({**GRANITE_DEFAULTS, **config}))


def _renamed(tensors: Mapping[str, Make], names: Sequence[tuple[str, str]]) -> Mapping[str, Make]:
    renamed = dict[str, Make]()
    for name, make in tensors.items():
        for old, new in names:
            name = name.replace(old, new)
        renamed[name] = make
    return renamed


def _nemotron_sizes(config: RawConfig) -> Mamba2:
    """Time steps have a lower limit, in decode as in prefill."""
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    heads, dim, groups, state, width = (count(config, key) for key in keys)
    low = float(config["time_step_min"] or 0.0)
    bias = flag(config, "use_bias", False)
    return Mamba2(heads, dim, groups, state, width, flag(config, "use_conv_bias", True), bias, bias, (low, float("inf")))


def read_nemotron(architecture: str, config: RawConfig) -> ModelInfo:
    """Layers are listed by name (`layers_block_type`) or by letter (`hybrid_override_pattern`)."""
    kinds, letters = config.get("layers_block_type") or config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None and isinstance(letters, str):
        kinds = [_LETTERS.get(letter, letter) for letter in letters]
    kinds = _new_kinds(kinds)
    inter = config.get("intermediate_size") or config.get("moe_intermediate_size")
    layers = len(kinds) if isinstance(kinds, list | tuple) else config.get("num_hidden_layers")
    given = {"hidden_act": config.get("mlp_hidden_act"), "rms_norm_eps": config.get("layer_norm_epsilon"), "layer_types": kinds}
    return read_info(architecture, {**config, **given, "num_hidden_layers": layers, "intermediate_size": inter})


def build_nemotron(info: ModelInfo, max_model_len: int | None) -> Program:
    """Nemotron-H, Nemotron 3 Nano: each layer is one block: Mamba-2, attention without rotation, a plain feed-forward block or
    experts, whose activation is relu(x)²."""
    d, sizes = Decoder(info, max_model_len), _nemotron_sizes(info.config)
    refuse_unless(info, "mlp_hidden_act", ("relu2",), "its experts, which have no gate, are run as gated ones for relu2 only")
    x = d.embed()
    for i, kind in enumerate(layer_kinds(info, (*_MIXERS, "mlp", "moe"), lambda i: "linear_attention")):
        y, block = d.norm(x, f"model.layers.{i}.norm"), f"model.layers.{i}.mixer"
        if kind == "linear_attention":
            y = mamba2(d, i, y, block, sizes)
        elif kind == "full_attention":
            y = d.attention(i, y, as_is)
        else:
            y = _plain(d, y, block, info.intermediate_size) if kind == "mlp" else _plain_experts(d, y, block)
        x = d.op("add", x, y)
    return d.finish(x)


def _plain(d: Decoder, x: Value, block: str, inter: int) -> Value:
    bias = flag(d.info.config, "mlp_bias", False)
    y = d.op("activation", d.linear(x, f"{block}.up_proj", inter, bias=bias), kind=d.info.activation)
    return d.linear(y, f"{block}.down_proj", d.info.hidden_size, bias=bias)


def _plain_experts(d: Decoder, x: Value, block: str) -> Value:
    """Experts without a gate, beside a shared one. relu(u)² is relu(u) · u: a gated expert whose gate is its up projection. With
    `moe_latent_size` they work on a projection of x."""
    config, hidden = d.info.config, d.info.hidden_size
    experts, chosen = experts_of(config, "num_local_experts" if config.get("num_local_experts") is not None else "n_routed_experts")
    inter, latent = count(config, "moe_intermediate_size"), config.get("moe_latent_size")
    groups, bias = count(config, "n_group", 1), flag(config, "mlp_bias", False)
    weights, ids = d.b.moe_route(
        d.linear(x, f"{block}.gate", experts), d.b.weight(f"{block}.gate.e_score_correction_bias", (experts,)), top_k=chosen,
        scoring="sigmoid", normalize=flag(config, "norm_topk_prob", True), scale=number(config, "routed_scaling_factor"),
        groups=groups, top_groups=count(config, "topk_group", 1) if groups > 1 else 1,
    )  # fmt: skip
    size = hidden if latent is None else count(config, "moe_latent_size")
    inner = x if latent is None else d.linear(x, f"{block}.fc1_latent_proj", size, bias=bias)
    up = d.b.weight(f"{block}.experts.up_proj.weight", (experts, inter, size))
    down = d.b.weight(f"{block}.experts.down_proj.weight", (experts, size, inter))
    routed = d.op("moe_experts", inner, weights, ids, up, up, down, kind="relu")
    routed = routed if latent is None else d.linear(routed, f"{block}.fc2_latent_proj", hidden, bias=bias)
    shared = count(config, "moe_shared_expert_intermediate_size")
    return d.op("add", routed, _plain(d, x, f"{block}.shared_experts", shared))


_ATTENTION = re.compile(r"\.mixer\.([qkvo]_proj\.)")
_STACKED = re.compile(r"(.*\.experts\.(?:up|down)_proj)")


def arrange_nemotron(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """The names of other families; experts stacked."""
    renamed = dict[str, Make]()
    for name, make in _renamed(
        tensors, (("backbone.", "model."), (".embeddings.", ".embed_tokens."), (".norm_f.", ".norm."))
    ).items():
        name = _ATTENTION.sub(r".self_attn.\1", name)
        renamed[f"{name}.weight" if _STACKED.fullmatch(name) else name] = make
    return arrange_mamba2(stack_experts(config, renamed), _nemotron_sizes({**NEMOTRON_DEFAULTS, **config}))


def _falcon_sizes(config: RawConfig) -> Mamba2:
    inner = config.get("mamba_d_ssm")
    inner = count(config, "mamba_expand") * count(config, "hidden_size") if inner is None else count(config, "mamba_d_ssm")
    norm = "before" if flag(config, "mamba_norm_before_gate", True) else "after"
    norm = norm if flag(config, "mamba_rms_norm", False) else "none"
    gate, *_, step = _factors(config, "ssm_multipliers", 5)
    return _mamba_sizes(
        config, inner, out_bias=flag(config, "projectors_bias", False), norm=norm,
        in_scale=number(config, "ssm_in_multiplier"), gate_scale=gate, dt_scale=step,
    )  # fmt: skip


def _factors(config: RawConfig, key: str, size: int) -> list[float]:
    found = config.get(key)
    found = [1.0] * size if found is None else found
    if not isinstance(found, list | tuple) or len(found) != size:
        raise CheckpointError(f"the configuration's {key!r} must be a list of {size} numbers, not {found!r}", param=key)
    return [number({key: factor}, key) for factor in found]


def build_falcon(info: ModelInfo, max_model_len: int | None) -> Program:
    """Falcon H1: attention and Mamba-2 side by side in every layer, constant factors everywhere."""
    config, d = info.config, Decoder(info, max_model_len)
    refuse_unless(info, "mamba_proj_bias", (False,), "the factors of its time steps are applied before that bias")
    gate_scale, down_scale = _factors(config, "mlp_multipliers", 2)
    sizes, factor = _falcon_sizes(config), partial(number, config)
    rotate, x = d.rotation(), d.embed(scale=factor("embedding_multiplier"))
    for i in range(info.layers):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        states = scaled(d, mamba2(d, i, y, f"{layer}.mamba", sizes), factor("ssm_out_multiplier"))
        attended = _falcon_attention(d, i, scaled(d, y, factor("attention_in_multiplier")), rotate)
        x = d.op("add", x, d.op("add", states, scaled(d, attended, factor("attention_out_multiplier"))))
        y = _falcon_mlp(d, d.norm(x, f"{layer}.pre_ff_layernorm"), f"{layer}.feed_forward", gate_scale)
        x = d.op("add", x, scaled(d, y, down_scale))
    return d.finish(x, scale=factor("lm_head_multiplier"))


def _falcon_attention(d: Decoder, i: int, x: Value, rotate: Rotation) -> Value:
    """Keys are scaled, which attention does as well by its own factor."""
    bias, scale = flag(d.info.config, "attention_bias", False), number(d.info.config, "key_multiplier") * d.info.head_dim**-0.5
    return d.attention(i, x, rotate, bias=bias, out_bias=bias, scale=scale)


def _falcon_mlp(d: Decoder, x: Value, block: str, gate_scale: float) -> Value:
    bias, inter = flag(d.info.config, "mlp_bias", False), d.info.intermediate_size
    gate, up = (d.linear(x, f"{block}.{name}_proj", inter, bias=bias) for name in ("gate", "up"))
    y = d.op("gated", scaled(d, gate, gate_scale), up, kind=d.info.activation)
    return d.linear(y, f"{block}.down_proj", d.info.hidden_size, bias=bias)


def arrange_falcon(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """The factors of x, B and C are those of the convolution that reads them."""
    text = {**FALCON_DEFAULTS, **config, **table(config, "text_config")}
    sizes, (_, x, b, c, _) = _falcon_sizes(text), _factors(text, "ssm_multipliers", 5)
    widths = sizes.inner, sizes.groups * sizes.state, sizes.groups * sizes.state
    factors = np.repeat(np.asarray((x, b, c), np.float32), widths)
    renamed = _renamed(tensors, (("model.final_layernorm.", "model.norm."),))
    return arrange_mamba2(renamed, sizes, conv_factors=factors)


granite_hybrid = Hook(Family(build_granite, GRANITE_DEFAULTS, read_granite, arrange_granite))
nemotron_h = Hook(Family(build_nemotron, NEMOTRON_DEFAULTS, read_nemotron, arrange_nemotron))
falcon_h1 = Hook(Family(build_falcon, FALCON_DEFAULTS, read_info, arrange_falcon))
