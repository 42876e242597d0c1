"""A folder as a .gguf file: the same model to trivium and to transformers, which reads the file by code of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_checkpoints import make_checkpoint
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.text import Tokenizer
from trivium.weights import open_checkpoint
from trivium_compress import Recipe, quantise, work
from trivium_compress.to_gguf import to_gguf
from written_models import CASES, SIZES, logprobs, model_of, oracle


@pytest.mark.oracles
@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_folders_model_to_trivium_and_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("trivium_compress.convert._STEP", 1024)  # one head at a time
    transformers = pytest.importorskip("transformers")
    model, path = model_of(name, tmp_path / "hf"), tmp_path / "m.gguf"
    to_gguf(tmp_path / "hf", path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["hf", "m.gguf"]
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == CASES[name][2]
    want = oracle(model)
    np.testing.assert_allclose(logprobs(path), want, atol=1e-4)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if name == "mistral":  # written as what it is: a llama
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    else:
        theirs = type(model)(model.config).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    report = theirs.load_state_dict(read, strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    np.testing.assert_allclose(oracle(theirs), want, atol=1e-4)
    known = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers"):
        assert getattr(known, key) == getattr(model.config, key)


@pytest.mark.oracles
def test_matrices_keep_their_type_and_vectors_are_float32(tmp_path: Path) -> None:
    import torch

    model_of("llama", tmp_path / "hf").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    to_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    kinds = {t.name: (t.tensor_type.name, len(t.shape)) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert set(kinds.values()) == {("BF16", 2), ("F32", 1)}
    folder, file = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "m.gguf")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(folder.tensor(name).decode(), file.tensor(name).decode())


def test_the_tokenizer_cuts_and_marks_as_the_folders_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    config = {"chat_template": "{{ messages[0].content }}", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    to_gguf(folder, tmp_path / "m.gguf")
    mine, theirs = (Tokenizer.from_data(open_checkpoint(p).tokenizer_data()) for p in (folder, tmp_path / "m.gguf"))
    rows = open_checkpoint(folder).config["vocab_size"]
    for text in ("Hello  <s>wörld</s> 123\n\n", "", "日本 😀"):
        assert mine.encode(text) == theirs.encode(text)
        assert mine.decode(mine.encode(text)) == theirs.decode(mine.encode(text))
    assert (mine.bos_id, mine.eos_ids, mine.special_ids) == (theirs.bos_id, theirs.eos_ids, theirs.special_ids)
    assert mine.vocab_size == theirs.vocab_size < rows
    assert theirs.chat_template == config["chat_template"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling of the type 'dynamic'"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM can't be written as a .gguf file; "),
    ],
)
def test_what_the_format_has_no_words_for_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedError, match=reason):
        to_gguf(folder, tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_quantise_writes_blocks_for_a_folder_and_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path / "hf", "llama", **sizes)
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(work, "finish_gguf", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        quantise(folder, tmp_path / "m.gguf", Recipe("q8_0"))
    written = (tmp_path / "m.plain.gguf").stat().st_mtime_ns
    monkeypatch.setattr(work, "to_gguf", lambda *_: pytest.fail(f"it was there already, since {written}"))
    quantise(folder, tmp_path / "m.gguf", Recipe("q8_0"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]
    mine, theirs = open_checkpoint(folder), open_checkpoint(tmp_path / "m.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    want = mine.tensor(name).decode().reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)  # pairs that are rotated are neighbours
    assert theirs.tensor(name).format == "q8_0"
    assert np.abs(theirs.tensor(name).decode() - want).max() <= np.abs(want).max() / 127
    np.testing.assert_allclose(logprobs(tmp_path / "m.gguf"), logprobs(folder), atol=0.1)


def test_an_output_that_exists_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match=r"m\.gguf exists"):
        quantise(folder, tmp_path / "m.gguf", Recipe("q8_0"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]
