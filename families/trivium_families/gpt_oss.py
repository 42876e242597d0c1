"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and a clipped activation.

Experts are stored with gate and up as neighbouring columns, [experts, hidden, 2 * inter], or in MXFP4 as neighbouring rows,
[experts, 2 * inter, hidden].

Sources: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"; keys as in their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from trivium.models import Decoder, Family, ModelInfo, RawConfig, flag, number, read_info
from trivium.ops import Program, Value, Weight

from trivium_families.experts import experts_of
from trivium_families.plugin import Hook
from trivium_families.stacked import Make, Rearranged

DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?(?:\.weight)?")


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """gpt-oss: attention sinks, windows in every second layer, experts with biases and a clipped activation."""
    d, config = Decoder(info, max_model_len), info.config
    bias = flag(config, "attention_bias", True)
    rotate, x = d.rotation(), d.embed()
    for i, window in enumerate(info.windows(lambda layer: layer % 2 == 0)):
        layer = f"model.layers.{i}"
        sinks = d.b.weight(f"{layer}.self_attn.sinks", (info.heads,))
        y = d.norm(x, f"{layer}.input_layernorm")
        x = d.op("add", x, d.attention(i, y, rotate, bias=bias, out_bias=bias, window=window, sinks=sinks))
        x = d.op("add", x, _experts(d, d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x)


def _experts(d: Decoder, x: Value, block: str) -> Value:
    """Experts by the softmax of the chosen ones' logits."""
    config, hidden, inter = d.info.config, d.info.hidden_size, d.info.intermediate_size
    experts, chosen = experts_of(config, "num_local_experts")
    weights, ids = d.b.moe_route(d.linear(x, f"{block}.router", experts, bias=True), None, top_k=chosen, scoring="softmax_topk")
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    matrices = [d.b.weight(f"{block}.experts.{name}_proj.weight", (experts, *shape)) for name, shape in shapes.items()]
    biases = [d.b.weight(f"{block}.experts.{name}_proj.bias", (experts, shape[0])) for name, shape in shapes.items()]
    return d.op(
        "moe_experts", x, weights, ids, *matrices, *biases, limit=number(config, "swiglu_limit"),
        alpha=number(config, "swiglu_alpha"), up_offset=1.0,
    )  # fmt: skip


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """gate_up_proj as gate_proj and up_proj, every matrix [experts, out, in]."""
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        found = _EXPERTS.fullmatch(name)
        if found is None:
            arranged[name] = make
            continue
        prefix, stem, bias = found.groups()
        suffix = "bias" if bias else "weight"
        parts = {"gate_proj": 0, "up_proj": 1} if stem == "gate_up_proj" else {stem: None}
        for part, first in parts.items():
            target = f"{prefix}.{part}.{suffix}"
            arranged[target] = partial(_taken, target, make, first, not bias)
    return arranged


def _taken(name: str, make: Make, first: int | None, is_matrix: bool) -> Weight:
    """Every second row from `first` on (None: all rows). A matrix of plain floats is stored [experts, in, out]; of blocks, with
    their inputs together, [experts, out, in]."""
    weight = make()
    if is_matrix and weight.format in ("float32", "float16", "bfloat16"):
        return Rearranged(name, weight, lambda a: (a if first is None else a[..., first::2]).swapaxes(1, 2))
    return weight if first is None else Rearranged(name, weight, lambda a: a[:, first::2], whole_rows=is_matrix)


gpt_oss = Hook(Family(build, DEFAULTS, read_info, arrange))
