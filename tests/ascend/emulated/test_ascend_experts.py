"""Mixture-of-experts and latent-attention models on an emulated NPU, whole and quantised, call by call and captured."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_checkpoints import make_weights, tiny_config, write_safetensors

from trivium import LLM, SamplingParams

PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 140)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
LOAD = {"progress": False, "strict": True, "num_kv_blocks": 24, "max_model_len": 256, "max_num_seqs": 4}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "experts": ("qwen3", {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True,
        "head_dim": 64, **ROUTED,
    }),
    "latent": ("llama", {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "kv_lora_rank": 512, "q_lora_rank": None, "n_group": 2,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_key_value_heads": 4, "topk_group": 1, **ROUTED,
    }),
}  # fmt: skip
SORT, GROUPED, BACK = "aclnnMoeInitRoutingV3", "aclnnGroupedMatmulV5", "aclnnMoeTokenUnpermute"
FIA = "aclnnFusedInferAttentionScoreV4"


def published(weights):
    """Tensors as checkpoints have them: one for each expert, and the two halves of latent attention's projection together."""
    found = {}
    for name, x in weights.items():
        stem, _, rest = name.partition(".experts.")
        if rest and x.ndim == 3:
            found |= {f"{stem}.experts.{e}.{rest}": part for e, part in enumerate(x)}
        elif "k_absorbed" in name:
            values = weights[name.replace("k_absorbed", "v_absorbed")]
            both = np.concatenate([x.transpose(0, 2, 1), values], axis=1)
            found[name.replace("k_absorbed", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif "v_absorbed" not in name:
            found[name] = x
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    for name, (family, sizes) in MODELS.items():
        config, folder = tiny_config(family, **sizes), home / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", published(make_weights(config)), {"format": "pt"})
        _tokenizer(folder)
    return {name: home / name for name in MODELS}


def _tokenizer(folder):
    from tiny_checkpoints import byte_tokenizer

    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def wanted(folders):
    """Token ids and the prompts' logprobs by trivium_torch on the host in float32."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, "torch:cpu", dtype="float32", kv_dtype="float32", **LOAD) as llm:
            found[name] = ids(llm.generate(PROMPTS, GREEDY)), logprobs(llm)
    return found


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(llm):
    outputs = llm.generate(PROMPTS[1:], SCORED)
    pairs = [pair for prompt, o in zip(PROMPTS[1:], outputs) for pair in zip(prompt[1:], o.prompt_logprobs[1:])]
    return np.array([scored[i].logprob for i, scored in pairs])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_are_the_reference_s_and_experts_are_grouped(npu, folders, wanted, model, graphs):
    options = {**LOAD, "dtype": "float16", "kv_dtype": "float16", "backend_options": {"graphs": graphs}}
    with LLM(folders[model], "ascend", **options) as llm:
        assert len(getattr(llm.loaded.executable, "graphs", ())) == (3 if graphs else 0)
        npu.log.clear()
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted[model][0]
        llm.engine.check()
    assert {"aclnnMoeGatingTopK", SORT, GROUPED, BACK, FIA} <= set(npu.log.names)
    assert not set(npu.log.aten) & {"bmm", "bincount", "_softmax"} - ({"bmm"} if model == "latent" else set())
    layers = 2 if model == "experts" else 1
    assert npu.log.count(GROUPED) == 2 * layers * (1 if graphs else 6)  # gate and up are one product


def test_a_long_latent_prompt_goes_in_pieces_of_sixteen_queries(npu, folders):
    options = {**LOAD, "dtype": "float16", "kv_dtype": "float16", "backend_options": {"graphs": False}}
    with LLM(folders["latent"], "ascend", **options) as llm:
        npu.log.clear()
        llm.generate([PROMPTS[2]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    call = npu.log.last(FIA)
    assert call.q_lens == [*range(16, 140, 16), 140] and call.kv_lens == call.q_lens


@pytest.mark.parametrize(("format", "grouped"), [("w8a8", "aclnnDynamicQuantV2"), ("int8", GROUPED)])
@pytest.mark.parametrize("model", MODELS)
def test_quantised_experts_change_little(npu, folders, wanted, model, format, grouped):
    with LLM(folders[model], "ascend", dtype="bfloat16", quantize=format, **LOAD) as llm:
        npu.log.clear()
        found = logprobs(llm)
    assert 0 < np.abs(found - wanted[model][1]).mean() < 0.12
    assert {SORT, GROUPED, BACK, grouped} <= set(npu.log.names)
