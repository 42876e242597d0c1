"""`quantize=` on models that do more than multiply: which of their weights it rounds, and what the answers lose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from family_cases import oracle_model
from installed_backends import exact
from tiny_checkpoints import byte_tokenizer
from trivium import LLM, SamplingParams
from trivium.cli.main import main
from trivium.engine.loader import LoadOptions, plan

pytestmark = pytest.mark.oracles

HELD: dict[str, set[str]] = {
    "qwen3-next": {"linear_attn.conv1d", "linear_attn.decay", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate"},
    "qwen3.5": {"linear_attn.conv1d", "linear_attn.decay", "linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "lfm2": {"conv.conv"},
    "granite-hybrid": {"mamba.conv1d", "mamba.dt_proj", "block_sparse_moe.router"},
    "nemotron-h": {"mixer.conv1d", "mixer.dt_proj", "mixer.gate"},
    "falcon-h1": {"mamba.conv1d", "mamba.dt_proj"},
    "deepseek-v3": {"self_attn.k_absorbed", "self_attn.v_absorbed", "mlp.gate"},
    "gemma4": {"layer_scalar"},
    "phi-moe": {"mlp.router"},
}
"""Of a layer's weights that are no vectors, those that are convolved, decay, choose experts, or stand within attention."""
SCORED = ["qwen3-next", "qwen3.5", "lfm2", "granite-hybrid", "nemotron-h", "falcon-h1", "mixtral"]
BUDGET = 0.15
"""Of the length of the logits: what Mixtral, which has experts and no state, loses on models as small and as random as these."""
PROMPTS = [[(37 * i + 5 * n) % 250 for i in range(n)] for n in (29, 61)]
ALL = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)


def make(name: str, folder: Path) -> Path:
    folder /= name
    oracle_model(name, folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


@pytest.mark.parametrize("name", HELD)
def test_only_products_that_decide_nothing_are_rounded(tmp_path: Path, name: str) -> None:
    routes = plan(str(make(name, tmp_path)), "cpu", LoadOptions(quantize="int8")).routes
    matrices = [(c.value.name, exactly) for c, w, _, exactly in routes if len(w.shape) > 1 and c.array is None]
    layers = [(re.fullmatch(r"model\.layers\.\d+\.(.+?)(\.weight|\.bias)?", constant), exactly) for constant, exactly in matrices]
    held = {found[1] for found, exactly in layers if found and exactly}
    rounded = {found[1] for found, exactly in layers if found and not exactly}
    assert held == HELD[name]
    assert rounded and not rounded & held
    assert ("lm_head.weight", False) in matrices


def test_biases_of_experts_are_held_as_they_are_stored(tmp_path: Path) -> None:
    routes = plan(str(make("gpt-oss", tmp_path)), "cpu", LoadOptions(quantize="int8")).routes
    assert {exactly for c, _, _, exactly in routes if c.value.name.endswith("bias")} == {True}
    assert {exactly for c, _, _, exactly in routes if c.value.name.endswith("experts.up_proj.weight")} == {False}


def test_explain_says_which_are_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(make("qwen3.5", tmp_path)), "--backend", "cpu", "--quantize", "int8", "--json"]) == 0
    found = {w["name"]: (w["resident"], w["lossless"]) for w in json.loads(capsys.readouterr().out)["weights"]}
    assert found["model.layers.0.linear_attn.conv1d.weight"] == ("float32", True)
    assert found["model.layers.0.linear_attn.out_proj.weight"] == ("int8", False)


def scores(folder: Path, backend: str, **options: Any) -> npt.NDArray[np.float64]:
    """Logarithms of the next token's probabilities after each prompt, less their mean."""
    with LLM(folder, backend, progress=False, num_kv_blocks=60, **exact(backend), **options) as llm:
        firsts = [output.outputs[0].logprobs[0] for output in llm.generate(PROMPTS, ALL)]
    found = np.array([[first[i].logprob for i in sorted(first)] for first in firsts])
    return found - found.mean(1, keepdims=True)


@pytest.mark.parametrize("name", SCORED)
def test_a_model_in_int8_scores_as_in_float32_within_the_budget(tmp_path: Path, name: str) -> None:
    folder = make(name, tmp_path)
    want = scores(folder, "reference")
    for backend in ("cpu", "torch"):
        lost = np.linalg.norm(scores(folder, backend, quantize="int8") - want) / np.linalg.norm(want)
        assert 1e-4 < lost < BUDGET, f"{backend}: {lost}"
