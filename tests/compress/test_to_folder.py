"""A .gguf file as a folder: the same model to trivium, to transformers, and to the model that the file was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import byte_tokenizer, make_checkpoint
from weight_files import TOKENIZER, llama_metadata, llama_tensors, whole_blocks_gguf, write_gguf
from written_models import CASES, IDS, LLAMA3, logprobs, model_of, oracle

from trivium.cli import main
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.text import Tokenizer
from trivium.weights import open_checkpoint
from trivium_compress import Recipe, quantise, work
from trivium_compress.to_folder import to_folder
from trivium_compress.to_gguf import to_gguf

WORDS = {**TOKENIZER, "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"]}
TEXTS = ("Hello  <s>wörld</s> 123\n\n", "", " a", "日本 😀 don't")


@pytest.mark.oracles
@pytest.mark.parametrize("name", CASES)
def test_transformers_opens_the_folder_as_the_model_that_the_file_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("trivium_compress.convert._STEP", 1024)  # one head at a time
    transformers = pytest.importorskip("transformers")
    model, file = model_of(name, tmp_path / "hf"), tmp_path / "m.gguf"
    to_gguf(tmp_path / "hf", file)
    to_folder(file, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf", "out"]
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    want = oracle(model)
    np.testing.assert_allclose(oracle(theirs.eval()), want, atol=1e-4)
    np.testing.assert_allclose(logprobs(tmp_path / "out"), logprobs(file), atol=1e-5)
    np.testing.assert_allclose(logprobs(tmp_path / "out"), want, atol=1e-4)
    numbers = model.state_dict()
    for key, tensor in theirs.state_dict().items():
        assert tensor.dtype == numbers[key].dtype
        np.testing.assert_allclose(tensor, numbers[key], rtol=0, atol=1e-6 if "norm" in key else 0)


@pytest.mark.oracles
@pytest.mark.parametrize(("original", "high", "dims"), [(64, 4.0, 16), (256, 8.0, 32), (8192, 4.0, 64)])
def test_llama3_scaling_comes_back_from_its_table(tmp_path: Path, original: int, high: float, dims: int) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": original, "high_freq_factor": high, "factor": 32.0, "rope_theta": 5e5}
    model_of("llama3", tmp_path / "hf", rope_parameters=scaling, head_dim=dims, max_position_embeddings=131072)
    to_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {key: value for key, value in scaling.items() if key != "rope_theta"}
    assert found["rope_scaling"] == wanted and found["rope_theta"] == 5e5


@pytest.mark.oracles
def test_numbers_keep_their_float_type_and_blocks_become_float32(tmp_path: Path) -> None:
    import torch

    model = model_of("gemma3", tmp_path / "hf").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    to_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    mine, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "hf")
    for name in mine.tensors:  # norms, which the file has in float32 and plus 1, too
        assert mine.tensor(name).format == "bfloat16"
        np.testing.assert_array_equal(mine.tensor(name).decode(), theirs.tensor(name).decode())
    quantise(tmp_path / "m.gguf", tmp_path / "q.gguf", Recipe("q8_0"))
    to_folder(tmp_path / "q.gguf", tmp_path / "q")
    assert json.loads((tmp_path / "q" / "config.json").read_text())["dtype"] == "float32"
    blocks, floats = open_checkpoint(tmp_path / "q.gguf"), open_checkpoint(tmp_path / "q")
    name = "model.layers.3.self_attn.q_proj.weight"
    assert (blocks.tensor(name).format, floats.tensor(name).format) == ("q8_0", "float32")
    np.testing.assert_array_equal(blocks.tensor(name).decode(), floats.tensor(name).decode())
    assert floats.tensor("model.embed_tokens.weight").format == "bfloat16"


def _folder_with_words(path: Path, template: Any = "{{ messages[0].content }}") -> Path:
    folder = make_checkpoint(path, "llama")
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.oracles
def test_the_tokenizer_is_the_first_folders_to_trivium_and_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = _folder_with_words(tmp_path / "hf")
    to_gguf(folder, tmp_path / "m.gguf")
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    mine, back = (Tokenizer.from_data(open_checkpoint(p).tokenizer_data()) for p in (folder, tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert mine.encode(text) == back.encode(text) == theirs(text)["input_ids"]
        assert mine.decode(mine.encode(text)) == back.decode(mine.encode(text))
        assert theirs.decode(mine.encode(text), skip_special_tokens=True) == mine.decode(mine.encode(text))
    assert (mine.bos_id, mine.eos_ids, mine.special_ids) == (back.bos_id, back.eos_ids, back.special_ids)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (mine.bos_id, *mine.eos_ids)
    assert mine.vocab_size == back.vocab_size == len(theirs)
    chat = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == back.render_chat(chat) == "hi"
    known = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (known.bos_token_id, known.eos_token_id) == (mine.bos_id, *mine.eos_ids)


SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab", "<turn>", "[X]",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5, 3, 5],
    "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0, 0.0, -9.0],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.eot_token_id": 264, "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools[0].type }}s",
}  # fmt: skip


@pytest.mark.oracles
def test_pieces_turn_ends_and_named_templates_are_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata() | SENTENCEPIECE, llama_tensors(vocab=272))
    to_folder(file, tmp_path / "out")
    mine, back = (Tokenizer.from_data(open_checkpoint(p).tokenizer_data()) for p in (file, tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("ab a  b", "é<turn>ab", "", " ab"):
        assert mine.encode(text) == back.encode(text) == theirs(text)["input_ids"]
        ids = mine.encode(text)
        assert mine.decode(ids) == back.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.encode("ab") == [1, 263]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 264]
    assert back.vocab_size == mine.vocab_size == 265  # what is unused behind is none
    chat = [{"role": "user", "content": "hi"}]
    for tools in (None, [{"type": "function"}]):
        words = "with functions" if tools else "plain"
        assert back.render_chat(chat, tools=tools) == theirs.apply_chat_template(chat, tools=tools, tokenize=False) == words


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({"rope.dimension_count": 4}, {}, "only a part of each head is rotated"),
        ({}, {"rope_freqs.weight": np.array([1, 2, 8, 3], np.float32)}, "rope_freqs.weight is no scaling of the type llama3"),
        ({}, {"rope_freqs.weight": np.array([8, 8, 8, 8], np.float32)}, "rope_freqs.weight is no scaling of the type llama3"),
        ({}, {"rope_freqs.weight": np.array([1.0457, 7.476, 7.73, 8], np.float32)}, "another model: rope.inv_freq"),
        ({}, {"blk.0.attn_output.bias": np.ones(16, np.float32)}, "has no place for the tensor 'model.layers.0.self_attn.o_"),
        ({}, {f"blk.{i}.attn_{x}.bias": np.ones(n, np.float32) for i in (0, 1) for x, n in (("q", 16), ("k", 8), ("v", 8))},
         "would lack the tensor 'model.layers.0.self_attn.o_proj.bias'"),
    ],
)  # fmt: skip
def test_what_a_folder_can_not_say_is_refused_and_leaves_nothing(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(**keys) | WORDS, llama_tensors() | tensors)
    with pytest.raises(UnsupportedError, match=reason):
        to_folder(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("output", ["out", "out.gguf"])
def test_a_part_of_a_split_model_is_refused_as_that(tmp_path: Path, output: str) -> None:
    keys = {**llama_metadata(), **WORDS, "split.no": 0, "split.count": 2, "split.tensors.count": 30}
    file = write_gguf(tmp_path / "m-00001-of-00002.gguf", "llama", keys, llama_tensors())
    with pytest.raises(UnsupportedError, match="is one part of a split GGUF model; merge the parts"):
        quantise(file, tmp_path / output, Recipe("q8_0" if "gguf" in output else "int8"))
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_an_architecture_that_is_read_only_is_refused_by_name(tmp_path: Path) -> None:
    tensors = llama_tensors()
    for i in (0, 1):
        q, k, v = (tensors.pop(f"blk.{i}.attn_{x}.weight") for x in "qkv")
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate([q, k, v])
        tensors[f"blk.{i}.ffn_up.weight"] = np.concatenate([tensors.pop(f"blk.{i}.ffn_{x}.weight") for x in ("gate", "up")])
    file = write_gguf(tmp_path / "m.gguf", "phi3", llama_metadata("phi3") | WORDS, tensors)
    with pytest.raises(UnsupportedError, match="Phi3ForCausalLM can't become a folder; Gemma3ForCausalLM, LlamaForCausalLM, Qwen2"):
        quantise(file, tmp_path / "out", Recipe("none"))
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("format", ["none", "int8", "int4"])
def test_the_command_writes_a_folder_of_floats_or_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str) -> None:
    file = whole_blocks_gguf(tmp_path / "m.gguf")
    assert main(["quantize", str(file), "-o", str(tmp_path / "out"), "--format", format, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["output"]) == (str(file), str(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (format != "none")
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {p.name for p in (tmp_path / "out").iterdir()}
    file_numbers, numbers = open_checkpoint(file), open_checkpoint(tmp_path / "out")
    for name in ("self_attn.v_proj", "mlp.down_proj"):  # those whose rows are in one order
        want, found = (c.tensor(f"model.layers.1.{name}.weight").decode() for c in (file_numbers, numbers))
        error = np.linalg.norm(found - want) / np.linalg.norm(want)
        assert error == 0 if format == "none" else error < {"int8": 0.01, "int4": 0.12}[format]
    if format == "none":
        ids = [i % 96 for i in IDS[:8]]
        np.testing.assert_allclose(logprobs(tmp_path / "out", ids), logprobs(file, ids), atol=1e-4)


def test_a_run_that_was_stopped_goes_on_with_the_folder_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = whole_blocks_gguf(tmp_path / "m.gguf")
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(work, "finish_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        quantise(file, tmp_path / "out", Recipe("int8"))
    assert (tmp_path / "out.plain").is_dir()
    monkeypatch.setattr(work, "to_folder", lambda *_: pytest.fail("it was there already"))
    assert quantise(file, tmp_path / "out", Recipe("int8"))["resumed_parts"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_folder_of_another_file_is_made_again_and_a_strangers_is_left_alone(tmp_path: Path) -> None:
    file = whole_blocks_gguf(tmp_path / "m.gguf")
    to_folder(write_gguf(tmp_path / "n.gguf", "llama", llama_metadata() | WORDS, llama_tensors()), tmp_path / "out.plain")
    quantise(file, tmp_path / "out", Recipe("none"))
    assert open_checkpoint(tmp_path / "out").config["hidden_size"] == 64
    (tmp_path / "new.plain").mkdir()
    (tmp_path / "new.plain" / "diary.txt").write_text("mine")
    with pytest.raises(InvalidRequestError, match=r"new\.plain is in the way, and is not ours"):
        quantise(file, tmp_path / "new", Recipe("none"))
    assert (tmp_path / "new.plain" / "diary.txt").read_text() == "mine"


def test_a_recipe_that_is_refused_leaves_nothing_of_either_kind(tmp_path: Path) -> None:
    file = whole_blocks_gguf(tmp_path / "m.gguf")
    folder = make_checkpoint(tmp_path / "hf", "llama")
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    for source, output, recipe in ((file, "out", Recipe("q4_0")), (folder, "new.gguf", Recipe("int4", group_size=32))):
        with pytest.raises(InvalidRequestError, match="blocks"):
            quantise(source, tmp_path / output, recipe)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_a_name_in_capitals_is_a_gguf_files_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    quantise(folder, tmp_path / "m.GGUF", Recipe("none"))
    assert (tmp_path / "m.GGUF").read_bytes()[:4] == b"GGUF"
    quantise(tmp_path / "m.GGUF", tmp_path / "back", Recipe("none"))
    quantise(whole_blocks_gguf(tmp_path / "b.gguf"), tmp_path / "b.GGUF", Recipe("q8_0"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert open_checkpoint(tmp_path / "b.GGUF").tensor(name).format == "q8_0"
    np.testing.assert_array_equal(*(open_checkpoint(tmp_path / p).tensor(name).decode() for p in ("hf", "back")))
