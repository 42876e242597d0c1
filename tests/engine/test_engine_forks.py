"""n samples of one prompt: the prompt is computed once, whatever the cache settings and the kind of model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_runs import engine_of, greedy, prompts_of, run_all
from fake_model import Fault, continuation
from trivium.ops import Batch
from trivium.ops.sample import derive_seed

KINDS: list[tuple[Any, ...]] = [(None,), (None, 7), (5,), (None, "recurrent"), ("recurrent",)]


def check(output: Any, prompt: list[int], count: int, windows: tuple[Any, ...]) -> None:
    for c in output.outputs:
        assert c.token_ids == continuation(prompt, count, windows, temperature=1.0, seed=derive_seed(5, c.index))


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 30, 33])
def test_the_prompt_of_n_samples_is_computed_once(windows: tuple[Any, ...], caching: bool, length: int) -> None:
    engine = engine_of(windows, enable_prefix_caching=caching, max_num_batched_tokens=16)
    prompt = [3 + i % 80 for i in range(length)]
    number = engine.add_request(prompt, greedy(10, n=5, temperature=1.0, seed=5))
    check(run_all(engine)[number], prompt, 10, windows)
    assert engine.stats.computed_tokens == length - 1 + 5 * 10
    if length > 1 and (length - 1) % 4:
        batches = engine.model.executable.batches
        starts = [start for b in batches for start in (b.context_lens - np.diff(b.query_starts)).tolist()]
        kept = sum(start % 4 == 0 < start for start in starts) * windows.count("recurrent")  # states at page edges
        assert engine.model.executable.copied == 4 * len(windows) + kept


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize(("pages", "seqs"), [(400, 2), (36, 6), (30, 16)])
def test_samples_that_find_no_seat_or_no_pages_wait_and_lose_nothing(windows: tuple[Any, ...], pages: int, seqs: int) -> None:
    engine = engine_of(windows, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=24)
    prompts = prompts_of(4, 22)
    ids = [engine.add_request(p, greedy(12, n=6, temperature=1.0, seed=5)) for p in prompts]
    done = run_all(engine)
    for number, prompt in zip(ids, prompts):
        check(done[number], prompt, 12, windows)


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("point", ["copy", "run", "tokens"])
def test_a_step_with_copies_that_fails_is_undone(windows: tuple[Any, ...], point: str) -> None:
    engine, prompt, left = engine_of(windows), [7] * 10, [1]

    def hook(at: str, batch: Batch | None) -> None:
        if at == point and engine.model.executable.copied + (at == "copy") and left:
            left.pop()
            raise Fault("once")

    engine.model.executable.hook = hook
    number = engine.add_request(prompt, greedy(10, n=3, temperature=1.0, seed=5))
    check(run_all(engine)[number], prompt, 10, windows)
    assert engine.stats.failed_steps == 1


def test_whoever_waited_before_goes_before_a_fork() -> None:
    """A fork takes no seat from a request that is before it in the order."""
    engine = engine_of(max_num_seqs=2)
    family = engine.add_request([5] * 9, greedy(4, n=3))
    engine.add_request([6] * 9, greedy(4), priority=-1)
    engine.add_request([7] * 9, greedy(4), priority=-1)
    for _ in range(3):
        engine.step()
        assert {s.order[0] for s in engine.scheduler.running} == {-1}
    assert run_all(engine)[family].outputs[2].token_ids == continuation([5] * 9, 4, (None,))


def test_prompt_logprobs_come_with_n_samples() -> None:
    engine = engine_of()
    a, b = (engine.add_request([5, 6, 7, 8, 9, 10], greedy(3, n=n, prompt_logprobs=2)) for n in (1, 3))
    done = run_all(engine)
    assert done[a].prompt_logprobs == done[b].prompt_logprobs and len(done[b].prompt_logprobs or ()) == 6


def test_an_aborted_family_frees_everything() -> None:
    engine = engine_of((None, "recurrent"))
    number = engine.add_request([5] * 9, greedy(9, n=4))
    for _ in range(3):
        engine.step()
    engine.abort(number)
    engine.check()
    engine.kv.check_idle()
