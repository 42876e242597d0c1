"""Tiny random models of families outside the core in the whole engine: transformers' greedy tokens, whatever the company, the
pages, the backend, and where a request is moved in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_cases import oracle_model
from installed_backends import exact
from tiny_checkpoints import byte_tokenizer
from trivium import LLM, SamplingParams

pytestmark = pytest.mark.oracles

NAMES = [
    "mixtral-window", "deepseek-v3", "gpt-oss", "olmo3", "cohere2", "lfm2", "qwen3-next", "llama4", "granite-hybrid", "gemma4",
    "gemma3n", "deepseek-v3.2-sparse",
]  # fmt: skip
PROMPTS = [[(37 * i + 5 * n) % 250 for i in range(n)] for n in (29, 3, 61, 16, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=NAMES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint and transformers' greedy continuation of every prompt."""
    import torch

    folder = tmp_path_factory.mktemp("family") / request.param
    model = oracle_model(request.param, folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    model.generation_config.eos_token_id = None
    want = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
        want.append(made[0, len(prompt) :].tolist())
    return folder, want


def ids(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_greedy_tokens_are_the_oracle_s_in_any_company(case: tuple[Path, list[list[int]]], backend: str) -> None:
    folder, want = case
    with LLM(folder, backend, progress=False, num_kv_blocks=200, strict=backend == "cpu", **exact(backend)) as llm:
        assert ids(llm, PROMPTS) == want
        assert [ids(llm, [prompt])[0] for prompt in PROMPTS[2:]] == want[2:]  # alone, and with what was kept of the first time


@pytest.mark.parametrize("way", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_give_the_oracle_s_tokens(case: tuple[Path, list[list[int]]], way: str) -> None:
    folder, want = case
    options = {**exact("torch"), "backend_options": {way: 2}}
    with LLM(folder, "torch:cpu", progress=False, num_kv_blocks=200, **options) as llm:
        assert ids(llm, PROMPTS) == want


def test_few_pages_and_small_chunks_change_no_token(case: tuple[Path, list[list[int]]]) -> None:
    folder, want = case
    pages = {"qwen3-next": 22, "granite-hybrid": 22, "deepseek-v3.2-sparse": 33}.get(folder.name, 17)  # of more groups, more
    settings = {"num_kv_blocks": pages, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    with LLM(folder, "reference", progress=False, block_size=8, max_model_len=80, **settings) as llm:
        assert ids(llm, PROMPTS * 2) == want * 2
        windowed = any(group.spec.window is not None for group in llm.loaded.kv_spec.groups)
        assert llm.engine.stats.preemptions > 0 or windowed  # who lets pages go as it runs meets no shortage


@pytest.mark.parametrize(("ahead", "backend"), [("cpu", "reference"), ("reference", "cpu")])
def test_a_request_that_changes_backends_goes_on_as_it_would_have(
    case: tuple[Path, list[list[int]]], ahead: str, backend: str
) -> None:
    folder, want = case
    more = {"prefill": ahead, "prefill_options": exact(ahead)}
    with LLM(folder, backend, progress=False, num_kv_blocks=200, **exact(backend), **more) as llm:
        assert ids(llm, PROMPTS) == want


def test_a_model_whose_layers_share_what_one_chose_has_kernels_on_the_cpu_and_gives_the_oracle_s_tokens(tmp_path: Path) -> None:
    """Contexts longer than what a token reads. In the longest prompt's, positions that are worth nothing tie for the last place,
    of which the operator takes the first and the oracle any: there the reference is asked."""
    pytest.importorskip("trivium_cpu._native")
    import torch

    model = oracle_model("glm-dsa", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    model.generation_config.eos_token_id = None
    want = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    with LLM(tmp_path, "reference", progress=False, num_kv_blocks=200) as llm:
        want[2] = ids(llm, PROMPTS[2:3])[0]
    options = {**exact("cpu"), "strict": True, "num_kv_blocks": 200, "backend_options": {"threads": 2}}
    with LLM(tmp_path, "cpu", progress=False, max_num_batched_tokens=40, **options) as llm:
        assert [call.name for call in llm.loaded.program.calls].count("top_positions") == 2
        assert ids(llm, PROMPTS) == want
