"""A chip's first day: three kernels, an opaque tensor type, and the whole engine runs."""

from __future__ import annotations

import day_one_chip
import pytest
from fake_plugins import install
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import run_conformance
from trivium.errors import UnsupportedError
from trivium.plugin import HostFallbackWarning

PROMPTS = [[5, 9, 2, 77, 31] * 5, [3], [8, 8, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "dayone", "from day_one_chip import trivium_backend")
    return tmp_path


def answers(model, backend):
    with LLM(str(model), backend, num_kv_blocks=24, max_num_batched_tokens=16, progress=False) as llm:
        return [o.outputs[0].token_ids for p in (GREEDY, DRAWN) for o in llm.generate(PROMPTS, p)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_three_kernels_and_the_host_give_the_reference_s_tokens(site, family):
    model = make_checkpoint(site / family, family)
    with pytest.warns(HostFallbackWarning, match=r"'dayone' runs on the host, slowly: embedding .*paged_attention.*; sample "):
        assert answers(model, "dayone") == answers(model, "reference")


def test_the_kit_passes_it_without_looking_inside_a_tensor(site):
    report = run_conformance("dayone", areas=["operators", "formats", "pages"])
    assert report.ok and report.count("fallback") > 15
    with pytest.raises(TypeError, match="on the device"):
        len(day_one_chip.Slab([1]))


def test_strict_names_what_is_missing(site):
    with pytest.raises(UnsupportedError, match=r"'dayone' has no kernel for embedding .*strict refuses"):
        LLM(str(make_checkpoint(site / "m", "llama")), "dayone", strict=True, num_kv_blocks=24, progress=False)
