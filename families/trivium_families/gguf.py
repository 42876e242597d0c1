"""GGUF architectures: what only their files have, in the terms of config.json.

Source of names and keys: the GGUF specification (ggml docs/gguf.md) and the `gguf` package's constants. A key that a converter
may leave out has the format's own default here.
"""

from __future__ import annotations

import re

import numpy as np
from trivium.plugin import hookimpl
from trivium_formats.gguf import LAYER, Config, Floats, GGUFModel, Keys, Writing

_GEMMA = LAYER | {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PHI3 = LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


class Hook:
    """One entry point: the hook gives `model`."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model

    @hookimpl
    def trivium_gguf_model(self) -> GGUFModel:
        return self._model


def _extend_gemma2(keys: Keys, config: Config) -> None:
    _extend_gemma(keys, config, period=2, largest=46)
    config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", float, 50.0)
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping", float, 30.0)


def _extend_gemma3(keys: Keys, config: Config) -> None:
    _extend_gemma(keys, config, period=6, largest=62)
    config["rope_theta"] = keys.get("rope.freq_base", float, 1e6)
    config["rope_local_base_freq"] = keys.get("rope.freq_base_swa", float, 10000.0)
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping", float, None)


def _extend_gemma(keys: Keys, config: Config, *, period: int, largest: int) -> None:
    """`period`: each period-th layer attends to everything. `largest`: layers of the 27B model, whose attention is scaled by
    (hidden / heads)**-0.5 instead of head_dim**-0.5 (converters write no key for it)."""
    layers, scale = config["num_hidden_layers"], keys.get("attention.scale", float, None)
    per_head = config["hidden_size"] / config["num_attention_heads"] if layers == largest else config["head_dim"]
    sliding = keys.file.metadata.get(f"{keys.prefix}attention.sliding_window_pattern")
    if not isinstance(sliding, list) or [type(v) for v in sliding] != [bool] * layers:
        period = keys.size("attention.sliding_window_pattern", default=period)
        sliding = [(i + 1) % period != 0 for i in range(layers)]
    config["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
    config["sliding_window"] = keys.size("attention.sliding_window", default=4096)
    config["query_pre_attn_scalar"] = scale**-2 if scale else per_head
    config["norm_offset"] = 0.0


def _extend_phi3(keys: Keys, config: Config) -> None:
    short, long = keys.table("rope_factors_short.weight"), keys.table("rope_factors_long.weight")
    original = keys.get("rope.scaling.original_context_length", int, None)
    attention = keys.get("rope.scaling.attn_factor", float, None)
    if original is not None:
        config["original_max_position_embeddings"] = original
    if short and long:
        scale = {} if attention is None else {"attention_factor": attention}
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long} | scale
    config["sliding_window"] = keys.get("attention.sliding_window", int, None) or None


def _silu(config: Config) -> Config:
    return {"hidden_act": "silu"}


def _interleaved(name: str, numbers: Floats, config: Config) -> Floats:
    """Rows of queries and keys so that the pairs which are rotated together are neighbours, as llama.cpp's converter has them."""
    if not re.search(r"\.[qk]_proj\.", name):
        return numbers
    halves = numbers.reshape(-1, 2, config["head_dim"] // 2, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)


def _halved(name: str, numbers: Floats, config: Config) -> Floats:
    """Undoes _interleaved."""
    if not re.search(r"\.[qk]_proj\.", name):
        return numbers
    pairs = numbers.reshape(-1, config["head_dim"] // 2, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _whole_norms(name: str, numbers: Floats, config: Config) -> Floats:
    """Norm weights plus the one that folders leave off."""
    return numbers + np.float32(1) if name.endswith("norm.weight") else numbers


def _norms_less_one(name: str, numbers: Floats, config: Config) -> Floats:
    """Undoes _whole_norms."""
    return numbers - np.float32(1) if name.endswith("norm.weight") else numbers


def _gemma3_config(config: Config) -> Config:
    """The scale of the scores as config.json says it, which is a whole number where it is one within a file's float32."""
    scalar = float(config["query_pre_attn_scalar"])
    whole = round(scalar)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole if abs(scalar - whole) <= 1e-6 * scalar else scalar,
    }  # fmt: skip


def _gemma3_keys(config: Config) -> Config:
    every = config.get("sliding_window_pattern") or 6
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])
    ]
    scale = config["query_pre_attn_scalar"] if config.get("query_pre_attn_scalar") else config["head_dim"]
    cap = config.get("final_logit_softcapping")
    near = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {
        "attention.sliding_window": int(config["sliding_window"]), "attention.scale": float(scale) ** -0.5,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "rope.freq_base_swa": float(near.get("rope_theta") or config.get("rope_local_base_freq") or 1e4),
        **({"final_logit_softcapping": float(cap)} if cap else {}),
    }  # fmt: skip


llama = Hook(GGUFModel(
    "LlamaForCausalLM", "llama", LAYER, lambda _, config: config.update(rope_interleaved=True),
    writing=Writing(
        ("LlamaForCausalLM", "MistralForCausalLM"),
        change=_interleaved, alike={"rope_interleaved": False}, back=_halved, config=_silu,
    ),
))  # fmt: skip
qwen2 = Hook(GGUFModel("Qwen2ForCausalLM", "qwen2", LAYER, writing=Writing(("Qwen2ForCausalLM",), config=_silu)))
qwen3 = Hook(GGUFModel("Qwen3ForCausalLM", "qwen3", LAYER, writing=Writing(("Qwen3ForCausalLM",), config=_silu)))
gemma2 = Hook(GGUFModel("Gemma2ForCausalLM", "gemma2", _GEMMA, _extend_gemma2))
gemma3 = Hook(GGUFModel(
    "Gemma3ForCausalLM", "gemma3_text", _GEMMA, _extend_gemma3,
    writing=Writing(
        ("Gemma3ForCausalLM",), _gemma3_keys, _whole_norms, {"norm_offset": 1.0}, _norms_less_one, _gemma3_config
    ),
))  # fmt: skip
phi3 = Hook(GGUFModel("Phi3ForCausalLM", "phi3", _PHI3, _extend_phi3))
