"""Gemma 4 (text): Gemma 3 with an embedding of each token for each layer, upper layers that read the keys and values of lower ones,
wider heads where all positions are seen, and in one variant experts beside the dense block.

Sources: Gemma Team 2026, model cards of Gemma 4; keys as in their config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import PagedKV, Program, Value
from trivium.ops.rope import rope_from_config

from trivium_families.experts import gated
from trivium_families.gemma import cap_of
from trivium_families.pieces import Computed, layer_kinds, refuse_unless, split_experts
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, stack_experts

DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512, "head_dim": 256,
    "global_head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144,
    "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_ROPE: Mapping[str, RawConfig] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_KINDS = ("full_attention", "sliding_attention")


class Layer(NamedTuple):
    """What differs between layers: heads' sizes, the window (None: all positions), which layer's keys and values are read (its own
    or a lower one's), whether values are the keys before they are normalised, the width of the dense block."""

    head_dim: int
    kv_heads: int
    window: int | None
    reads: int
    keys_are_values: bool
    inter: int
    kind: str


def layers_of(info: ModelInfo) -> list[Layer]:
    """Each layer as the configuration says; CheckpointError if layers share keys and values of a kind that no lower layer has."""
    kinds = [*layer_kinds(info, _KINDS, lambda i: _KINDS[(i + 1) % 6 > 0])[:-1], "full_attention"]
    wide, same = flag(info.config, "use_double_wide_mlp", False), flag(info.config, "attention_k_eq_v", False)
    found = list[Layer]()
    for i, (kind, reads) in enumerate(zip(kinds, sources_of(info, kinds))):
        full = kind == "full_attention"
        head_dim, kv_heads = _heads(info, i, full, same)
        inter = info.intermediate_size * (2 if wide and i >= own_layers(info) else 1)
        window = None if full else count(info.config, "sliding_window")
        found.append(Layer(head_dim, kv_heads, window, reads, same and full, inter, kind))
    return found


def own_layers(info: ModelInfo) -> int:
    """How many layers, from the lowest on, have keys and values of their own: all but the `num_kv_shared_layers` last."""
    shared = info.config.get("num_kv_shared_layers") or 0
    return info.layers - (count(info.config, "num_kv_shared_layers", limit=info.layers) if shared else 0)


def sources_of(info: ModelInfo, kinds: Sequence[str]) -> list[int]:
    """Of each layer, the one whose keys and values it reads: itself, or the highest of its kind that has its own. Raises
    CheckpointError if there is none."""
    own = own_layers(info)
    sources = [i if i < own else max((j for j in range(own) if kinds[j] == kind), default=-1) for i, kind in enumerate(kinds)]
    if -1 in sources:
        message = (
            f"the configuration's 'num_kv_shared_layers' ({info.layers - own}) leaves no layer of {kinds[sources.index(-1)]} whose "
            "keys could be shared"
        )
        raise CheckpointError(message, param="num_kv_shared_layers")
    return sources


def _heads(info: ModelInfo, i: int, full: bool, same: bool) -> tuple[int, int]:
    """(head_dim, kv heads) of a layer: `per_layer_config` has them by layer, or `global_head_dim` and `num_global_key_value_heads`
    hold for those that see all positions."""
    per_layer, config = table(info.config, "per_layer_config"), info.config
    own = table(per_layer, str(i))
    if full and not per_layer:
        shared = config.get("num_global_key_value_heads") if same else None
        own = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": shared}
    kv_heads = count(own, "num_key_value_heads", info.kv_heads)
    if info.heads % kv_heads:
        raise CheckpointError(f"{info.heads} heads are not a multiple of the {kv_heads} key heads of layer {i}",
                              param="num_key_value_heads")  # fmt: skip
    return count(own, "head_dim", info.head_dim), kv_heads


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """Gemma 4 (text): embeddings of each layer's own, keys and values shared between layers, wider heads where all positions are
    seen; dense, or with experts beside the dense block."""
    refuse_unless(info, "use_bidirectional_attention", ("vision",), "only causal models run here")
    d, length = Decoder(info, max_model_len), max_model_len or info.max_positions
    layers, stored = layers_of(info), dict[int, Value]()
    rotations = {kind: _rotation(d, kind, head_dim, length) for kind, head_dim in {(s.kind, s.head_dim) for s in layers}}
    x = d.embed(scale=info.hidden_size**0.5)
    inputs = layer_inputs(d, x)
    for i, s in enumerate(layers):
        layer = f"model.layers.{i}"
        y = shared_attention(d, i, d.norm(x, f"{layer}.input_layernorm"), s, rotations[s.kind], stored)
        x = d.op("add", x, d.norm(y, f"{layer}.post_attention_layernorm"))
        x = d.op("add", x, d.norm(_feed_forward(d, x, layer, s), f"{layer}.post_feedforward_layernorm"))
        x = x if inputs is None else d.op("add", x, own_input(d, i, x, inputs))
        x = _times(d, x, f"{layer}.layer_scalar")
    return d.finish(x, softcap=cap_of(info, "final_logit_softcapping"))


def _rotation(d: Decoder, kind: str, head_dim: int, length: int) -> Rotation:
    """proportional: of a part of the pairs, whose frequencies are those of the whole head."""
    rope = table(d.info.config, "rope_parameters").get(kind) or _ROPE[kind]
    proportional = rope.get("rope_type") == "proportional"
    plain = {**rope, "rope_type": "default", "partial_rotary_factor": 1.0} if proportional else rope
    found = rope_from_config({**d.info.config, "rope_parameters": plain}, head_dim, max_model_len=length)
    rotated = int(float(rope.get("partial_rotary_factor", 1.0)) * head_dim // 2) if proportional else len(found.inv_freq)
    turning = np.where(np.arange(len(found.inv_freq)) < rotated, found.inv_freq, 0)
    inv_freq = d.b.array(f"rope.{kind}.inv_freq", turning / (float(rope.get("factor", 1.0)) if proportional else 1.0))
    return lambda x: d.op("rope", x, d.b.input("positions"), inv_freq, interleaved=False, scale=found.scale)


def shared_attention(d: Decoder, i: int, x: Value, s: Layer, rotate: Rotation, stored: dict[int, Value]) -> Value:
    """Scores are not scaled; values are normalised too. `stored`: the keys and values of each layer that has its own."""
    info, attn, b = d.info, f"model.layers.{i}.self_attn", d.b
    bias, window = flag(info.config, "attention_bias", False), s.window
    q = d.op("reshape", d.linear(x, f"{attn}.q_proj", info.heads * s.head_dim, bias=bias), shape=("tokens", info.heads, s.head_dim))
    q = rotate(d.norm(q, f"{attn}.q_norm"))
    if s.reads == i:
        k, v = _keys_and_values(d, x, attn, s, bias)
        state = b.state(f"kv.{i}", PagedKV(s.kv_heads, s.head_dim, window))
        stored[i] = b.kv_write(state, rotate(k), v)
    starts, lengths = b.input("query_starts"), b.input("context_lens")
    heads = b.paged_attention(q, stored[s.reads], starts, lengths, None, scale=1.0, window=window)
    y = d.op("reshape", heads, shape=("tokens", info.heads * s.head_dim))
    return d.linear(y, f"{attn}.o_proj", info.hidden_size, bias=bias)


def _keys_and_values(d: Decoder, x: Value, attn: str, s: Layer, bias: bool) -> tuple[Value, Value]:
    shape, width = ("tokens", s.kv_heads, s.head_dim), s.kv_heads * s.head_dim
    k = d.op("reshape", d.linear(x, f"{attn}.k_proj", width, bias=bias), shape=shape)
    v = k if s.keys_are_values else d.op("reshape", d.linear(x, f"{attn}.v_proj", width, bias=bias), shape=shape)
    return d.norm(k, f"{attn}.k_norm"), d.op("rms_norm", v, None, eps=d.info.norm_eps)


def _feed_forward(d: Decoder, x: Value, layer: str, s: Layer) -> Value:
    """The dense block, with `enable_moe_block` beside experts, each with norms of its own."""
    y = gated(d, d.norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp", s.inter)
    if not flag(d.info.config, "enable_moe_block", False):
        return y
    routed = d.norm(_experts(d, x, layer), f"{layer}.post_feedforward_layernorm_2")
    return d.op("add", d.norm(y, f"{layer}.post_feedforward_layernorm_1"), routed)


def _experts(d: Decoder, x: Value, layer: str) -> Value:
    """The router reads x normalised by a weight of its own; its factors of each expert are a part of down_proj (see arrange)."""
    config, hidden = d.info.config, d.info.hidden_size
    experts, chosen, inter = (count(config, key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if chosen > experts:
        raise CheckpointError(f"the configuration's 'top_k_experts' ({chosen}) is more than its 'num_experts' ({experts})",
                              param="top_k_experts")  # fmt: skip
    seen = d.op("rms_norm", x, d.b.weight(f"{layer}.router.scale", (hidden,)), eps=d.info.norm_eps)
    logits = d.linear(d.op("scale", seen, factor=hidden**-0.5), f"{layer}.router.proj", experts)
    weights, ids = d.b.moe_route(logits, None, top_k=chosen)
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    matrices = [d.b.weight(f"{layer}.experts.{name}_proj.weight", (experts, *shape)) for name, shape in shapes.items()]
    y = d.norm(x, f"{layer}.pre_feedforward_layernorm_2")
    return d.op("moe_experts", y, weights, ids, *matrices, kind=d.info.activation)


def layer_inputs(d: Decoder, x: Value) -> Value | None:
    """[tokens, layers * width]: what each layer gets of the token: its own embedding and a projection of the common one, half each.
    None: the model has no such inputs."""
    info = d.info
    if not info.config.get("hidden_size_per_layer_input"):
        return None
    width, vocab = count(info.config, "hidden_size_per_layer_input"), count(info.config, "vocab_size_per_layer_input")
    whole = info.layers * width
    rows = d.b.weight("model.embed_tokens_per_layer.weight", (vocab, whole))
    own = d.op("embedding", d.b.input("token_ids"), rows, scale=width**0.5 * 2**-0.5)
    common = d.op("scale", d.linear(x, "model.per_layer_model_projection", whole), factor=info.hidden_size**-0.5)
    common = d.norm(d.op("reshape", common, shape=("tokens", info.layers, width)), "model.per_layer_projection_norm")
    common = d.op("scale", d.op("reshape", common, shape=("tokens", whole)), factor=2**-0.5)
    return d.op("add", common, own)


def own_input(d: Decoder, i: int, x: Value, inputs: Value) -> Value:
    """What layer `i` adds for its part of `layer_inputs`, gated by x: [tokens, hidden]."""
    layer, width = f"model.layers.{i}", int(inputs.shape[-1]) // d.info.layers
    mine = d.op("slice", inputs, start=i * width, stop=(i + 1) * width)
    y = d.op("gated", d.linear(x, f"{layer}.per_layer_input_gate", width), mine, kind=d.info.activation)
    return d.norm(d.linear(y, f"{layer}.per_layer_projection", d.info.hidden_size), f"{layer}.post_per_layer_input_norm")


def _times(d: Decoder, x: Value, name: str) -> Value:
    """x times one number of the checkpoint: a product of one column with a matrix of one number."""
    hidden = d.info.hidden_size
    column = d.op("reshape", x, shape=("tokens", hidden, 1))
    y = d.op("linear", column, d.b.weight(name, (1, 1)), None)
    return d.op("reshape", y, shape=("tokens", hidden))


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """Experts stacked, down_proj times the router's factor of each expert (as float32 numbers); layer_scalar as a 1 x 1 matrix."""
    arranged = dict(split_experts(stack_experts(config, tensors)))
    for name in [name for name in arranged if name.endswith(".router.per_expert_scale")]:
        down = f"{name.removesuffix('.router.per_expert_scale')}.experts.down_proj.weight"
        arranged[down] = _scaled_by(down, arranged[down], arranged[name])
    for name in [name for name in arranged if name.endswith(".layer_scalar")]:
        arranged[name] = _as_matrix(name, arranged[name])
    return arranged


def _scaled_by(name: str, make: Make, factors: Make) -> Make:
    return lambda: Computed(name, make(), lambda a: a * factors().decode().reshape(-1, 1, 1))


def _as_matrix(name: str, make: Make) -> Make:
    return lambda: Computed(name, make(), lambda a: a.reshape(1, 1))


gemma4 = Hook(Family(build, DEFAULTS, read_info, arrange))
