"""Llama 4 (text): three layers of four are rotated and attend within chunks; the fourth sees all positions, rotates nothing and
scales its queries by their position. Experts get their input scaled, beside one that all tokens see.

Sources: Meta AI 2025, "The Llama 4 herd", and its model cards; keys as in their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info
from trivium.models.decoder import Rotation
from trivium.ops import PagedKV, Program, Value

from trivium_families.experts import experts_of, gated
from trivium_families.pieces import as_is, layer_kinds, per_layer, rearranged, refuse_unless, spread
from trivium_families.plugin import Hook
from trivium_families.stacked import Array, Make, stack_experts

DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 8,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
    "attn_scale": 0.1, "floor_scale": 8192, "use_qk_norm": True, "rope_interleaved": True,
}  # fmt: skip
_KINDS = ("full_attention", "chunked_attention")
_EXPERTS = re.compile(r"(.*\.feed_forward\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?")


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """Llama 4 (text): attention within chunks in three layers of four, in the fourth over all positions without rotation; experts
    whose input is scaled."""
    d, config = Decoder(info, max_model_len), info.config
    refuse_unless(info, "num_experts_per_tok", (1,), "several experts with inputs of their own need an operator")
    every, step = count(config, "no_rope_layer_interval"), count(config, "interleave_moe_layer_step")
    rotated = per_layer(info, "no_rope_layers", lambda i: int((i + 1) % every != 0))
    chunked = config.get("attention_chunk_size") is not None
    kinds = layer_kinds(info, _KINDS, lambda i: _KINDS[bool(rotated[i]) and chunked])
    sparse = config.get("moe_layers")
    sparse = range(step - 1, info.layers, step) if sparse is None else sparse
    chunk = count(config, "attention_chunk_size") if chunked else None
    rotate, x = d.rotation(), d.embed()
    for i, kind in enumerate(kinds):
        layer = f"model.layers.{i}"
        seen = chunk if kind == "chunked_attention" else None
        y = _attention(d, i, d.norm(x, f"{layer}.input_layernorm"), rotate if rotated[i] else None, seen)
        x = d.op("add", x, y)
        y, block = d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.feed_forward"
        dense = count(config, "intermediate_size_mlp")
        x = d.op("add", x, _experts(d, y, block) if i in sparse else gated(d, y, block, dense))
    return d.finish(x)


def _attention(d: Decoder, i: int, x: Value, rotate: Rotation | None, chunk: int | None) -> Value:
    """`rotate` None: queries are scaled by their position instead. `chunk` None: all positions are seen."""
    attn, bias = f"model.layers.{i}.self_attn", flag(d.info.config, "attention_bias", False)
    q, k, v = d.qkv(x, attn, bias=bias)
    if rotate is None:
        q = temperature(d)(q)
    else:
        unit = partial(d.op, "rms_norm", eps=d.info.norm_eps) if flag(d.info.config, "use_qk_norm", True) else as_is
        q, k = unit(rotate(q)), unit(rotate(k))
    heads = d.attend(i, q, k, v) if chunk is None else _within_chunks(d, i, q, k, v, chunk)
    return d.linear(heads, f"{attn}.o_proj", d.info.hidden_size, bias=bias)


def temperature(d: Decoder) -> Rotation:
    """Queries times 1 + attn_scale · ln(1 + floor((position + 1) / floor_scale)), if the configuration asks for it."""
    config = d.info.config
    if not flag(config, "attn_temperature_tuning", True):
        return as_is
    beta, period = number(config, "attn_scale"), count(config, "floor_scale")
    return lambda q: d.op("position_scale", q, d.b.input("positions"), beta=beta, period=period, offset=1)


def _within_chunks(d: Decoder, i: int, q: Value, k: Value, v: Value, chunk: int) -> Value:
    info, b = d.info, d.b
    kv = b.kv_write(b.state(f"kv.{i}", PagedKV(info.kv_heads, info.head_dim, chunk)), k, v)
    y = b.chunked_attention(q, kv, b.input("query_starts"), b.input("context_lens"), scale=info.head_dim**-0.5, chunk=chunk)
    return d.op("reshape", y, shape=("tokens", info.heads * info.head_dim))


def _experts(d: Decoder, x: Value, block: str) -> Value:
    """The best expert of x times the sigmoid of its logit, beside a shared one of x as it is."""
    hidden, inter = d.info.hidden_size, d.info.intermediate_size
    experts, chosen = experts_of(d.info.config, "num_local_experts")
    logits = d.linear(x, f"{block}.router", experts)
    one, ids = d.b.moe_route(logits, None, top_k=chosen, scoring="softmax_topk")  # of a single one, the weight is 1
    share, _ = d.b.moe_route(logits, None, top_k=chosen, scoring="sigmoid", normalize=False)
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    matrices = [d.b.weight(f"{block}.experts.{name}_proj.weight", (experts, *shape)) for name, shape in shapes.items()]
    scaled = d.op("mul", x, spread(d, share, hidden))
    routed = d.op("moe_experts", scaled, one, ids, *matrices, kind=d.info.activation)
    return d.op("add", routed, gated(d, x, f"{block}.shared_expert", inter))


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """gate_up_proj[experts, hidden, 2 * inter] as gate_proj and up_proj, every matrix [experts, out, in]; experts that stand one by
    one, as quantised checkpoints have them, stacked."""
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        found = _EXPERTS.fullmatch(name)
        parts = {} if found is None else {"gate_proj": 0, "up_proj": 1} if found[2] == "gate_up_proj" else {"down_proj": None}
        turned = {f"{found[1]}.{part}.weight": piece for part, piece in parts.items()} if found else {}
        arranged |= {target: rearranged(target, make, partial(_turned, piece)) for target, piece in turned.items()} or {name: make}
    return stack_experts(config, arranged)


def _turned(piece: int | None, array: Array) -> Array:
    """array[experts, in, out] as [experts, out, in]; `piece` 0 or 1: that half of the outputs."""
    size = array.shape[-1] // 2
    kept = array if piece is None else array[..., piece * size : (piece + 1) * size]
    return kept.swapaxes(1, 2)


llama4 = Hook(Family(build, DEFAULTS, read_info, arrange))
