"""Tiny random models of the families outside the core, made by transformers: what their Programs are judged against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from trivium.models import arrange
from trivium.ops import Program
from trivium.weights import Checkpoint, open_checkpoint

_SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 24,
    "num_hidden_layers": 4, "rms_norm_eps": 1e-3,  # the norm of what a short state gives would blow up the last bits
}  # fmt: skip
_GATED_EXPERTS = {
    "num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_LLAMA4 = {"intermediate_size_mlp": 40, "num_local_experts": 6, "num_hidden_layers": 5, "head_dim": 16}
_NEMOTRON = {
    "ssm_state_size": 12, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2, "chunk_size": 8, "head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7, "time_step_min": 1e-9,
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": 7, "num_hidden_layers": 5, "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 259, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA3N = {
    "head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 259, "laurel_rank": 10, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8, "rms_norm_eps": 1e-3}
_LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _EXPERTS),
    "mixtral-window": ("Mixtral", {**_EXPERTS, "sliding_window": 7, "num_experts_per_tok": 3}),
    "qwen3-moe": ("Qwen3Moe", {
        "num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 24, "norm_topk_prob": True,
    }),
    "qwen3-moe-sparse": ("Qwen3Moe", {
        "num_experts_per_tok": 2, "num_experts": 5, "moe_intermediate_size": 40, "head_dim": 16, "decoder_sparse_step": 2,
        "num_hidden_layers": 4, "mlp_only_layers": [3], "attention_bias": True, "tie_word_embeddings": True,
    }),
    "glm4-moe": ("Glm4Moe", {**_ROUTED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-groups": ("Glm4Moe", {**_ROUTED, "head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}),
    "deepseek-v2": ("DeepseekV2", {**_ROUTED, **_LATENT, "q_lora_rank": None}),
    "deepseek-v2-groups": ("DeepseekV2", {
        **_ROUTED, **_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True,
    }),
    "deepseek-v3": ("DeepseekV3", {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1}),
    "deepseek-v3-yarn": ("DeepseekV3", {
        **_ROUTED, **_LATENT, "n_group": 4, "topk_group": 2, "q_lora_rank": None,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "gpt-oss": ("GptOss", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24, "sliding_window": 7, "num_hidden_layers": 4,
        "rope_scaling": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}, "swiglu_limit": 2.0,
    }),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1], "block_multiple_of": 16}),
    "lfm2-wide": ("Lfm2", {
        "layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4, "conv_L_cache": 4, "conv_bias": True,
        "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
    }),
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_GATED_EXPERTS}),
    "qwen3-next-sparse": ("Qwen3Next", {
        **_DELTA, **_GATED_EXPERTS, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "decoder_sparse_step": 2,
        "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    }),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "linear_num_value_heads": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    }}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA, **_GATED_EXPERTS, "linear_num_value_heads": 6}),
    "llama4": ("Llama4", {
        **_LLAMA4, "attention_chunk_size": 9, "floor_scale": 5, "attn_scale": 0.4, "interleave_moe_layer_step": 2,
    }),
    "llama4-plain": ("Llama4", {
        **_LLAMA4, "no_rope_layers": [1, 0, 0, 1, 1], "use_qk_norm": False, "attn_temperature_tuning": False,
        "attention_chunk_size": 16, "attention_bias": True, "moe_layers": [0, 1, 3],
    }),
    "llama4-whole": ("Llama4", {**_LLAMA4, "attention_chunk_size": None, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
    "ministral": ("Ministral", {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7, "head_dim": 24,
    }),
    "ministral3": ("Ministral3", {"head_dim": 24, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.3, "rope_theta": 1e4, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }}),
    "mistral4": ("Mistral4", {**_ROUTED, **_LATENT, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3, "rope_theta": 1e4, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }}),
    "gemma2": ("Gemma2", {
        "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0, "tie_word_embeddings": True,
    }),
    "gemma3": ("Gemma3", {
        "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7, "num_hidden_layers": 7, "tie_word_embeddings": True,
    }),
    "granite-hybrid": ("GraniteMoeHybrid", {
        **_EXPERTS, **_MAMBA, "mamba_n_groups": 1, "shared_intermediate_size": 40, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "embedding_multiplier": 3.0,
        "logits_scaling": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    }),
    "granite-hybrid-dense": ("GraniteMoeHybrid", {
        **_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
        "mamba_proj_bias": True, "mamba_conv_bias": False,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": True,
    }),
    "nemotron-h": ("NemotronH", {
        **_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
    }),
    "nemotron-h-latent": ("NemotronH", {
        **_NEMOTRON, "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"], "n_group": 4, "topk_group": 2,
        "moe_latent_size": 20, "n_groups": 1, "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.3,
    }),
    "falcon-h1": ("FalconH1", {
        **_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.5,
        "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.3, "ssm_multipliers": [0.4, 0.5, 0.6, 0.7, 1.2],
        "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.8, 0.6], "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    }),
    "falcon-h1-plain": ("FalconH1", {**_MAMBA, "mamba_d_ssm": None, "mamba_expand": 1, "projectors_bias": True}),
    "gemma4": ("Gemma4", {
        **_GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 9.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    }),
    "gemma4-moe": ("Gemma4", {
        **_GEMMA4, "num_hidden_layers": 7, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 0,
    }),
    "gemma3n": ("Gemma3n", {
        **_GEMMA3N, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.4, 0.0], "intermediate_size": [48, 40, 48, 32, 56],
    }),
    "gemma3n-odd": ("Gemma3n", {
        **_GEMMA3N, "altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False, "num_kv_shared_layers": 0,
    }),
    "deepseek-v3.2": ("DeepseekV32", {
        **_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, "index_topk": 512, "index_head_dim": 12, "index_n_heads": 2,
    }),
    "deepseek-v3.2-sparse": ("DeepseekV32", {
        **_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, "index_topk": 7, "index_head_dim": 12, "index_n_heads": 6,
    }),
    "glm-dsa": ("GlmMoeDsa", {
        **_ROUTED, **_LATENT, "index_topk": 7, "index_head_dim": 12, "index_n_heads": 6, "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    }),
    "phi-moe": ("Phimoe", {**_EXPERTS, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True}),
    "phi-moe-window": ("Phimoe", {**_EXPERTS, "sliding_window": 7, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512, "short_mscale": 1.2,
        "long_mscale": 1.3, "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    }}),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 7}),
    "olmo3-yarn": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 6, "rope_scaling": YARN}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-windows": ("SmolLM3", {
        "no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 6, "attention_bias": True, "mlp_bias": True,
    }),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    }),
    "arcee": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "seed-oss": ("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 24}),
    "cwm": ("Cwm", {"head_dim": 24, "sliding_window": 7, "num_hidden_layers": 5}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "num_hidden_layers": 5, "sliding_window_pattern": 3}),
    "exaone4-whole": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 24, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0,
    }}),
    "qwen2-moe": ("Qwen2Moe", {**_GATED_EXPERTS, "decoder_sparse_step": 2}),
    "dots1": ("Dots1", {**_ROUTED, "head_dim": 24, "n_group": 2, "topk_group": 1}),
    "solar-open": ("SolarOpen", {**_ROUTED, "head_dim": 24, "first_k_dense_replace": 0}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "minimax-m2": ("MiniMaxM2", {**_EXPERTS, "head_dim": 24, "rotary_dim": 12}),
    "glm4-moe-lite": ("Glm4MoeLite", {**_ROUTED, **_LATENT}),
    "lfm2-moe": ("Lfm2Moe", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
        "routed_scaling_factor": 1.7, "layer_types": ["conv", "full_attention", "conv"],
    }),
    "ernie-moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    }),
    "youtu": ("Youtu", {**_LATENT}),
    "hyperclovax": ("HyperCLOVAX", {
        "embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    }),
    "gemma": ("Gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True}),
    "nemotron": ("Nemotron", {"head_dim": 24}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "glm4": ("Glm4", {"head_dim": 24}),
    "glm4-no-bias": ("Glm4", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 7, "tie_word_embeddings": True, "logit_scale": 0.3}),
}  # fmt: skip
"""transformers' name of the family and what the case adds to the sizes that all have."""

PREFILL_ONLY = {"nemotron-h-latent"}
"""Cases whose time steps have limits, which the oracle forgets in decode: there only its prefill is asked."""


def oracle_model(name: str, folder: Path) -> Any:
    """transformers' model of the case with seeded numbers, which is saved to `folder`."""
    model = make_model(name)
    model.save_pretrained(folder)
    return model


def make_model(name: str, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """transformers' model of the case, `more` changed, with seeded numbers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    family, sizes = CASES[name]
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**{**_SIZES, **sizes, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    saved = model.state_dict()
    generator = torch.Generator().manual_seed(len(name))
    for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if key in saved and parameter.dtype.is_floating_point:
            noise = torch.empty_like(parameter).normal_(generator=generator)
            flat = parameter.dim() < 2 and not key.endswith("A_log")  # decays near one: the oracle sums up their logarithms
            parameter.data.copy_(parameter.data * flat + noise * (0.1 if flat else 1.2 * parameter.shape[-1] ** -0.5))
    return model


def weights_of(program: Program, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """float32 arrays of the checkpoint's tensors that the Program names."""
    tensors = arrange(checkpoint.config, checkpoint.tensors)
    sources = {c.source for c in program.constants if c.array is None}
    return {source: tensors[source]().decode() for source in sources}


def open_case(name: str, folder: Path) -> tuple[Any, Checkpoint]:
    """transformers' model and the checkpoint that it wrote."""
    model = oracle_model(name, folder)
    return model, open_checkpoint(folder)
