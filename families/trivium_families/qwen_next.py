"""Qwen3-Next and Qwen3.5 / 3.6 (text): three layers of four mix tokens by a gated delta rule, the fourth by gated attention.

A head's decay is exp(-exp(A_log) · softplus(a + dt_bias)); its keys and queries have length one; several value heads share a key
head. Attention multiplies what it gives by the sigmoid of a projection that stands with that of the queries. Norm weights are
stored minus one, but for the norm behind the delta rule.

Sources: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"; Qwen Team 2025, model card of Qwen3-Next-80B-A3B; Qwen Team 2026,
model card of Qwen3.5; keys as in their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Recurrent, Value

from trivium_families.experts import experts_of, gated, moe
from trivium_families.heads import HeadDecoder
from trivium_families.pieces import computed, decay_rates, half, layer_kinds, rearranged, split_experts, spread
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, stack_experts

DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "partial_rotary_factor": 0.25, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
_L2_EPS = 1e-6
_DELTA = re.compile(r"(model\.layers\.\d+\.linear_attn)\.(.+)")
_HEAD = re.compile(r"^(?:model\.)?mtp\.layers\.0\.")
_Array = npt.NDArray[Any]


def read(architecture: str, config: RawConfig) -> ModelInfo:
    """A model of experts alone has no width of dense blocks."""
    width = config.get("intermediate_size") or config.get("shared_expert_intermediate_size")
    return read_info(architecture, {**config, "intermediate_size": width})


def build_next(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen3-Next: a gated delta rule in three layers of four, gated attention in the fourth; experts beside a gated shared one."""
    d = Decoder(info, max_model_len, norm_offset=1.0)
    return _layers(d, sparse(d))


def build_dense(info: ModelInfo, max_model_len: int | None) -> Program:
    """Qwen3.5, 3.6 (text, dense): Qwen3-Next with gated blocks in place of experts."""
    d = Decoder(info, max_model_len, norm_offset=1.0)
    return _layers(d, lambda i, x: d.mlp(x, f"model.layers.{i}.mlp"))


def draft_next(info: ModelInfo, max_model_len: int | None) -> Program:
    """The head of Qwen3-Next and of Qwen3.5 with experts."""
    d = _head(info, max_model_len)
    return _head_layer(d, sparse(d))


def draft_dense(info: ModelInfo, max_model_len: int | None) -> Program:
    """The head of Qwen3.5 (dense)."""
    d = _head(info, max_model_len)
    return _head_layer(d, lambda i, x: d.mlp(x, f"model.layers.{i}.mlp"))


def _head(info: ModelInfo, max_model_len: int | None) -> HeadDecoder:
    if info.config.get("mtp_num_hidden_layers", 1) != 1:
        message = f"{info.architecture}: only a head of one layer is supported, not 'mtp_num_hidden_layers' "
        raise UnsupportedError(f"{message}{info.config['mtp_num_hidden_layers']!r}", param="mtp_num_hidden_layers")
    return HeadDecoder(info, max_model_len, "mtp.norm", norm_offset=1.0)


def _head_layer(d: HeadDecoder, feed_forward: Callable[[int, Value], Value]) -> Program:
    """The layer of the head, whose attention sees all positions."""
    x, i = d.joined("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"), d.info.layers
    layer = f"model.layers.{i}"
    x = d.op("add", x, _gated_attention(d, i, d.norm(x, f"{layer}.input_layernorm"), d.rotation()))
    return d.finish(d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm"))))


def _layers(d: Decoder, feed_forward: Callable[[int, Value], Value]) -> Program:
    every = count(d.info.config, "full_attention_interval")
    possible = ("full_attention", "linear_attention")
    kinds = layer_kinds(d.info, possible, lambda i: possible[(i + 1) % every > 0])
    rotate, x = d.rotation(), d.embed()
    for i, kind in enumerate(kinds):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        x = d.op("add", x, _delta(d, i, y) if kind == "linear_attention" else _gated_attention(d, i, y, rotate))
        x = d.op("add", x, feed_forward(i, d.norm(x, f"{layer}.post_attention_layernorm")))
    return d.finish(x)


def _gated_attention(d: Decoder, i: int, x: Value, rotate: Rotation) -> Value:
    """Each head's rows of q_proj are its query's and then its gate's."""
    info, attn, bias = d.info, f"model.layers.{i}.self_attn", flag(d.info.config, "attention_bias", False)
    heads, dim = info.heads, info.head_dim
    both = d.linear(x, f"{attn}.q_proj", 2 * heads * dim, bias=bias)
    both = d.op("reshape", both, shape=("tokens", heads, 2 * dim))
    k, v = (
        d.op("reshape", d.linear(x, f"{attn}.{p}_proj", info.kv_heads * dim, bias=bias), shape=("tokens", info.kv_heads, dim))
        for p in "kv"
    )
    q, k = rotate(d.norm(half(d, both, 0), f"{attn}.q_norm")), rotate(d.norm(k, f"{attn}.k_norm"))
    gate = d.op("activation", d.op("reshape", half(d, both, 1), shape=("tokens", heads * dim)), kind="sigmoid")
    return d.linear(d.op("mul", d.attend(i, q, k, v), gate), f"{attn}.o_proj", info.hidden_size, bias=bias)


class _Sizes:
    """Heads of keys and of values, and their widths."""

    def __init__(self, config: RawConfig) -> None:
        self.k_heads, self.v_heads = count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")
        self.dk, self.dv = count(config, "linear_key_head_dim"), count(config, "linear_value_head_dim")
        self.keys, self.values = self.k_heads * self.dk, self.v_heads * self.dv
        if self.v_heads % self.k_heads:
            raise CheckpointError(f"the configuration's 'linear_num_value_heads' ({self.v_heads}) must be a multiple of "
                                  f"'linear_num_key_heads' ({self.k_heads})", param="linear_num_value_heads")  # fmt: skip


def _delta(d: Decoder, i: int, x: Value) -> Value:
    """norm(delta rule over convolved q, k and v) · silu(z), projected."""
    s, at, config = _Sizes(d.info.config), f"model.layers.{i}.linear_attn", d.info.config
    mixed = _convolved(d, i, d.linear(x, f"{at}.in_proj_qkv", 2 * s.keys + s.values), count(config, "linear_conv_kernel_dim"))
    q, k = (_unit(d, d.op("slice", mixed, start=n * s.keys, stop=(n + 1) * s.keys), s) for n in (0, 1))
    v = d.op("slice", mixed, start=2 * s.keys, stop=2 * s.keys + s.values)
    v = d.op("reshape", v, shape=("tokens", s.v_heads, s.dv))
    state, starts, lengths = d.b.state(f"delta.{i}", Recurrent((s.v_heads, s.dk, s.dv))), *_ranges(d)
    beta = d.op("activation", d.linear(x, f"{at}.in_proj_b", s.v_heads), kind="sigmoid")
    y, _ = d.b.gated_delta_rule(q, k, v, _decay(d, x, at, s.v_heads), beta, state, starts, lengths, scale=s.dk**-0.5)
    y = d.op("rms_norm", y, d.b.weight(f"{at}.norm.weight", (s.dv,)), eps=d.info.norm_eps)
    z = d.linear(x, f"{at}.in_proj_z", s.values)
    y = d.op("gated", z, d.op("reshape", y, shape=("tokens", s.values)), kind="silu")
    return d.linear(y, f"{at}.out_proj", d.info.hidden_size)


def _ranges(d: Decoder) -> tuple[Value, Value]:
    return d.b.input("query_starts"), d.b.input("context_lens")


def _convolved(d: Decoder, i: int, x: Value, width: int) -> Value:
    channels = int(x.shape[-1])
    weight = d.b.weight(f"model.layers.{i}.linear_attn.conv1d.weight", (channels, width))
    state = d.b.state(f"conv.{i}", Recurrent((width - 1, channels)))
    y: Value
    y, _ = d.b.short_conv(x, weight, None, state, *_ranges(d), kind=d.info.activation)
    return y


def _unit(d: Decoder, x: Value, s: _Sizes) -> Value:
    """x[tokens, key heads * dk] as [tokens, value heads, dk], each row x / sqrt(sum of squares + eps): an RMS norm whose eps and
    result are scaled. Value heads that share a key head are neighbours."""
    x = d.op("reshape", x, shape=("tokens", s.k_heads, s.dk))
    x = d.op("scale", d.op("rms_norm", x, None, eps=_L2_EPS / s.dk), factor=s.dk**-0.5)
    repeated = x
    for _ in range(s.v_heads // s.k_heads - 1):
        repeated = d.op("concat", repeated, x)
    return repeated if repeated is x else d.op("reshape", repeated, shape=("tokens", s.v_heads, s.dk))


def _decay(d: Decoder, x: Value, at: str, heads: int) -> Value:
    """g[tokens, heads] = -exp(A_log) · softplus(a + dt_bias)."""
    step = d.op("activation", d.linear(x, f"{at}.in_proj_a", heads, bias=True), kind="softplus")
    rates = d.b.weight(f"{at}.decay.weight", (heads, 1, 1))
    g = d.op("head_linear", d.op("reshape", step, shape=("tokens", heads, 1)), rates)
    return d.op("reshape", g, shape=("tokens", heads))


def sparse(d: Decoder) -> Callable[[int, Value], Value]:
    """Experts in every `decoder_sparse_step`-th layer that is not among `mlp_only_layers`, beside one that all tokens see through
    a gate of its own."""
    config = d.info.config
    experts, chosen = experts_of(config, "num_local_experts" if config.get("num_local_experts") is not None else "num_experts")
    inter, shared = count(config, "moe_intermediate_size"), count(config, "shared_expert_intermediate_size")
    step, dense = count(config, "decoder_sparse_step"), config.get("mlp_only_layers") or ()
    normalize = flag(config, "norm_topk_prob", True)

    def feed_forward(i: int, x: Value) -> Value:
        block = f"model.layers.{i}.mlp"
        if i in dense or (i + 1) % step:
            return d.mlp(x, block)
        routed = moe(d, x, block, experts=experts, chosen=chosen, inter=inter, normalize=normalize)
        share = d.op("activation", d.linear(x, f"{block}.shared_expert_gate", 1), kind="sigmoid")
        common = d.op("mul", gated(d, x, f"{block}.shared_expert", shared), spread(d, share, d.info.hidden_size))
        return d.op("add", routed, common)

    return feed_forward


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """Experts stacked; A_log as the rates of decay, dt_bias as the bias of in_proj_a, convolutions [channels, width]; in_proj_qkvz
    and in_proj_ba, whose rows stand by key heads, as in_proj_qkv, in_proj_z, in_proj_b and in_proj_a; the layer of the head for
    multi-token prediction behind the others."""
    text = {**DEFAULTS, **config, **table(config, "text_config")}
    layer, arranged = f"model.layers.{count(text, 'num_hidden_layers')}.", dict[str, Make]()
    tensors = {_HEAD.sub(layer, name): make for name, make in tensors.items()}
    for name, make in split_experts(stack_experts(config, tensors)).items():
        found = _DELTA.fullmatch(name)
        arranged |= {name: make} if found is None else _delta_tensors(text, found[1], found[2], make)
    return arranged


def _delta_tensors(config: RawConfig, at: str, rest: str, make: Make) -> Mapping[str, Make]:
    """What a tensor of the delta rule becomes."""
    kernel, rates = f"{at}.conv1d.weight", f"{at}.decay.weight"
    if rest == "A_log":
        return {rates: computed(rates, make, decay_rates)}
    if rest == "dt_bias":
        return {f"{at}.in_proj_a.bias": make}
    if rest == "conv1d.weight":
        return {kernel: rearranged(kernel, make, lambda a: a[:, 0])}
    stem, _, suffix = rest.partition(".")
    parts = _PARTS.get(stem, {})
    pieces = {f"{at}.{part}.{suffix}": partial(_by_key_heads, _Sizes(config), stem, spans) for part, spans in parts.items()}
    whole = {name: rearranged(name, make, take, whole_rows=True) for name, take in pieces.items()}
    return whole or {f"{at}.{rest}": make}


_PARTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "in_proj_qkvz": {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)}, "in_proj_ba": {"in_proj_b": (0,), "in_proj_a": (1,)},
}  # fmt: skip
"""Which pieces of a key head's rows each projection takes."""


def _by_key_heads(s: _Sizes, stem: str, spans: tuple[int, ...], array: _Array) -> _Array:
    """The pieces `spans` of every key head's rows, piece after piece."""
    each = s.v_heads // s.k_heads
    sizes = (s.dk, s.dk, each * s.dv, each * s.dv) if stem == "in_proj_qkvz" else (each, each)
    ends = np.cumsum((0, *sizes))
    heads = array.reshape(s.k_heads, int(ends[-1]), -1)
    return np.concatenate([heads[:, ends[i] : ends[i + 1]].reshape(-1, array.shape[-1]) for i in spans])


qwen3_next = Hook(Family(build_next, DEFAULTS, read, arrange, draft=draft_next))
qwen3_5 = Hook(Family(build_dense, DEFAULTS, read, arrange, draft=draft_dense))
qwen3_5_moe = Hook(Family(build_next, DEFAULTS, read, arrange, draft=draft_next))
