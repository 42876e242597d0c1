"""What can't be an adapter is refused by name, and nothing has changed by then."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from peft_adapters import ATTENTION, EVERY, FUSED, adapter_config, adapter_tensors, make_adapter, write_adapter
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")
    with LLM(folder, "reference", num_kv_blocks=32, enable_lora=True, max_lora_rank=8, progress=False) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_has_changed(llm):
    before = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    yield
    assert llm.adapters == () and not llm.engine.has_unfinished()
    assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == before
    assert all(not llm.loaded.session.read_weight(a).any() for a, _ in llm.loaded.lora._placed.values())


def refused(llm, path, error, match):
    with pytest.raises(error, match=match) as refusal:
        llm.load_adapter("bad", path)
    return refusal.value


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"), ({"peft_type": None}, "peft_type is None"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type"), ({"use_dora": True}, "use_dora is True"), ({"bias": "all"}, "bias is 'all'"),
        ({"bias": "lora_only"}, "bias"), ({"lora_bias": True}, "lora_bias"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"), ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"), ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"), ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"), ({"target_parameters": ["x"]}, "target_parameters"),
    ],
)  # fmt: skip
def test_kinds_of_adapters_that_are_more_than_two_matrices(llm, tmp_path, fields, match):
    error = refused(llm, make_adapter(tmp_path / "a", "llama", **fields), UnsupportedError, match)
    assert error.param in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0}, {"r": -1}, {"r": "4"}, {"r": True}, {"r": None}, {"r": 4.0}, {"lora_alpha": None}, {"lora_alpha": "8"},
        {"lora_alpha": float("nan")}, {"lora_alpha": float("inf")}, {"use_rslora": 1}, {"lora_alpha": [8]}, {"lora_alpha": 10**400},
    ],
)  # fmt: skip
def test_numbers_that_are_none(llm, tmp_path, fields):
    refused(llm, make_adapter(tmp_path / "a", "llama", **fields), CheckpointError, "must be a count, a number and true or false")


def test_a_rank_over_the_limit_names_both(llm, tmp_path):
    error = refused(
        llm, make_adapter(tmp_path / "a", "llama", rank=9), InvalidRequestError, "rank 9, which is over max_lora_rank 8"
    )
    assert error.param == "max_lora_rank"


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "qkv_proj", "layers.7.self_attn.q_proj", "q_norm"])
def test_modules_that_have_no_adapter_are_refused_by_name(llm, tmp_path, name):
    extra = {f"base_model.model.model.{name}.lora_{part}.weight": np.zeros((4, 4), np.float32) for part in "AB"}
    tensors = adapter_tensors("llama") | extra
    refused(llm, write_adapter(tmp_path / "a", tensors, adapter_config()), UnsupportedError, f"{name}.*q_proj.*can have adapters")


@pytest.mark.parametrize(
    "name",
    [
        "lora_magnitude_vector.default.weight", "lora_embedding_A", "lora_A.default.weight", "base_layer.weight", "lora_B.bias",
        "lora_C.weight", "modules_to_save.weight",
    ],
)  # fmt: skip
def test_tensors_of_another_kind_are_refused_by_name(llm, tmp_path, name):
    tensors = adapter_tensors("llama") | {f"{STEM}.{name}": np.zeros((4, 64), np.float32)}
    refused(llm, write_adapter(tmp_path / "a", tensors, adapter_config()), UnsupportedError, name)


def test_a_phi3_adapter_names_the_fused_modules(tmp_path):
    model = make_checkpoint(tmp_path / "phi3", "phi3")
    with LLM(model, "reference", num_kv_blocks=32, enable_lora=True, progress=False) as llm:
        refused(
            llm,
            make_adapter(tmp_path / "a", "llama", EVERY),
            UnsupportedError,
            "gate_proj.*down_proj, gate_up_proj, o_proj, qkv_proj",
        )
        llm.load_adapter("good", make_adapter(tmp_path / "b", "phi3", FUSED))


def test_wrong_shapes_lone_halves_and_what_is_not_finite(llm, tmp_path):
    def load(changes, match, config=None):
        tensors = {k: v for k, v in (adapter_tensors("llama") | changes).items() if v is not None}
        refused(llm, write_adapter(tmp_path / "a", tensors, config or adapter_config()), CheckpointError, match)

    a, b = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"
    for name, shape in [(a, (4, 63)), (a, (3, 64)), (a, (64, 4)), (a, (256,)), (b, (64, 3)), (b, (4, 64)), (b, (0, 4))]:
        load({name: np.zeros(shape, np.float32)}, "lora_. is|floats|lora_[AB].weight is float32")
    for name in (a, b):
        load({name: None}, "stands alone; lora_A and lora_B are both needed")
        for value in (np.nan, np.inf, -np.inf):
            spoilt = adapter_tensors("llama")[name].copy()
            spoilt[2, 1] = value
            load({name: spoilt}, "not finite")
    load({b: np.full((64, 4), 3e38, np.float32)}, "not finite")  # once it is scaled
    load({}, "target_modules lists 'w1'", adapter_config(["q_proj", "w1"]))
    none = dict.fromkeys(adapter_tensors("llama"))
    load(none, "has no tensors")
    without = {k: None for k in adapter_tensors("llama") if ".down_proj." in k}
    load(without, "target_modules lists 'down_proj'")


def test_damaged_folders(llm, tmp_path):
    folder = make_adapter(tmp_path / "a", "llama")
    tensors, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, text = tensors.read_bytes(), config.read_text()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        tensors.write_bytes(whole[:cut])
        refused(llm, folder, CheckpointError, "incomplete download|bytes")
    tensors.unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    refused(llm, folder, CheckpointError, "safetensors")
    tensors.write_bytes(whole)
    for bad in ("", "[]", "{", '{"r": 1, "r": 2}', "[" * 100_000, text[:-2], " " * (1 << 20) + text):
        config.write_text(bad)
        refused(llm, folder, CheckpointError, "adapter_config.json")
    config.unlink()
    refused(llm, folder, CheckpointError, "adapter_config.json is missing")
    os.mkfifo(config)
    refused(llm, folder, CheckpointError, "adapter_config.json is missing")


@pytest.mark.parametrize("path", ["", "nowhere/at/all", "a\0b", None, 7, "hf:some/adapter", b"\xff"])
def test_paths_that_are_no_folder(llm, path):
    assert refused(llm, path, InvalidRequestError, "an adapter is a folder").param == "path"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", ".x", "x" * 129, None, 3, "a\n", "ünï"])
def test_names_are_plain_words(llm, tmp_path, name):
    with pytest.raises(InvalidRequestError) as refusal:
        llm.load_adapter(name, make_adapter(tmp_path / "a", "llama", ATTENTION))
    assert refusal.value.param == "name"


def test_a_name_is_used_once_and_unknown_ones_are_refused(llm, tmp_path):
    folder = make_adapter(tmp_path / "a", "llama")
    with pytest.raises(InvalidRequestError, match="loaded are: none"):
        llm.unload_adapter("a")
    with pytest.raises(InvalidRequestError, match="no adapter is called"):
        llm.generate("x", GREEDY, adapter=["a"])
    llm.load_adapter("a", folder)
    with pytest.raises(InvalidRequestError, match="is called 'a' already"):
        llm.load_adapter("a", folder)
    llm.unload_adapter("a")


def test_a_file_that_says_less_is_read_as_peft_reads_it(llm, tmp_path):
    folder = make_adapter(tmp_path / "a", "llama", ["q_proj"])
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 0.5, "target_modules": "all-linear"})
    )
    llm.load_adapter("a", folder)
    llm.unload_adapter("a")
