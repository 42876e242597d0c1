"""Tiny models through the whole engine on OpenVINO: the reference's tokens, whatever the schedule and wherever the pages were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino")

from peft_adapters import make_adapter
from tiny_checkpoints import make_checkpoint
from trivium import LLM, SamplingParams
from trivium.engine import RequestState
from trivium.plugin import HostFallbackWarning, find_plugins

if "openvino" not in find_plugins():
    pytest.skip("trivium-openvino is not installed", allow_module_level=True)

EXACT: dict[str, Any] = {
    "dtype": "float32", "kv_dtype": "float32", "block_size": 32, "max_model_len": 256, "max_num_seqs": 8, "progress": False,
}  # fmt: skip
PROMPTS = [[(7 * i + j * j) % 250 for j in range(n)] for i, n in enumerate((1, 5, 33, 70))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=20, ignore_eos=True, logprobs=2),
]


def ids_of(llm: LLM, prompts: Any = PROMPTS) -> list[list[int]]:
    return [out.outputs[0].token_ids for params in PARAMS for out in llm.generate(prompts, [params] * len(prompts))]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "phi3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[int]]]]:
    """A checkpoint and what the reference makes of it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)
    with LLM(folder, backend="reference", **EXACT) as llm:
        yield folder, ids_of(llm)


@pytest.mark.parametrize(
    "schedule",
    [{}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 12}, {"enable_prefix_caching": False}],
    ids=["together", "chunked", "preempted", "uncached"],
)
def test_the_tokens_are_the_references_under_every_schedule(family: Any, schedule: dict[str, Any]) -> None:
    folder, want = family
    with LLM(folder, backend="openvino", **{**EXACT, **schedule}) as llm:
        assert ids_of(llm) == want
        assert ids_of(llm) == want  # once more, out of the prefix cache


@pytest.mark.parametrize("kv_dtype", ["u8", "float16"])
def test_a_prefix_that_is_found_again_gives_the_same_tokens_with_small_pages_too(tmp_path: Path, kv_dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    with LLM(folder, backend="openvino", **{**EXACT, "kv_dtype": kv_dtype}) as llm:
        first = ids_of(llm)
        assert ids_of(llm) == first
        assert llm.engine.stats.cached_tokens > 0


def test_a_whole_program_is_one_model(tmp_path: Path) -> None:
    with LLM(make_checkpoint(tmp_path / "m", "llama"), backend="openvino", strict=True, **EXACT) as llm:
        assert llm.engine.model.executable.models == 1  # type: ignore[attr-defined]


def test_soft_capped_attention_runs_on_the_host_and_says_so(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "gemma2")
    with LLM(folder, backend="reference", **EXACT) as llm:
        want = ids_of(llm)
    with pytest.warns(HostFallbackWarning, match="soft cap"):
        llm = LLM(folder, backend="openvino", **EXACT)
    with llm:
        assert ids_of(llm) == want


@pytest.mark.parametrize("other", ["reference", "cpu"])
def test_requests_move_between_openvino_and_another_backend(tmp_path: Path, other: str) -> None:
    if other not in find_plugins():
        pytest.skip(f"no backend {other}")
    folder = make_checkpoint(tmp_path / "m", "llama")
    with LLM(folder, backend="openvino", **EXACT) as ours, LLM(folder, backend=other, **EXACT) as theirs:
        want = ids_of(theirs)
        for first, second in ((ours, theirs), (theirs, ours)):
            assert [moved(first, second, p, params) for params in PARAMS for p in PROMPTS] == want


def moved(first: LLM, second: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of a request that changes engines, with its pages, after its first few steps."""
    number = first.engine.add_request(prompt, params)
    for _ in range(4):
        first.engine.step()
    state = RequestState.from_bytes(first.engine.export_request(number).to_bytes())
    there, done = second.engine.import_request(state), None
    while second.engine.has_unfinished():
        done = next((out for out in second.engine.step() if out.request_id == there and out.finished), done)
    assert done is not None
    return list(done.outputs[0].token_ids)


def test_adapters_change_what_they_should_and_nothing_else(tmp_path: Path) -> None:
    folder, adapter = make_checkpoint(tmp_path / "m", "llama"), make_adapter(tmp_path / "a", "llama")
    found = []
    for backend in ("reference", "openvino"):
        with LLM(folder, backend=backend, enable_lora=True, max_loras=2, **EXACT) as llm:
            plain = ids_of(llm)
            llm.load_adapter("a", adapter)
            out = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS[0], adapter=[None, "a", "a", None])]
            found.append((plain, out))
            assert out[0] == plain[0] and out[3] == plain[3] and out[2] != plain[2]
    assert found[0] == found[1]


def test_embeddings_and_logprobs_are_the_references_within_rounding(tmp_path: Path) -> None:
    folder, found = make_checkpoint(tmp_path / "m", "llama"), []
    for backend in ("reference", "openvino"):
        with LLM(folder, backend=backend, **EXACT) as llm:
            vectors = np.array([out.embedding for out in llm.embed(PROMPTS)])
            scored = llm.generate(PROMPTS[2], PARAMS[1])[0].outputs[0]
            found.append((vectors, [next(iter(t.values())).logprob for t in scored.logprobs or []]))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-4)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-4)
