"""The tokens and log probabilities of a request depend on nothing but the request: not on who else is there, when it came, how its
prompt is cut, how pages are laid out or lost and found again, nor on threads. To the last bit, on both backends."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_checkpoint
from trivium import LLM, SamplingParams
from trivium.engine import RequestOutput

FAMILIES = ["llama", "gemma3"]
RUNS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "cpu-float32": {"backend": "cpu", "dtype": "float32", "kv_dtype": "float32"},
    "cpu-bfloat16": {"backend": "cpu", "dtype": "bfloat16"},
    "cpu-int8": {"backend": "cpu", "quantize": "int8"},
    "cpu-int4": {"backend": "cpu", "quantize": "int4"},
}
SETTINGS: list[dict[str, Any]] = [
    {}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 16, "block_size": 64}, {"block_size": 32},
    {"max_num_seqs": 2}, {"num_kv_blocks": 14, "block_size": 16, "max_model_len": 64}, {"enable_prefix_caching": False},
]  # fmt: skip
PROMPT = [(37 * i) % 250 for i in range(29)]
ASKED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, logprobs=3, prompt_logprobs=1, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=6, beam_width=3, n=3, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 16, hidden sizes that every format takes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return make_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param, seed=5, **sizes)


def news(output: RequestOutput) -> list[Any]:
    """Everything that must not change."""
    return [output.prompt_logprobs, *((c.token_ids, c.text, c.logprobs, c.cumulative_logprob) for c in output.outputs)]


def opened(folder: Path, run: str, **settings: Any) -> LLM:
    return LLM(folder, **RUNS[run], **{"max_model_len": 128, "num_kv_blocks": 400, "progress": False, **settings})


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Any]]:
    """By run: what the request and a beam search get alone."""
    found = {}
    for run in RUNS:
        with opened(folder, run) as llm:
            found[run] = [news(llm.generate([PROMPT], asked)[0]) for asked in (ASKED, BEAMS)]
    return found


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_company_order_chunks_pages_seats_and_preemption(folder: Path, run: str, settings: dict[str, Any], alone: Any) -> None:
    rng = random.Random(str(settings))
    with opened(folder, run, **settings) as llm:
        for _ in range(2):  # the second time, prefixes are found
            others = [([rng.randrange(250) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 9)) for _ in range(5)]
            requests = [(PROMPT, ASKED), (PROMPT, BEAMS), (PROMPT[:17], SamplingParams(max_tokens=3, n=2))]
            requests += [(p, SamplingParams(max_tokens=count, temperature=1.0, ignore_eos=True)) for p, count in others]
            rng.shuffle(requests)
            outputs = llm.generate([p for p, _ in requests], [s for _, s in requests])
            assert news(outputs[requests.index((PROMPT, ASKED))]) == alone[run][0]
            assert news(outputs[requests.index((PROMPT, BEAMS))]) == alone[run][1]
        assert "num_kv_blocks" not in settings or llm.engine.stats.preemptions


@pytest.mark.parametrize("run", RUNS)
def test_the_first_of_n_and_a_prompt_whose_start_another_left(folder: Path, run: str, alone: Any) -> None:
    with opened(folder, run, block_size=16) as llm:
        llm.generate([PROMPT[:22]], SamplingParams(max_tokens=2))
        for n in (1, 3):
            output = llm.generate([PROMPT], dataclasses.replace(ASKED, n=n, prompt_logprobs=None))[0]
            assert news(output)[1] == alone[run][0][1]
        assert output.metrics is not None and output.metrics.num_cached_tokens == 16


@pytest.mark.parametrize("run", [run for run in RUNS if run != "reference"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(folder: Path, run: str, threads: int, alone: Any) -> None:
    with opened(folder, run, threads=threads) as llm:
        outputs = llm.generate([PROMPT, PROMPT[:9], PROMPT], [ASKED, SamplingParams(max_tokens=4), BEAMS])
        assert [news(outputs[0]), news(outputs[2])] == alone[run]
