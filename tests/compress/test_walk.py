"""Layer by layer: what projections read is what they read in transformers, and factors on inputs change no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CASES as FAMILIES, open_case
from model_cases import CASES, oracle_model
from tiny_checkpoints import make_checkpoint, write_safetensors
from trivium_compress import Calibration, Recipe, quantise
from trivium_compress.layer import Layer, Target
from trivium_compress.source import open_source
from trivium_compress.stored import BLOCKS
from trivium_compress.structure import projections, scalings
from trivium_compress.walk import Inputs, Walk

from trivium import LLM, SamplingParams
from trivium.weights import open_checkpoint

WINDOWS = [np.array([(i * i * 7 + i * 31 + n) % 250 for i in range(n)], np.int32) for n in (23, 9, 31)]


def observed(folder: Path) -> dict[str, Inputs]:
    """By projection, through the original weights."""
    source = open_source(folder)
    known, walk = projections(source.program), Walk(source.program, 31)
    live, found = walk.start(WINDOWS), {}
    for segment in walk.segments:
        read = {p.input for p in known.values() if p.layer == segment.layer}
        taps = {value: Inputs.of(int(value.shape[-1]), whole=True) for value in read}
        walk.observe(segment, live, source.load, taps)
        walk.advance(segment, live, source.load)
        found |= {name: taps[p.input] for name, p in known.items() if p.layer == segment.layer}
    return found


def read_by(model: Any) -> dict[str, np.ndarray]:
    """The sum of x xᵀ that each linear module of transformers' model reads."""
    torch = pytest.importorskip("torch")
    found: dict[str, np.ndarray] = {}

    def hook(name: str) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            x = args[0].detach().double().reshape(-1, args[0].shape[-1]).numpy()
            found[name] = found.get(name, 0) + x.T @ x

        return keep

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook(f"{name}.weight"))
    with torch.inference_mode():
        for window in WINDOWS:
            model(torch.tensor(window[None], dtype=torch.int64))
    return found


def check(folder: Path, model: Any) -> int:
    ours, theirs = observed(folder), read_by(model)
    for name, inputs in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(inputs.moments, theirs[name], atol=2e-4 * scale, rtol=1e-3, err_msg=name)
        assert inputs.count == sum(map(len, WINDOWS))
    return len(ours)


@pytest.mark.oracles
@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen3", "gemma2", "gemma3", "phi3"])
def test_what_projections_read_is_what_they_read_in_transformers(name: str, tmp_path: Path):
    assert name in CASES
    model = oracle_model(name, tmp_path / "hub")
    model.save_pretrained(tmp_path / "saved")
    layers = model.config.num_hidden_layers
    assert check(tmp_path / "saved", model) == layers * (4 if name == "phi3" else 7)


@pytest.mark.oracles
@pytest.mark.parametrize("name", ["mixtral", "glm4-moe", "deepseek-v3", "gpt-oss", "lfm2", "cohere2", "olmo2"])
def test_families_of_plugins_are_read_the_same(name: str, tmp_path: Path):
    assert name in FAMILIES
    model, _ = open_case(name, tmp_path)
    assert check(tmp_path, model) >= 2 * model.config.num_hidden_layers


def logits(model: Path) -> np.ndarray:
    """Top log probabilities of a prompt's tokens, by the reference."""
    with LLM(str(model), "reference", progress=False, num_kv_blocks=20) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=20)
        (output,) = llm.generate([WINDOWS[2].tolist()], params)
    return np.array([[entry[i].logprob for i in sorted(entry)][:20] for entry in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
def test_factors_on_inputs_change_no_output(family: str, tmp_path: Path):
    folder = make_checkpoint(tmp_path / "plain", family)
    source = open_source(folder)
    known = projections(source.program)
    found = scalings(source.program, known)
    assert len(found) == 3 * int(source.checkpoint.config["num_hidden_layers"])  # two norms and a gate in each layer
    rng = np.random.default_rng(3)
    numbers = {name: source.checkpoint.tensor(name).decode() for name in source.checkpoint.tensors}
    for scaling in found:
        width = int(scaling.input.shape[-1])
        inputs = Inputs.of(width, whole=True)
        inputs.add((rng.standard_normal((100, width)) * np.exp(2 * rng.standard_normal(width))).astype(np.float32))
        targets = {name: Target(name, BLOCKS["q4_0"].grid) for name in known}
        layer = Layer(source, Recipe(), targets, known, {scaling.input: inputs})
        layer.numbers = {name: array.copy() for name, array in numbers.items()}
        layer.scale(scaling)
        changed = [name for name, array in layer.numbers.items() if not np.array_equal(array, numbers[name])]
        assert {*scaling.sources} < {*changed}
        numbers = layer.numbers
    other = make_checkpoint(tmp_path / "scaled", family)
    write_safetensors(other / "model.safetensors", numbers)
    np.testing.assert_allclose(logits(other), logits(folder), atol=2e-4)


@pytest.mark.oracles
def test_experts_are_rounded_too_and_the_router_is_not(tmp_path: Path):
    _, checkpoint = open_case("qwen3-moe", tmp_path / "model")
    text = tmp_path / "text.txt"
    from tiny_checkpoints import byte_tokenizer

    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    text.write_text("to be or not to be, that is the question; whether 'tis nobler in the mind to suffer " * 20)
    recipe = Recipe(group_size=24)
    report = quantise(tmp_path / "model", tmp_path / "out", Recipe("int8"), Calibration(text, 4, 32))
    experts = [name for name in checkpoint.tensors if ".experts." in name]
    assert experts and report["formats"] == {"int8": len(experts) + 4 * 3}
    out = open_checkpoint(tmp_path / "out")
    for name in checkpoint.tensors:
        before, after = checkpoint.tensor(name).decode(), out.tensor(name).decode()
        same = np.array_equal(before, after)
        assert same == ((name not in experts and "self_attn" not in name) or "norm" in name), name
        assert np.abs(after - before).max() < 0.05 * np.abs(before).max()
    assert any(module.endswith("mlp.gate") for module in out.config["quantization_config"]["ignore"])
    assert recipe.group_for({48, 72}) == 24
