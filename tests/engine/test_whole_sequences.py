"""A model that stores nothing between steps: every sequence is whole in one step, whatever fails, waits or comes first."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import engine_of, greedy, prompts_of, run_all
from fake_model import Fault, hidden_of, mix

from trivium.engine import PoolingParams
from trivium.errors import UnsupportedError

KINDS = ("last", "mean", "cls")


def expected(prompt, kind):
    rows = np.array([hidden_of([mix(prompt), i]) for i in range(len(prompt))], np.float64)
    return {"last": rows[-1], "cls": rows[0], "mean": rows.mean(0)}[kind].astype(np.float32)


def engine(**options):
    return engine_of((), **{"pages": 0, "max_num_batched_tokens": 40, **options})


def ask(engine, prompts, kind="mean", **options):
    return [engine.add_request(p, pooling=PoolingParams(kind, normalize=False), **options) for p in prompts]


def check(done, numbers, prompts, kind="mean"):
    for number, prompt in zip(numbers, prompts, strict=True):
        np.testing.assert_allclose(done[number].embedding, expected(prompt, kind), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seqs", [1, 3, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_every_sequence_is_whole_in_its_step_and_nothing_is_reused(kind, seqs, caching):
    prompts = prompts_of(20, 40) + [list(range(3, 43))] * 2
    running = engine(max_num_seqs=seqs, enable_prefix_caching=caching)
    for _ in range(2):
        numbers = ask(running, prompts, kind)
        check(run_all(running), numbers, prompts, kind)
    batches = running.model.executable.batches
    assert all(batch.tokens <= 40 and batch.seqs <= seqs for batch in batches)
    assert sum(batch.tokens for batch in batches) == 2 * sum(map(len, prompts))
    assert seqs < 3 or len(batches) < 2 * len(prompts)
    assert running.stats.cached_tokens == 0


def test_who_does_not_fit_beside_the_others_is_not_overtaken_for_ever():
    running = engine()
    short, long = [[5] * 30] * 3, [[6] * 40]
    numbers = ask(running, short[:1] + long + short[1:])
    run_all(running)
    assert [batch.tokens for batch in running.model.executable.batches] == [30, 40, 30, 30]
    assert len(numbers) == 4


@pytest.mark.parametrize("point", ["run", "tokens"])
def test_a_step_that_fails_is_run_again_one_by_one(point):
    running, prompts = engine(), prompts_of(6, 12)
    failures = iter([True])

    def hook(at, batch):
        if at == point and next(failures, False):
            raise Fault

    running.model.executable.hook = hook
    numbers = ask(running, prompts)
    check(run_all(running), numbers, prompts)
    assert running.stats.failed_steps == 1


def test_a_sequence_that_always_fails_ends_alone():
    running, prompts = engine(), [[4 if token == 3 else token for token in prompt] for prompt in prompts_of(6, 12)]
    poison = [3, *prompts[2]]

    def hook(at, batch):
        if at == "run" and 3 in batch.token_ids:
            raise Fault

    running.model.executable.hook = hook
    numbers, [bad] = ask(running, prompts), ask(running, [poison])
    done = run_all(running)
    check(done, numbers, prompts)
    assert done[bad].error is not None and done[bad].embedding is None


def test_better_priorities_go_first_and_aborted_ones_leave_nothing():
    running, prompts = engine(max_num_seqs=2), prompts_of(8, 30)
    numbers = [ask(running, [p], priority=-i)[0] for i, p in enumerate(prompts)]
    running.abort(numbers[3])
    first = [output.request_id for output in running.step()]
    assert set(first) <= set(numbers[-2:])
    done = run_all(running)
    check(done, numbers[:3], prompts[:3])


def test_no_tokens_are_made():
    running = engine()
    with pytest.raises(UnsupportedError, match="makes no tokens"):
        running.add_request([5, 6], greedy(3))
    assert not running.has_unfinished()
