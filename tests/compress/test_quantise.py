"""trivium quantize end to end on tiny models: what is written, read again by others, gone on with, and bounded."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_checkpoints import make_checkpoint, make_weights, read_safetensors, tiny_config, write_safetensors
from trivium_compress import Calibration, Recipe, quantise
from weight_files import whole_blocks_gguf

from trivium import LLM, SamplingParams
from trivium.cli import main
from trivium.errors import CapacityError, CheckpointError, InvalidRequestError, UnsupportedError
from trivium.text import Tokenizer
from trivium.weights import open_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes are tokens of the tiny models."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 60)]
    path.write_text(" ".join(words[i] for i in rng.zipf(1.4, 900) % 60), "utf-8")
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=3)


def reading(text: Path, windows: int = 12, window: int = 64) -> Calibration:
    return Calibration(text, windows, window)


def logprobs(model: Path, ids: list[int]) -> np.ndarray:
    """Of the tokens of a prompt but the first, by the reference."""
    with LLM(str(model), "reference", progress=False, num_kv_blocks=40) as llm:
        (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0))
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SCHEMES: dict[str, Recipe] = {
    "int4": Recipe(method="rtn"), "int4 symmetric": Recipe(method="rtn", symmetric=True, group_size=16),
    "int8": Recipe("int8", method="rtn"), "int8 in groups": Recipe("int8", method="rtn", group_size=32),
    "int4 and a table of int8": Recipe(embedding="int8", method="rtn"),
    "a table of int4, too": Recipe(embedding="int4", method="rtn"),
    "int8 for some": Recipe(method="rtn", modules=(("down_proj|layers\\.0\\..*v_proj", "int8"), ("v_proj", "none"))),
}  # fmt: skip


@pytest.mark.oracles
@pytest.mark.parametrize("name", SCHEMES)
def test_the_folder_means_to_the_format_s_package_what_it_means_to_us(llama: Path, tmp_path: Path, name: str):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    load_file = pytest.importorskip("safetensors.torch").load_file
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantise(llama, tmp_path / "out", SCHEMES[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(config).config_groups
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for shard in sorted(set(index.values())):
        tensors |= load_file(tmp_path / "out" / shard)
    assert tensors.keys() == index.keys()
    ours, originals, rounded = open_checkpoint(tmp_path / "out"), make_weights(tiny_config("llama", num_hidden_layers=3)), 0
    for tensor, original in originals.items():
        stem = tensor.removesuffix(".weight")
        if f"{stem}.weight_packed" not in tensors:
            np.testing.assert_array_equal(ours.tensor(tensor).decode(), original)
            continue
        scheme = next((s for s in groups.values() if stem in s.targets), groups["group_0"])
        module = {key.removeprefix(f"{stem}."): value for key, value in tensors.items() if key.startswith(f"{stem}.")}
        compressor = BaseCompressor.get_value_from_registry(config["format"])
        theirs = compressor.decompress(module, scheme)["weight"].to(torch.float32).numpy()
        np.testing.assert_allclose(ours.tensor(tensor).decode(), theirs, rtol=1e-6, atol=1e-7, err_msg=tensor)
        assert ((theirs - original) ** 2).mean() < 0.02 * (original**2).mean()
        rounded += 1
    assert rounded == 3 * 7 + 2 * ("table" in name) - 2 * ("some" in name)
    assert ("lm_head" in config["ignore"]) == ("table" not in name)
    if "some" in name:
        assert [sorted({g.weights.num_bits, len(g.targets)}) for g in groups.values()] == [[1, 4], [4, 8]]


@pytest.mark.oracles
def test_transformers_opens_the_folder_and_computes_the_same(llama: Path, tmp_path: Path, text: Path):
    """Without zero points: with them its loader expects other shapes than compressed-tensors, which it uses, writes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    quantise(llama, tmp_path / "out", Recipe(symmetric=True), reading(text))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.tensor([[(37 * i + 11) % 250 for i in range(40)]])
    with torch.inference_mode():
        theirs = torch.log_softmax(model(ids).logits[0, :-1, :259], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs(tmp_path / "out", ids[0].tolist()), theirs, atol=2e-3)


def test_each_method_costs_less_than_rounding_without_a_text(llama: Path, tmp_path: Path, text: Path):
    """In the outputs of projections on the text that was read, and in log probabilities of what follows it there."""
    ids = open_tokenizer(llama).encode(text.read_text("utf-8")[-400:])
    truth, cost = logprobs(llama, ids), {}
    for method, given in ((None, None), ("rtn", text), ("gptq", text), ("awq+gptq", text), ("awq", text)):
        out = tmp_path / f"{method} {given is not None}"
        report = quantise(llama, out, Recipe(method=method), None if given is None else reading(given))
        assert report["method"] == (method or "rtn") and report["unrounded"] == 0 and report["formats"] == {"int4": 21}
        cost[out.name] = report["relative_error"], float(np.abs(logprobs(out, ids) - truth).mean())
    outputs, text_itself = ({name: pair[i] for name, pair in cost.items()} for i in (0, 1))
    assert outputs["gptq True"] < 0.8 * outputs["rtn True"] and outputs["awq True"] <= 1.01 * outputs["rtn True"]
    assert outputs["awq+gptq True"] < 0.8 * outputs["rtn True"]
    assert max(text_itself["gptq True"], text_itself["awq+gptq True"]) < 0.9 * text_itself["None False"], cost


def test_what_lies_beside_the_weights_is_copied(llama: Path, tmp_path: Path):
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "secret.py").write_text("print('not part of the model')")
    quantise(source, tmp_path / "out", Recipe("int8"))
    kept = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in kept)
    assert not (tmp_path / "out" / "secret.py").exists() and not (tmp_path / "out.partial").exists()
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    assert {k: v for k, v in after.items() if k != "quantization_config"} == before
    assert open_checkpoint(tmp_path / "out").tokenizer_data() == open_checkpoint(source).tokenizer_data()


def open_tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_data(open_checkpoint(model).tokenizer_data())


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_run_that_was_stopped_goes_on_and_ends_the_same(llama: Path, tmp_path: Path, text: Path, after: int):
    recipe = Recipe(method="awq+gptq", embedding="int8")
    whole = quantise(llama, tmp_path / "whole", recipe, reading(text))

    def stop(done: int, total: int, what: str) -> None:
        if done == after and total == 4 and ("rounding" in what or "embedding" in what):
            raise Stop

    with pytest.raises(Stop):
        quantise(llama, tmp_path / "out", recipe, reading(text), progress=stop)
    assert not (tmp_path / "out").exists() and len(list((tmp_path / "out.partial").glob("part-*"))) == after
    assert len(list((tmp_path / "out.partial").glob("live-*"))) == (after > 0)
    seen = list[str]()
    report = quantise(llama, tmp_path / "out", recipe, reading(text), progress=lambda done, total, what: seen.append(what))
    assert report["resumed_parts"] == after and not any(f"layer {i}" in what for what in seen for i in range(after))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    same = ("bytes", "formats", "relative_error", "bits_per_weight")
    assert {key: report[key] for key in same} == {key: whole[key] for key in same}


def test_a_gguf_file_is_gone_on_with_too(tmp_path: Path, text: Path):
    source, recipe = whole_blocks_gguf(tmp_path / "in.gguf"), Recipe("q4_k", "q8_0", method="awq+gptq")
    quantise(source, tmp_path / "whole.gguf", recipe, reading(text))

    def stop(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        quantise(source, tmp_path / "out.gguf", recipe, reading(text), progress=stop)
    assert not (tmp_path / "out.gguf").exists()
    assert quantise(source, tmp_path / "out.gguf", recipe, reading(text))["resumed_parts"] == 1
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.fixture
def stopped(llama: Path, tmp_path: Path, text: Path) -> tuple[Path, Path]:
    """A source, and an output of which one layer is done."""
    source = shutil.copytree(llama, tmp_path / "source")

    def stop(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        quantise(source, tmp_path / "out", Recipe(), reading(text), progress=stop)
    return source, tmp_path / "out"


def test_what_was_begun_otherwise_is_not_gone_on_with(stopped: tuple[Path, Path], text: Path):
    source, out = stopped
    with pytest.raises(InvalidRequestError, match="was begun with another recipe"):
        quantise(source, out, Recipe(symmetric=True), reading(text))
    with pytest.raises(InvalidRequestError, match="was begun with another text"):
        quantise(source, out, Recipe(), reading(text, windows=11))
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InvalidRequestError, match=r"was begun with another (source|files)"):
        quantise(source, out, Recipe(), reading(text))


def test_two_runs_do_not_write_the_same_output(llama: Path, tmp_path: Path):
    said = list[str]()

    def meanwhile(done: int, total: int, what: str) -> None:
        if done == 1:
            with pytest.raises(InvalidRequestError, match="another run is at work"):
                quantise(llama, tmp_path / "out", Recipe("int8"))
            said.append(what)

    report = quantise(llama, tmp_path / "out", Recipe("int8"), progress=meanwhile)
    assert said == ["layer 1"] and report["resumed_parts"] == 0


def test_a_damaged_or_foreign_folder_is_refused(stopped: tuple[Path, Path], text: Path, tmp_path: Path):
    source, out = stopped
    partial = out.with_name("out.partial")
    (partial / "part-0.safetensors").rename(partial / "gone")
    with pytest.raises(CheckpointError, match="the part 0 is missing"):
        quantise(source, out, Recipe(), reading(text))
    for damage in ("{", "[]", '{"identity": {}, "done": {"0": {}}}', '{"identity": {}, "done": {"0": 5}}'):
        (partial / "manifest.json").write_text(damage)
        with pytest.raises(CheckpointError, match="is damaged"):
            quantise(source, out, Recipe(), reading(text))
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidRequestError, match="it is not ours"):
        quantise(source, tmp_path / "new", Recipe(), reading(text))
    assert (tmp_path / "new.partial" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_no_more_memory_is_held_than_was_planned(tmp_path: Path, text: Path, method: str):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}
    model = make_checkpoint(tmp_path / "model", "llama", **sizes)
    quantise(model, tmp_path / "warm", Recipe("int8"))  # what is imported is not counted
    tracemalloc.start()
    report = quantise(model, tmp_path / "out", Recipe(method=method), reading(text, windows=6, window=256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < report["memory_bytes"] < 3 * peak + (64 << 20)


def test_a_bound_is_kept_by_reading_less_and_else_refused_with_the_numbers(llama: Path, tmp_path: Path, text: Path):
    roomy = quantise(llama, tmp_path / "a", Recipe(), Calibration(text, None, 64))
    assert roomy["windows"] == 64
    bound = roomy["memory_bytes"] - 40 * 64 * 64 * 4
    tight = quantise(llama, tmp_path / "b", Recipe(), Calibration(text, None, 64), memory_bytes=bound)
    assert 0 < tight["windows"] < 64 and tight["memory_bytes"] <= bound
    with pytest.raises(CapacityError, match=r"\d+ bytes are needed: \d+ for layer \d.*64 windows; \d+ are allowed"):
        quantise(llama, tmp_path / "c", Recipe(), Calibration(text, 64, 64), memory_bytes=bound)
    with pytest.raises(CapacityError, match="1000 are allowed: give a higher bound"):
        quantise(llama, tmp_path / "c", Recipe(), memory_bytes=1000)
    assert not (tmp_path / "c").exists() and not (tmp_path / "c.partial").exists()


@pytest.mark.parametrize("prune", ["magnitude", "wanda"])
@pytest.mark.parametrize("format", ["none", "int4", "int8"])
def test_two_of_four_inputs_stay(llama: Path, tmp_path: Path, text: Path, prune: str, format: str):
    recipe = Recipe(format, prune=prune, sparsity="2:4", method=None if prune == "wanda" else "rtn")
    report = quantise(llama, tmp_path / "out", recipe, reading(text) if prune == "wanda" else None)
    checkpoint = open_checkpoint(tmp_path / "out")
    for name in checkpoint.tensors:
        if "_proj" in name:
            assert ((checkpoint.tensor(name).decode().reshape(-1, 4) != 0).sum(1) <= 2).all()
    assert 0.5 <= report["zeros"] < 0.55
    assert ("quantization_config" in checkpoint.config) == (format != "none")


def test_what_wanda_leaves_serves_better_than_what_magnitude_leaves(llama: Path, tmp_path: Path, text: Path):
    report = {}
    for prune, method in (("magnitude", "rtn"), ("wanda", "rtn"), ("wanda", "gptq")):
        recipe = Recipe("none", prune=prune, sparsity="0.5", method=method)
        report[prune, method] = quantise(llama, tmp_path / f"{prune}-{method}", recipe, reading(text))["relative_error"]
    assert report["wanda", "gptq"] < report["wanda", "rtn"] < report["magnitude", "rtn"]


def test_modules_that_are_to_be_kept_are_kept(llama: Path, tmp_path: Path):
    report = quantise(llama, tmp_path / "out", Recipe(keep=("down_proj", r"layers\.1\.")))
    assert report["unrounded"] == 3 + 6
    config = open_checkpoint(tmp_path / "out").config["quantization_config"]
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "lm_head"} <= set(config["ignore"])
    original = make_weights(tiny_config("llama", num_hidden_layers=3))
    for name in ("model.layers.2.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        np.testing.assert_array_equal(open_checkpoint(tmp_path / "out").tensor(name).decode(), original[name])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"format": "int5"}, "format 'int5' is not one of int8, int4"),
        ({"method": "magic"}, "method 'magic' is not one of rtn"),
        ({"group_size": 12}, "group_size must be a multiple of 8 from 16"),
        ({"group_size": 128}, r"group_size 128 does not divide the inputs of all projections \(\[64, 96\]\); 32 does"),
        ({"format": "int8", "group_size": 40}, "group_size 40 does not divide"),
        ({"prune": "wanda"}, "prune and sparsity go together"),
        ({"prune": "wanda", "sparsity": "2:4"}, "prune wanda looks at the inputs"),
        ({"method": "gptq"}, "method gptq looks at the inputs"),
        ({"format": "none"}, "there is nothing to do"),
        ({"format": "q4_0"}, "blocks are for .gguf files"),
        ({"keep": ("(",)}, "is no regular expression"),
        ({"modules": (("(", "int8"),)}, "modules: .* is no regular expression"),
        ({"modules": (("q_proj", "int3"),)}, "modules 'int3' is not one of"),
        ({"keep": (".",)}, "no projection of this model can be rounded"),
    ],
)
def test_a_recipe_that_can_not_be_followed_is_refused(llama: Path, tmp_path: Path, recipe: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        quantise(llama, tmp_path / "out", Recipe(**recipe))
    assert not list(tmp_path.iterdir())


def test_outputs_and_texts_that_can_not_be_used_are_refused(llama: Path, tmp_path: Path, text: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("short")
    for output, given, message in (
        ("there", None, "exists"), ("out", "none", "can't be read"),
        ("out", "bytes", "is not UTF-8"), ("out", "short", "has fewer than 16 tokens"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=message):
            quantise(llama, tmp_path / output, Recipe(), None if given is None else Calibration(tmp_path / given))
    quantise(llama, tmp_path / "once", Recipe("int8"))
    with pytest.raises(UnsupportedError, match="is quantised by compressed-tensors already"):
        quantise(tmp_path / "once", tmp_path / "twice", Recipe())
    with pytest.raises(InvalidRequestError, match="windows must be 1 or more"):
        quantise(llama, tmp_path / "out", Recipe(), Calibration(text, 3, 4))
    with pytest.raises(InvalidRequestError, match="windows of 513 tokens are longer than the model's 512 positions"):
        quantise(llama, tmp_path / "out", Recipe(), Calibration(text, 3, 513))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe("int8"), Recipe("none", prune="magnitude", sparsity="0.5")])
def test_no_number_is_made_of_what_is_none(llama: Path, tmp_path: Path, value: float, recipe: Recipe):
    source = damaged(llama, tmp_path, "model.layers.1.mlp.down_proj.weight", value)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight has values that are NaN or infinite"):
        quantise(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_a_table_with_nan_is_refused_and_so_is_a_text_on_which_the_model_overflows(llama: Path, tmp_path: Path, text: Path):
    source = damaged(llama, tmp_path / "a", "model.embed_tokens.weight", np.nan)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values that are NaN"):
        quantise(source, tmp_path / "out", Recipe("int8", embedding="int8"))
    source = damaged(llama, tmp_path / "b", "model.layers.0.mlp.up_proj.weight", 3e38)
    for method in ("rtn", "gptq", "awq+gptq"):
        with np.errstate(all="ignore"), pytest.raises(CheckpointError, match="layer 0 reads NaN or infinities on this text"):
            quantise(source, tmp_path / method, Recipe(method=method), reading(text))


def test_values_too_large_for_the_scales_of_a_block_type_are_refused(tmp_path: Path):
    source = whole_blocks_gguf(tmp_path / "in.gguf")
    file = gguf.GGUFReader(source, "r+")
    for tensor in file.tensors:
        if tensor.name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
            tensor.data[3, 5] = 1e9
    file.data.flush()
    for kind in ("q4_1", "q4_k"):
        with np.errstate(all="ignore"), pytest.raises(UnsupportedError, match="too large for the scales"):
            quantise(source, tmp_path / f"{kind}.gguf", Recipe(kind))


def damaged(model: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of the checkpoint with another value in one row."""
    copy = shutil.copytree(model, folder / "source")
    tensors = {key: np.array(array) for key, array in read_safetensors(model / "model.safetensors").items()}
    tensors[name][3] = value
    write_safetensors(copy / "model.safetensors", tensors)
    return copy


BY_BLOCKS = {
    "q4_0": (Recipe("q4_0", "q8_0"), {"Q4_0": 14, "Q8_0": 1, "F32": 6}, 0.12),
    "q4_1 by a text": (Recipe("q4_1", method="awq+gptq"), {"Q4_1": 14, "F32": 7}, 0.12),
    "int4": (Recipe("int4", "int8"), {"Q4_1": 12, "Q4_K": 2, "Q8_0": 1, "F32": 6}, 0.12),
    "int8": (Recipe("int8", "int8"), {"Q8_0": 15, "F32": 6}, 0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_a_gguf_file_becomes_one_that_others_read(tmp_path: Path, text: Path, name: str):
    source, out = whole_blocks_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    recipe, kinds, tolerance = BY_BLOCKS[name]
    report = quantise(source, out, recipe, reading(text) if recipe.method else None)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(out)
    counted = [t.tensor_type.name for t in after.tensors]
    assert {kind: counted.count(kind) for kind in counted} == kinds
    assert report["bytes"] == sum(t.n_bytes for t in after.tensors)
    own = {"general.file_type", "general.quantization_version", "GGUF.kv_count"}
    metadata = [{f.name: f.contents() for f in r.fields.values() if f.name not in own} for r in (before, after)]
    assert metadata[0] == metadata[1]
    originals = {t.name: t.data for t in before.tensors}
    for tensor in after.tensors:
        got, want = gguf.quants.dequantize(tensor.data, tensor.tensor_type), originals[tensor.name]
        if "norm" not in tensor.name and name != "q4_1 by a text":
            assert ((got - want) ** 2).mean() ** 0.5 < tolerance * (want**2).mean() ** 0.5 + 1e-9
    ours = open_checkpoint(out)
    projection = next(t for t in after.tensors if t.name == "blk.0.attn_q.weight")
    expected = gguf.quants.dequantize(projection.data, projection.tensor_type)
    np.testing.assert_array_equal(ours.tensor(Q_PROJ).decode(), expected)
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == ["out.gguf"]


def test_a_gguf_file_that_is_rounded_can_be_rounded_again_and_pruned_where_zeros_stay(tmp_path: Path):
    source = whole_blocks_gguf(tmp_path / "in.gguf")
    quantise(source, tmp_path / "a.gguf", Recipe("q8_0"))
    quantise(tmp_path / "a.gguf", tmp_path / "b.gguf", Recipe("q4_0", prune="magnitude", sparsity="2:4"))
    rows = open_checkpoint(tmp_path / "b.gguf").tensor(Q_PROJ).decode().reshape(-1, 4)
    assert ((rows != 0).sum(1) <= 2).all() and (rows != 0).any()
    with pytest.raises(UnsupportedError, match="zeros don't stay zeros in q4_1"):
        quantise(source, tmp_path / "c.gguf", Recipe("q4_1", prune="magnitude", sparsity="0.5"))
    with pytest.raises(InvalidRequestError, match="can't be written as q8_0 again; give a format"):
        quantise(tmp_path / "a.gguf", tmp_path / "c.gguf", Recipe("none", prune="magnitude", sparsity="0.5"))
    with pytest.raises(InvalidRequestError, match="have their own size"):
        quantise(source, tmp_path / "c.gguf", Recipe(group_size=32))


def test_the_command_says_what_it_did(llama: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--calibrate", str(text), "--windows", "4", "--window", "64", "--memory", "1GiB"]
    assert main(["quantize", str(llama), "-o", str(tmp_path / "a"), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["windows"] == 4 and report["method"] == "gptq" and report["memory_bytes"] < 1 << 30
    size = sum(read_size(path) for path in (tmp_path / "a").glob("*.safetensors"))
    assert report["bytes"] == size
    pruned = ["--format", "none", "--prune", "magnitude", "--sparsity", "0.5"]
    assert main(["quantize", str(llama), "-o", str(tmp_path / "b"), *pruned]) == 0
    told = capsys.readouterr().out
    assert "50.0 %; no backend skips zeros" in told and "21 float" in told
    assert main(["quantize", str(llama), "-o", str(tmp_path / "b")]) == 2
    assert "exists; give another output" in capsys.readouterr().err
    assert main(["quantize", str(llama), "-o", str(tmp_path / "c"), "--memory", "lots"]) == 2
    assert "must be a number of bytes" in capsys.readouterr().err


def read_size(path: Path) -> int:
    """Bytes of tensors in a safetensors file."""
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def test_the_original_stays_as_it_was(llama: Path, tmp_path: Path, text: Path):
    before = contents(llama)
    quantise(llama, tmp_path / "out", Recipe(method="awq+gptq"), reading(text))
    assert contents(llama) == before
    assert read_safetensors(llama / "model.safetensors").keys() == make_weights(tiny_config("llama", num_hidden_layers=3)).keys()
