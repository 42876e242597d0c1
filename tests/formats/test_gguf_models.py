"""What GGUF names and metadata become: names against the gguf package's map, configurations against Hugging Face's keys."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import Checkpoint, open_checkpoint
from weight_files import TOKENIZER, llama_metadata, llama_tensors, tiny_gguf, write_gguf

EXTRA = {
    "gemma2": ["post_attention_norm", "post_ffw_norm"],
    "gemma3": ["post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"],
    "qwen3": ["attn_q_norm", "attn_k_norm"],
}


def tensors_of(architecture: str, layers: int = 2) -> dict[str, np.ndarray]:
    tensors = llama_tensors(layers=layers)
    for i in range(layers):
        for name in EXTRA.get(architecture, []):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(8 if "attn_" in name[:5] else 16, np.float32)
        if architecture == "qwen2":
            tensors |= {f"blk.{i}.attn_{x}.bias": np.ones(16 if x == "q" else 8, np.float32) for x in "qkv"}
        if architecture == "phi3":
            for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del tensors[f"blk.{i}.{name}.weight"]
            tensors[f"blk.{i}.attn_qkv.weight"] = np.ones((32, 16), np.float32)
            tensors[f"blk.{i}.ffn_up.weight"] = np.ones((64, 16), np.float32)
    return tensors


def opened(tmp_path: Path, architecture: str, more: dict[str, np.ndarray] | None = None, **keys: Any) -> Checkpoint:
    """The checkpoint of an architecture's tiny file with further tensors and keys (dots as double underscores)."""
    metadata = llama_metadata(architecture, **{k.replace("__", "."): v for k, v in keys.items()}) | TOKENIZER
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors_of(architecture) | (more or {})))


ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA), "qwen2": ("Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3), "gemma2": ("Gemma2ForCausalLM", gguf.MODEL_ARCH.GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", gguf.MODEL_ARCH.GEMMA3), "phi3": ("Phi3ForCausalLM", gguf.MODEL_ARCH.PHI3),
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_that_the_packages_converter_maps_from(tmp_path: Path, architecture: str) -> None:
    hf_class, arch = ARCHITECTURES[architecture]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = {} if architecture == "gemma2" else {"output.weight": np.ones((40, 16), np.float32)}
        checkpoint = opened(tmp_path, architecture, head)
    assert checkpoint.config["architectures"] == [hf_class]
    names = gguf.get_tensor_name_map(arch, 2)
    stored = {t.name: t for t in gguf.GGUFReader(checkpoint.path).tensors}
    found = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in checkpoint.tensors}
    assert found.keys() == stored.keys()
    for gguf_name, name in found.items():
        assert checkpoint.tensor(name).data.tobytes() == stored[gguf_name].data.tobytes()


def test_what_all_architectures_share(tmp_path: Path) -> None:
    config = opened(tmp_path, "llama", rope__freq_base=5000.0).config
    want = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64,
        "rms_norm_eps": float(np.float32(1e-5)), "rope_theta": 5000.0, "rope_interleaved": True, "tie_word_embeddings": True,
        "attention_bias": False, "bos_token_id": 3, "eos_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in want} == want
    assert not {"rope_scaling", "rope_parameters", "sliding_window", "partial_rotary_factor"} & config.keys()


def test_the_vocabulary_is_as_large_as_the_embedding_whatever_the_key_says(tmp_path: Path) -> None:
    assert opened(tmp_path, "llama", vocab_size=99).config["vocab_size"] == 40


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    head = np.full((40, 16), 2, np.float32)
    checkpoint = opened(tmp_path, "llama", {"output.weight": head})
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").decode(), head)


def test_head_dim_comes_from_key_length(tmp_path: Path) -> None:
    assert opened(tmp_path, "qwen3", attention__key_length=24).config["head_dim"] == 24


def test_only_llama_has_adjacent_rotary_pairs(tmp_path: Path) -> None:
    assert [a for a in ARCHITECTURES if opened(tmp_path, a).config.get("rope_interleaved")] == ["llama"]


def test_biases_are_seen(tmp_path: Path) -> None:
    assert opened(tmp_path, "llama", {"blk.0.attn_q.bias": np.ones(16, np.float32)}).config["attention_bias"] is True
    assert opened(tmp_path, "qwen3").config["attention_bias"] is False


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 32},
         {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}),
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 0.0}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_rope_scaling_keys(tmp_path: Path, keys: dict[str, Any], want: dict[str, Any] | None) -> None:
    config = opened(tmp_path, "qwen2", **{f"rope__scaling__{k}": v for k, v in keys.items()}).config
    assert config.get("rope_scaling") == want


def test_the_old_key_of_linear_scaling_and_unknown_kinds(tmp_path: Path) -> None:
    config = opened(tmp_path, "llama", rope__scale_linear=2.0).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedError, match="'foo'"):
        opened(tmp_path, "llama", rope__scaling__type="foo", rope__scaling__factor=2.0)


def llama3_factors(head_dim: int, theta: float, *, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Divisors of the llama3 scaling, from its published definition (Llama 3.1 model card code, in wavelengths)."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.faults
def test_o44_rope_freqs_of_ones_change_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_ones = opened(tmp_path, "llama", {"rope_freqs.weight": np.ones(4, np.float32)})
    assert "rope_parameters" not in with_ones.config
    assert with_ones.config == opened(tmp_path, "llama").config
    assert "rope_freqs.weight" not in with_ones.tensors


@pytest.mark.faults
def test_o44_rope_freqs_are_frequency_divisors(tmp_path: Path) -> None:
    factors = llama3_factors(8, 10000.0, factor=8.0, low=1.0, high=4.0, original=150)
    assert 1.0 < factors[1] < 8.0
    config = opened(tmp_path, "llama", {"rope_freqs.weight": factors}).config
    assert config["rope_parameters"] == {"rope_type": "factors", "factors": factors.tolist(), "rope_theta": 10000.0}


@pytest.mark.faults
def test_o44_a_table_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 3 numbers, not 4"):
        opened(tmp_path, "llama", {"rope_freqs.weight": np.ones(3, np.float32)})


@pytest.mark.faults
def test_o44_other_unknown_tensors_give_one_warning_and_no_stop(tmp_path: Path) -> None:
    unknown = {f"blk.0.strange_{i}.weight": np.ones(2, np.float32) for i in range(7)}
    with pytest.warns(UserWarning, match=r"blk.0.strange_0.weight.* and 2 more") as caught:
        checkpoint = opened(tmp_path, "llama", unknown)
    assert len(caught) == 1
    assert not any("strange" in name for name in checkpoint.tensors)


def test_gemma2(tmp_path: Path) -> None:
    config = opened(tmp_path, "gemma2", attention__sliding_window=6, attention__key_length=8).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    want = {"sliding_window": 6, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8,
            "norm_offset": 0.0}  # fmt: skip
    assert {key: config[key] for key in want} == want
    capped = opened(tmp_path, "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0).config
    assert (capped["attn_logit_softcapping"], capped["final_logit_softcapping"]) == (2.0, 3.0)


def layers_only(tmp_path: Path, architecture: str, layers: int, **keys: Any) -> dict[str, Any]:
    """The configuration of a file with that many layers, of which only the norms are there."""
    tensors = llama_tensors(layers=0) | {f"blk.{i}.attn_norm.weight": np.ones(16, np.float32) for i in range(layers)}
    metadata = llama_metadata(architecture, block_count=layers, **{k.replace("__", "."): v for k, v in keys.items()})
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors)).config


def test_gemma3(tmp_path: Path) -> None:
    config = layers_only(tmp_path, "gemma3", 13, attention__sliding_window=512, attention__key_length=24)
    want = {"sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 24,
            "final_logit_softcapping": None, "norm_offset": 0.0, "model_type": "gemma3_text"}  # fmt: skip
    assert {key: config[key] for key in want} == want
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11]


@pytest.mark.parametrize(("pattern", "full"), [(2, [1, 3]), ([True, False, True, True], [1])])
def test_a_pattern_in_the_file_counts(tmp_path: Path, pattern: Any, full: list[int]) -> None:
    kinds = layers_only(tmp_path, "gemma3", 4, attention__sliding_window_pattern=pattern)["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_by_hidden_size_over_heads(tmp_path: Path, architecture: str, layers: int) -> None:
    assert layers_only(tmp_path, architecture, layers, attention__key_length=4)["query_pre_attn_scalar"] == 16 / 2
    assert layers_only(tmp_path, architecture, 3, attention__key_length=4)["query_pre_attn_scalar"] == 4


def test_an_attention_scale_in_the_file_counts(tmp_path: Path) -> None:
    assert layers_only(tmp_path, "gemma3", 3, attention__scale=0.25)["query_pre_attn_scalar"] == pytest.approx(16)


def test_phi3_fused_tensors_and_longrope(tmp_path: Path) -> None:
    short, long = np.arange(1, 4, dtype=np.float32), np.arange(4, 7, dtype=np.float32)
    checkpoint = opened(
        tmp_path, "phi3", {"rope_factors_short.weight": short, "rope_factors_long.weight": long}, rope__dimension_count=6,
        rope__scaling__original_context_length=32, rope__scaling__attn_factor=1.25, attention__sliding_window=0,
    )  # fmt: skip
    assert checkpoint.tensor("model.layers.1.self_attn.qkv_proj.weight").shape == (32, 16)
    assert checkpoint.tensor("model.layers.1.mlp.gate_up_proj.weight").shape == (64, 16)
    config = checkpoint.config
    assert config["rope_scaling"] == {
        "rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(), "attention_factor": 1.25,
    }  # fmt: skip
    assert (config["original_max_position_embeddings"], config["partial_rotary_factor"]) == (32, 0.75)
    assert config["sliding_window"] is None
    assert opened(tmp_path, "phi3", attention__sliding_window=9).config["sliding_window"] == 9


@pytest.mark.parametrize("architecture", ["mamba", "llama4", "gpt-oss"])
def test_another_architecture_is_named(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the GGUF architecture '{architecture}' can't be read; there are gemma2, gemma3"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, {}, llama_tensors()))


def test_no_architecture_experts_and_splits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="mixture-of-experts"):
        opened(tmp_path, "llama", expert_count=8)
    keys = llama_metadata() | {"split.count": 2}
    with pytest.raises(UnsupportedError, match="one part of a split"):
        open_checkpoint(write_gguf(tmp_path / "s.gguf", "llama", keys, llama_tensors()))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"embedding_length": 15}, "does not have rows of 15"), ({"attention.head_count": 0}, r"head_count is 0, not in 1"),
        ({"attention.head_count_kv": 3}, "head_count_kv is 3, not in 1..2"), ({"block_count": 2**31}, "block_count is 2147483648"),
        ({"rope.dimension_count": 99}, "dimension_count is 99"), ({"context_length": "x"}, "context_length is .x.; it should"),
        ({"attention.head_count_kv": True}, "head_count_kv is True"),
    ],
)  # fmt: skip
def test_impossible_numbers_name_their_key(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    keys = {f"llama.{k}": v for k, v in keys.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata() | keys, llama_tensors(hidden=16))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    keys = llama_metadata()
    del keys["llama.block_count"]
    with pytest.raises(CheckpointError, match=r"llama\.block_count is missing"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", keys, llama_tensors()))


def test_numbers_a_layer_count_if_they_are_all_equal(tmp_path: Path) -> None:
    assert opened(tmp_path, "llama", attention__head_count_kv=[1, 1]).config["num_key_value_heads"] == 1
    with pytest.raises(UnsupportedError, match="differs from layer to layer"):
        opened(tmp_path, "llama", attention__head_count_kv=[1, 2])


def test_the_tokenizer_is_handed_on_as_it_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf"))
    data = checkpoint.tokenizer_data()
    assert (data["kind"], data["chat_template"]) == ("vocabulary", None)
    words = data["read"]()
    assert [words.token(i) for i in range(words.size)] == TOKENIZER["tokenizer.ggml.tokens"]
    assert checkpoint.generation_config == {"bos_token_id": 3, "eos_token_id": 2}
    template = TOKENIZER | {"tokenizer.chat_template": "{{ x }}"}
    path = write_gguf(tmp_path / "t.gguf", "llama", llama_metadata() | template, llama_tensors())
    assert open_checkpoint(path).tokenizer_data()["chat_template"] == "{{ x }}"


def test_no_tokenizer_is_an_error_only_when_it_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), llama_tensors()))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        checkpoint.tokenizer_data()


def test_no_embedding_is_an_error(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), tensors))
