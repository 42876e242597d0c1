"""The engine gives each request the tokens that it would get alone, whatever else runs and however little memory there is."""

from __future__ import annotations

from typing import Any

import pytest
from engine_runs import engine_of, greedy, prompts_of, run_all
from fake_model import EOS, continuation
from trivium.ops.sample import derive_seed

KINDS: dict[str, tuple[Any, ...]] = {
    "full": (None,), "window": (None, 9, 9), "windows only": (5, 12), "recurrent": (None, "recurrent"),
    "state only": ("recurrent",),
}  # fmt: skip


def pages_needed(prompts: list[list[int]], count: int, windows: tuple[Any, ...]) -> int:
    """Pages of 4 tokens that all requests together would take."""
    return sum(1 if w == "recurrent" else (len(p) + count + 3) // 4 for p in prompts for w in windows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [2048, 64, 16])
@pytest.mark.parametrize("share", [1, 4])
def test_32_unequal_requests_together_give_what_each_gives_alone(kind: str, budget: int, share: int) -> None:
    prompts, windows = prompts_of(32, 60), KINDS[kind]
    pages = pages_needed(prompts, 12, windows) // share
    engine = engine_of(windows, pages=pages, max_num_seqs=24, max_num_batched_tokens=budget)
    ids = [engine.add_request(p, greedy(12)) for p in prompts]
    done = run_all(engine)
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 12, windows)
        assert done[number].outputs[0].finish_reason == "length"
    assert engine.stats.generated_tokens == 32 * 12
    assert max(b.tokens for b in engine.model.executable.batches) <= budget
    if (kind, budget, share) == ("full", 2048, 4):
        assert engine.stats.preemptions == sum(done[i].metrics.num_preemptions for i in ids) > 0


def test_end_tokens_end_an_output() -> None:
    engine = engine_of()
    prompts = prompts_of(40, 30)
    ids = [engine.add_request(p, greedy(60, ignore_eos=False)) for p in prompts]
    done = run_all(engine)
    reasons = {done[i].outputs[0].finish_reason for i in ids}
    assert reasons == {"stop", "length"}
    for number, prompt in zip(ids, prompts):
        assert done[number].outputs[0].token_ids == continuation(prompt, 60, (None,), ends=frozenset({EOS}))


@pytest.mark.parametrize("caching", [True, False])
def test_a_second_request_finds_the_pages_of_the_first(caching: bool) -> None:
    engine, prompt = engine_of((None, 6), enable_prefix_caching=caching), prompts_of(1, 60, seed=1)[0] + [5] * 40
    outputs = []
    for tail in ([3], [4], [4]):
        number = engine.add_request(prompt + tail, greedy(9))
        outputs.append(run_all(engine)[number])
        assert outputs[-1].outputs[0].token_ids == continuation(prompt + tail, 9, (None, 6))
    whole = len(prompt) // 4 * 4
    assert [o.metrics.num_cached_tokens for o in outputs] == ([0, whole, whole] if caching else [0, 0, 0])


def test_tenants_share_no_pages() -> None:
    engine, prompt = engine_of(), [7] * 30
    cached = []
    for salt in ("a", "b", "a"):
        number = engine.add_request(prompt, greedy(2), cache_salt=salt)
        cached.append(run_all(engine)[number].metrics.num_cached_tokens)
    assert cached == [0, 0, 28]


@pytest.mark.parametrize("caching", [True, False])
def test_n_outputs_compute_the_prompt_once_and_differ_by_seed(caching: bool) -> None:
    engine, prompt = engine_of((None, 6), enable_prefix_caching=caching), prompts_of(1, 60, seed=2)[0] + [9] * 40
    params = greedy(10, n=4, temperature=1.0, seed=5)
    number = engine.add_request(prompt, params)
    output = run_all(engine)[number]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for c in output.outputs:
        assert c.token_ids == continuation(prompt, 10, (None, 6), temperature=1.0, seed=derive_seed(5, c.index))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert engine.stats.computed_tokens <= len(prompt) + 4 * 9 + 3 * 4
    assert output.metrics.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["full", "windows only"])
def test_without_prefix_caching_later_requests_use_the_pages_of_earlier_ones(kind: str) -> None:
    """So the memory that is ever touched is what runs at a time takes, not the whole pool."""
    engine = engine_of(KINDS[kind], pages=400, enable_prefix_caching=False)
    touched: list[set[int]] = []
    for seed in range(3):
        for prompt in prompts_of(4, 60, seed=7):
            engine.add_request(prompt, greedy(12), cache_salt=str(seed))
        run_all(engine)
        batches = engine.model.executable.batches
        touched.append({int(page) for b in batches for page in b.block_tables.ravel() if page >= 0})
    assert touched[0] == touched[1] == touched[2]
    assert len(touched[0]) < 100
