"""Tiny random models of every family: what fusions are looked for in, and what is run from end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trivium.conformance.numbers import Array
from trivium.models import build
from trivium.ops import Program

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 256, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "sliding_window": None, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 20, "hidden_activation": "gelu_tanh", "num_hidden_layers": 3}
_ODD = {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
_WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    name: {**_SIZES, "architectures": [architecture], **more}
    for name, architecture, more in (
        ("llama", "LlamaForCausalLM", {"rope_scaling": _LLAMA3}),
        ("llama odd", "LlamaForCausalLM", {**_ODD, "attention_bias": True, "mlp_bias": True}),
        ("llama interleaved", "LlamaForCausalLM", {**_WIDE, "rope_interleaved": True}),
        ("llama blocks", "LlamaForCausalLM", _BLOCKS),  # rows of 256 numbers, for every block format
        ("mistral", "MistralForCausalLM", {"sliding_window": 24}),
        ("qwen2", "Qwen2ForCausalLM", {}),
        ("qwen3", "Qwen3ForCausalLM", {}),
        ("gemma2", "Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
        ("gemma3", "Gemma3ForCausalLM", {**_GEMMA, "sliding_window_pattern": 3}),
        ("gemma3 odd", "Gemma3ForCausalLM", {**_GEMMA, **_WIDE, "sliding_window_pattern": 2}),
        ("phi3", "Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
    )
}
"""Configurations by name, in the keys of config.json."""


def programs() -> Iterator[tuple[str, Program]]:
    """Every tiny model's Program."""
    return ((name, build(config)) for name, config in CONFIGS.items())


def random_constants(program: Program, rng: np.random.Generator) -> dict[str, Array]:
    """Numbers that keep activations near 1: matrices by their width, norms near 1, the embedding unscaled."""
    return {c.value.name: _random(c.value.name, c.value.shape, rng) for c in program.constants if c.array is None}


def _random(name: str, shape: tuple[int | str, ...], rng: np.random.Generator) -> Array:
    sizes = [int(n) for n in shape]
    numbers = rng.standard_normal(sizes, dtype=np.float32)
    if len(sizes) == 1:
        return np.asarray(np.float32("norm" in name) + np.float32(0.1) * numbers)
    return numbers if "embed" in name else np.asarray(numbers / np.float32(np.sqrt(sizes[-1])))
