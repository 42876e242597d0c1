"""open_checkpoint: folders and files as one view; names, tied embeddings, tokenizer data, fingerprints, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint
from trivium.weights.checkpoint import canonical_name
from weight_files import hf_folder, hf_tensors, sharded_folder, tiny_gguf, write_folder

EMBEDDING = "model.embed_tokens.weight"


def test_a_folder_gives_configuration_and_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(hf_folder(tmp_path, tie_word_embeddings=False)))
    assert checkpoint.path == tmp_path
    assert checkpoint.config["hidden_size"] == 4
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == set(hf_tensors())
    assert {n: checkpoint.tensor(n).nbytes for n in hf_tensors()} == {n: t.nbytes for n, t in hf_tensors().items()}
    for name, want in hf_tensors().items():
        weight = checkpoint.tensor(name)
        assert (weight.name, weight.format, weight.shape) == (name, "float32", want.shape)
        np.testing.assert_array_equal(weight.decode(), want)


def test_generation_config(tmp_path: Path) -> None:
    write_folder(hf_folder(tmp_path), {"generation_config.json": {"eos_token_id": [1, 2]}})
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}


def without_head() -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in hf_tensors().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_tied_head_is_the_embedding(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(hf_folder(tmp_path, without_head(), **config))
    assert checkpoint.config["tie_word_embeddings"] is True
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").decode(), hf_tensors()[EMBEDDING])
    assert "lm_head.weight" not in checkpoint.tensors


def test_an_untied_head_that_is_missing_is_an_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hf_folder(tmp_path, without_head(), tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight")


def test_a_head_that_is_there_is_not_tied_unless_the_configuration_says_so(tmp_path: Path) -> None:
    assert open_checkpoint(hf_folder(tmp_path)).config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("embed_tokens.weight", EMBEDDING),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.encoder.layers.0.mlp.weight", "vision_tower.encoder.layers.0.mlp.weight"),
        ("model.vision_tower.norm.weight", "model.vision_tower.norm.weight"),
    ],
)
def test_prefixes_are_normalised(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_multimodal_checkpoint_reads_like_its_text_model(tmp_path: Path, prefix: str) -> None:
    stored = {prefix + (n if prefix == "language_model." else n.removeprefix("model.")): t for n, t in without_head().items()}
    checkpoint = open_checkpoint(hf_folder(tmp_path, stored))
    assert set(checkpoint.tensors) == set(without_head())
    np.testing.assert_array_equal(checkpoint.tensor(EMBEDDING).decode(), hf_tensors()[EMBEDDING])


def test_two_tensors_of_one_name_are_an_error(tmp_path: Path) -> None:
    norm = np.ones(4, np.float32)
    with pytest.raises(CheckpointError, match=r"two tensors are 'model\.norm\.weight'"):
        open_checkpoint(hf_folder(tmp_path, {"norm.weight": norm, "model.norm.weight": norm}))


def test_a_gguf_file_and_a_folder_with_one_are_the_same(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    file, folder = open_checkpoint(path), open_checkpoint(tmp_path)
    assert folder.path == path
    assert file.fingerprint == folder.fingerprint
    assert file.config == folder.config


def test_config_json_beside_a_gguf_file_does_not_hide_it(tmp_path: Path) -> None:
    tiny_gguf(write_folder(tmp_path, {"config.json": {}}) / "m.gguf")
    assert open_checkpoint(tmp_path).config["hidden_size"] == 16


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        tiny_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_weights_are_never_loaded(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {name: b"\x80\x04", "config.json": {}})
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError, match="pickled weights"):
            open_checkpoint(path)


def test_pickled_weights_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    write_folder(hf_folder(tmp_path), {"pytorch_model.bin": b"\x80\x04"})
    assert EMBEDDING in open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize(("name", "words"), [("m.safetensors", "give the folder"), ("m.onnx", "no model file")])
def test_other_files_are_refused(tmp_path: Path, name: str, words: str) -> None:
    write_folder(tmp_path, {name: b"x"})
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(tmp_path / name)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


def test_a_link_to_nowhere_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_malformed_config_is_our_error(tmp_path: Path, content: bytes) -> None:
    hf_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    (hf_folder(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


def test_fingerprints_are_stable_and_tell_models_apart(tmp_path: Path) -> None:
    folders = [hf_folder(tmp_path / "a"), hf_folder(tmp_path / "b"), hf_folder(tmp_path / "c", rope_theta=5.0),
               hf_folder(tmp_path / "d", without_head()), sharded_folder(tmp_path / "e"),
               hf_folder(tmp_path / "tuned", {name: t * np.float32(1.01) for name, t in hf_tensors().items()})]  # fmt: skip
    paths = [*folders, tiny_gguf(tmp_path / "f.gguf"), tiny_gguf(tmp_path / "g.gguf", vocab_size=9)]
    a, b, *others = (open_checkpoint(path).fingerprint for path in paths)
    assert a == b
    assert len({a, *others}) == len(others) + 1


def test_tokenizer_files(tmp_path: Path) -> None:
    files = {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": {"bos_token": "<s>", "chat_template": "{{ a }}"}}
    write_folder(hf_folder(tmp_path), files | {"special_tokens_map.json": {"bos_token": "<b>", "eos_token": "</s>"}})
    data = open_checkpoint(tmp_path).tokenizer_data()
    assert data["kind"] == "json"
    assert data["tokenizer_json"] == '{"version": "1.0"}'
    assert (data["config"]["bos_token"], data["config"]["eos_token"]) == ("<s>", "</s>")
    assert data["chat_template"] == "{{ a }}"


def test_a_template_file_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    files = {"tokenizer.json": "{}", "tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "new 🙂"}
    assert open_checkpoint(write_folder(hf_folder(tmp_path), files)).tokenizer_data()["chat_template"] == "new 🙂"


@pytest.mark.parametrize(
    ("templates", "want"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], "t"),
        ([], None),
    ],
)
def test_named_templates(tmp_path: Path, templates: list[dict[str, str]], want: str | None) -> None:
    files = {"tokenizer.json": "{}", "tokenizer_config.json": {"chat_template": templates}}
    assert open_checkpoint(write_folder(hf_folder(tmp_path), files)).tokenizer_data()["chat_template"] == want


def test_a_missing_tokenizer_is_an_error_only_when_it_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hf_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        checkpoint.tokenizer_data()


def test_bfloat16_tensors(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    write_folder(tmp_path, {"config.json": {}, "model.safetensors": len(header).to_bytes(8, "little") + header + bits.tobytes()})
    weight = open_checkpoint(tmp_path).tensor("model.norm.weight")
    assert (weight.format, weight.data.dtype, weight.decode().tolist()) == ("bfloat16", np.uint16, [1.0, -2.0])
