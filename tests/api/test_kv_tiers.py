"""Tiers and moving requests through LLM and AsyncLLM, with real arithmetic on both backends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_checkpoint
from trivium import LLM, AsyncLLM, SamplingParams
from trivium.engine import RequestState

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
PREFIX = [3 + i * 7 % 250 for i in range(70)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    make_checkpoint(path, request.param)
    return path


def open_llm(folder: Path, backend: str, **options: Any) -> LLM:
    llm = LLM(folder, backend, progress=False, block_size=16, num_kv_blocks=28, max_model_len=128, max_num_seqs=4, **options)
    if llm.engine.kv.tiers is not None:
        llm.engine.kv.tiers.prefill.seconds = lambda tokens: 1e9  # type: ignore[method-assign]
    return llm


def answers(llm: LLM) -> tuple[list[Any], int]:
    """What a few prompts give, one after another, and how many tokens came back from tiers."""
    prompts = [[*PREFIX, 9], *[[i + j % 90 for j in range(75)] for i in range(3, 8)], [*PREFIX, 11]]
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    llm.engine.check()
    restored = [o.metrics.num_restored_host_tokens + o.metrics.num_restored_disk_tokens for o in outputs if o.metrics]
    return [o.outputs[0].token_ids for o in outputs], sum(restored)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tiers_and_a_restart_change_no_token(backend: str, folder: Path, tmp_path: Path) -> None:
    with open_llm(folder, backend) as llm:
        want, restored = answers(llm)
        assert restored == 0
    with open_llm(folder, backend, kv_host_bytes=1 << 30) as llm:
        got, restored = answers(llm)
        assert got == want and restored > 0
    for first in (True, False):
        with open_llm(folder, backend, kv_disk_path=tmp_path) as llm:
            output = llm.generate([[*PREFIX, 9]], GREEDY)[0]
            assert output.metrics is not None
            assert (output.metrics.num_restored_disk_tokens == 0) is first, "what the first run left, the second finds"
            got, restored = answers(llm)
            assert got == want and restored > 0 and llm.engine.stats.tier_faults == 0


def test_another_backend_leaves_the_pages_alone(folder: Path, tmp_path: Path) -> None:
    for backend, finds in (("reference", False), ("cpu", False), ("reference", True)):
        with open_llm(folder, backend, kv_disk_path=tmp_path, kv_dtype="float32") as llm:
            output = llm.generate([[*PREFIX, 9]], GREEDY)[0]
            assert output.metrics is not None
            assert (output.metrics.num_restored_disk_tokens > 0) is finds


def test_a_grammar_moves_with_its_request(folder: Path) -> None:
    wanted = SamplingParams(temperature=2.0, max_tokens=40, seed=5, structured_outputs={"regex": "[a-e]{12}"})
    with open_llm(folder, "reference") as first, open_llm(folder, "cpu") as second:
        whole = first.generate(["ab"], wanted)[0].outputs[0]
        number = first.engine.add_request(first.encode("ab"), wanted)
        for _ in range(5):
            first.engine.step()
        state = RequestState.from_bytes(first.engine.export_request(number).to_bytes())
        second.engine.import_request(state)
        outputs = []
        while second.engine.has_unfinished():
            outputs += second.engine.step()
        assert outputs[0].outputs[0].text == whole.text and len(whole.text) == 12
        json.dumps(dict(state.header))


def test_async_engines_hand_over_between_steps(folder: Path) -> None:
    async def move() -> tuple[list[int], list[int]]:
        options: dict[str, Any] = {"progress": False, "num_kv_blocks": 100}
        async with AsyncLLM(folder, "cpu", **options) as first, AsyncLLM(folder, "cpu", **options) as second:
            whole = (await first.generate([PREFIX], GREEDY))[0].outputs[0].token_ids
            state = await first.async_engine.call(_begun)
            return whole, await second.async_engine.call(lambda engine: _continued(engine, state))

    whole, found = asyncio.run(move())
    assert found == whole[: len(found)]


def _begun(engine: Any) -> Any:
    """A request taken out behind its first steps, before another one can end it."""
    number = engine.add_request(PREFIX, GREEDY)
    for _ in range(3):
        engine.step()
    return engine.export_request(number)


def _continued(engine: Any, state: Any) -> list[int]:
    """What the request has once a step has given it a token, before another one can end it."""
    completion = engine._requests[engine.import_request(state)].completions[0]
    before = len(completion.token_ids)
    while len(completion.token_ids) == before:
        engine.step()
    return list(completion.token_ids)
