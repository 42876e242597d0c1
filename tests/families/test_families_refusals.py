"""What families outside the core refuse, by name; and models without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import weights_of
from model_cases import make_prompts
from paged_runner import PagedRunner, run_in_chunks
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import build, describe
from trivium.weights import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": [architecture], **more}


def test_attention_is_sparse_where_contexts_may_be_long_and_only_there() -> None:
    sparse = config("DeepseekV32ForCausalLM", **LATENT, index_topk=100, index_n_heads=2, index_head_dim=16)
    for length, names in ((101, {"top_positions": 4, "sparse_latent_attention": 4}), (100, {"latent_attention": 4})):
        calls = [call.name for call in build(sparse, max_model_len=length).calls]
        assert {name: calls.count(name) for name in calls if "latent_attention" in name or name == "top_positions"} == names


def test_an_architecture_without_its_operators_says_which_are_missing() -> None:
    with pytest.raises(UnsupportedError, match="attention over compressed keys"):
        describe(config("DeepseekV4ForCausalLM", **LATENT))


@pytest.mark.parametrize(("architecture", "fault", "key"), [
    ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
    ("OlmoForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
    ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
    ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm"),
    ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("Mistral4ForCausalLM", {**LATENT, "n_group": 4}, "n_group"),
    ("Mistral3ForConditionalGeneration", {"model_type": "qwen3"}, "model_type"),
    ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("NemotronHForCausalLM", {"layers_block_type": ["mamba"] * 4, "mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ("FalconH1ForCausalLM", {"mamba_d_ssm": 128, "mamba_proj_bias": True}, "mamba_proj_bias"),
])  # fmt: skip
def test_what_a_family_can_t_do_is_refused_by_its_key(architecture: str, fault: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        build(config(architecture, **fault))
    assert e.value.param == key


@pytest.mark.parametrize(("architecture", "fault", "key"), [
    ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "linear_num_value_heads"),
    ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
    ("Gemma4ForCausalLM", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ("Gemma3nForCausalLM", {}, "num_kv_shared_layers"),
    ("GlmMoeDsaForCausalLM", {**LATENT, "index_topk_pattern": "SFFF"}, "indexer_types"),
    ("GlmMoeDsaForCausalLM", {**LATENT, "index_topk_pattern": "FF"}, "indexer_types"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "altup_active_idx": 4}, "altup_active_idx"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "intermediate_size": [48, 48]}, "intermediate_size"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    ("FalconH1ForCausalLM", {"mamba_d_ssm": 128, "ssm_multipliers": [1.0]}, "ssm_multipliers"),
    ("FalconH1ForCausalLM", {"mamba_d_ssm": 128, "time_step_limit": 3}, "time_step_limit"),
    ("GraniteMoeHybridForCausalLM", {"shared_intermediate_size": 8, "mamba_n_heads": 5}, "mamba_n_heads"),
])  # fmt: skip
def test_a_configuration_that_can_t_be_true_names_its_key(architecture: str, fault: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as e:
        build(config(architecture, **fault))
    assert e.value.param == key


def test_gemma_3n_knows_no_tokens_beyond_those_with_an_embedding_for_each_layer() -> None:
    assert build(config("Gemma3nForCausalLM", num_kv_shared_layers=0, vocab_size_per_layer_input=250)).vocab_size == 250


@pytest.mark.oracles
def test_hidden_states_of_a_model_without_a_head_equal_the_oracle_s(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, head_dim=24)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["architectures"] == ["Qwen3Model"]
    program = build(checkpoint.config)
    (prompt,) = make_prompts((23,), 259)
    with torch.no_grad():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        want = (hidden @ model.embed_tokens.weight.T).numpy()
    (got,) = run_in_chunks(PagedRunner(program, weights_of(program, checkpoint), page_size=4), [prompt], 9)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
