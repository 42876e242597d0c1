"""A tiny LFM2 (short convolutions and attention) in the whole engine: whatever is found again, forked, drafted, taken back, moved
or computed again, its tokens are those of a plain run, on every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafters import Knowing
from family_cases import oracle_model
from installed_backends import exact
from tiny_checkpoints import byte_tokenizer
from trivium import LLM, SamplingParams
from trivium.engine import Engine, RequestState
from trivium.engine.speculation.drafter import Speculative
from trivium.engine.speculation.model import ModelDrafter

pytestmark = pytest.mark.oracles

BACKENDS = ["reference", "cpu", "torch"]
STEM = [(37 * i + 11) % 250 for i in range(45)]
PROMPTS = [STEM + [7, 9], STEM[:33] + [201, 202, 203, 204], STEM[:33] + [105] * 9, STEM]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
FORKS = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    oracle_model("lfm2", path)
    (path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return path


@pytest.fixture(scope="module", params=BACKENDS)
def case(request: Any, folder: Path) -> tuple[Path, str, dict[int, list[list[int]]]]:
    """The model, a backend, and what follows each prompt alone in an engine that keeps nothing and cuts nothing."""
    with open_llm(folder, request.param, enable_prefix_caching=False) as llm:
        want = {i: ids(llm, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)} | {-1: ids(llm, PROMPTS[0], FORKS)}
        assert llm.engine.stats.cached_tokens == 0
    return folder, request.param, want


def open_llm(folder: Path, backend: str, **options: Any) -> LLM:
    options = {"num_kv_blocks": 200, "block_size": 8 if backend == "reference" else 16, **exact(backend), **options}
    return LLM(folder, backend, progress=False, **options)


def ids(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    return [list(c.token_ids) for c in llm.generate([prompt], params)[0].outputs]


def finish(engine: Engine) -> dict[int, list[list[int]]]:
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = [list(c.token_ids) for c in output.outputs]
        engine.check()
    return done


def test_prefixes_are_found_again_and_change_no_token(case: tuple[Path, str, Any]) -> None:
    folder, backend, want = case
    with open_llm(folder, backend) as llm:
        page, found = llm.loaded.kv_spec.page_size, []
        for i in (0, 1, 2, 3, 0):
            before = llm.engine.stats.cached_tokens
            assert ids(llm, PROMPTS[i], GREEDY) == want[i]
            found.append(llm.engine.stats.cached_tokens - before)
        turn = PROMPTS[0] + want[0][0] + [5, 6, 7]  # the next turn of the first chat
        answer, before = ids(llm, turn, GREEDY), llm.engine.stats.cached_tokens
        assert found[0] == 0 and found[2] == 33 // page * page and found[3] == found[4] == 44 // page * page
        assert ids(llm, turn, GREEDY) == answer and llm.engine.stats.cached_tokens - before == (len(turn) - 1) // page * page
    with open_llm(folder, backend, enable_prefix_caching=False) as llm:
        assert ids(llm, turn, GREEDY) == answer


def test_forks_share_what_was_found_and_draw_their_own_tokens(case: tuple[Path, str, Any]) -> None:
    folder, backend, want = case
    with open_llm(folder, backend) as llm:
        assert ids(llm, PROMPTS[0], FORKS) == want[-1]
        assert ids(llm, PROMPTS[0], FORKS) == want[-1] and llm.engine.stats.cached_tokens > 0


def test_few_pages_preempt_and_what_is_left_of_the_states_is_found(case: tuple[Path, str, Any]) -> None:
    folder, backend, want = case
    options = {"num_kv_blocks": 30 if backend == "reference" else 17, "max_model_len": 80, "max_num_batched_tokens": 24}
    with open_llm(folder, backend, **options) as llm:
        outputs = llm.generate(PROMPTS * 2, GREEDY)
        assert [[list(o.outputs[0].token_ids)] for o in outputs] == [want[i] for i in range(len(PROMPTS))] * 2
        assert llm.engine.stats.preemptions > 0 and llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize("quality", [1.0, 0.6, 0.0])
def test_drafts_that_are_wrong_leave_no_trace(case: tuple[Path, str, Any], quality: float) -> None:
    folder, backend, want = case
    with open_llm(folder, backend) as llm:
        drafter = Knowing([p + want[i][0] for i, p in enumerate(PROMPTS)], quality)
        config = Speculative("ngram", num_speculative_tokens=4, adaptive=False)
        engine = Engine(llm.loaded, llm.tokenizer, llm.engine.config.__class__(speculative=config), drafter=drafter)
        numbers = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        done = finish(engine)
        assert [done[n] for n in numbers] == [want[i] for i in range(len(PROMPTS))]
        accepted, drafted = engine.stats.accepted_tokens, engine.stats.draft_tokens
        assert drafted > 0 and (accepted == drafted if quality == 1.0 else accepted < drafted)


def test_a_hybrid_drafts_for_itself(folder: Path) -> None:
    with open_llm(folder, "reference") as llm, open_llm(folder, "reference") as small:
        want = [ids(llm, prompt, GREEDY) for prompt in PROMPTS]
        config = Speculative("draft", num_speculative_tokens=4, adaptive=False, model="given")
        drafter = ModelDrafter(small.loaded, 4, 64)
        engine = Engine(llm.loaded, llm.tokenizer, llm.engine.config.__class__(speculative=config), drafter=drafter)
        numbers = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        done = finish(engine)
        assert [done[n] for n in numbers] == want
        assert engine.stats.accepted_tokens == engine.stats.draft_tokens > 0
        drafter._kv.check_idle()


def test_states_go_to_the_tiers_and_come_back(case: tuple[Path, str, Any], tmp_path: Path) -> None:
    folder, backend, want = case
    with open_llm(folder, backend, kv_host_bytes=1 << 24, kv_disk_path=tmp_path / "kv") as llm:
        assert ids(llm, PROMPTS[0], GREEDY) == want[0]
    with open_llm(folder, backend, kv_host_bytes=1 << 24, kv_disk_path=tmp_path / "kv") as llm:
        llm.engine.kv.tiers.worth = lambda keys, tokens: tokens > 0  # whatever was measured on a busy machine
        assert ids(llm, PROMPTS[0], GREEDY) == want[0]
        assert llm.engine.stats.restored_disk_tokens > 0 and llm.engine.stats.tier_faults == 0
    with open_llm(folder, backend, kv_host_bytes=1 << 24, num_kv_blocks=16 if backend == "reference" else 10) as llm:
        llm.engine.kv.tiers.worth = lambda keys, tokens: tokens > 0
        other = [(91 * i + 3) % 250 for i in range(49)]
        for prompt in (PROMPTS[0], other, PROMPTS[0]):
            made = ids(llm, prompt, GREEDY)
        assert made == want[0] and llm.engine.stats.restored_host_tokens > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_moves_with_its_states_to_any_backend(case: tuple[Path, str, Any], backend: str) -> None:
    folder, home, want = case
    with open_llm(folder, home) as here, open_llm(folder, backend, block_size=16) as there:
        number = here.engine.add_request(PROMPTS[0], GREEDY)
        for _ in range(9):
            here.engine.step()
        state = RequestState.from_bytes(here.engine.export_request(number).to_bytes())
        number = there.engine.import_request(state)
        assert finish(there.engine)[number] == want[0]
        assert there.engine.stats.computed_tokens < 20  # the prompt was not computed again
        here.engine.kv.check_idle()
