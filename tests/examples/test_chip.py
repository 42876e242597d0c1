"""examples/chip: short, installed by pip, judged by the whole kit, and a model runs on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pip_sites import beside, pip_install
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.plugin import HostFallbackWarning

CHIP = Path(__file__).parents[2] / "examples" / "chip"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 2, 77, 31] * 9, [3], [8, 8, 1]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    where = tmp_path_factory.mktemp("chip") / "site"
    pip_install(where, CHIP)
    return where


def test_it_is_under_300_lines():
    assert len((CHIP / "trivium_abacus.py").read_text().splitlines()) < 300


def test_it_passes_everything(site):
    command = [sys.executable, "-m", "trivium.cli", "conformance", "abacus", "--json"]
    done = subprocess.run(command, env=beside(site), capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["failed"] == 0, [row for row in report["rows"] if row["status"] == "failed"]
    passed = {row["name"] for row in report["rows"] if row["status"] == "passed"}
    assert passed >= {
        "paged_attention",
        "abacus_gated_mlp",
        "int8 from float32",
        "one group, float32",
        "arrays overwritten after run()",
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_says_what_the_reference_says(site, family, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(site))
    model = str(make_checkpoint(tmp_path / family, family))
    with pytest.warns(HostFallbackWarning), LLM(model, "abacus", num_kv_blocks=24, progress=False) as llm:
        assert llm.loaded.kv_spec.page_size == 32
        got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    with LLM(model, "reference", num_kv_blocks=24, progress=False) as llm:
        assert got == [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


def test_its_int8_weights_are_chosen_by_name(site, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(site))
    model = str(make_checkpoint(tmp_path / "m", "llama"))
    with pytest.warns(HostFallbackWarning), LLM(model, "abacus", quantize="int8", num_kv_blocks=24, progress=False) as llm:
        assert {route.resident for route in llm.loaded.routes} >= {"int8"}
        assert len(llm.generate(PROMPTS, GREEDY)) == 3
