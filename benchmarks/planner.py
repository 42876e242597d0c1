"""The host's time to plan one step with many sequences running and many more waiting, and to carry such a plan out.

`running` sequences decode and leave no seat, `waiting` ones queue up behind them; then one seat and some pages are free, so that
the head of the queue is matched with the prefix cache and admitted. Prints JSON: medians and minima of microseconds of processor
time, for the plan alone (full: nobody can be admitted; admitting: one can), and for reserving pages, building the Batch and
committing a step of `running` decodes.

    python benchmarks/planner.py [--running 256] [--waiting 2000] [--repeat 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trivium.kv import KVCache, root_key
from trivium.sampling import build_inputs
from trivium.sched import Scheduler, Sequence, make_batch, sampled_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from fake_model import spec_of

PAGE, PROMPT, SHARED = 16, 256, 128


def scheduler_of(running: int, waiting: int, seats: int) -> Scheduler:
    """All prompts begin with the same SHARED tokens; every running sequence has its prompt computed and one token more to go."""
    pages = (running + seats + 1) * (PROMPT // PAGE + 40)
    scheduler = Scheduler(KVCache(spec_of((None,), PAGE), pages, running + seats), running + seats, 2048)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 9999, SHARED).tolist()
    for number in range(running + waiting):
        prompt = shared + rng.integers(0, 9999, PROMPT - SHARED).tolist()
        scheduler.add(Sequence(prompt, root_key("benchmark"), (0, number, 0)))
        while number < running and scheduler.waiting:
            step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    """One step without a device."""
    plan = scheduler.plan()
    scheduler.reserve(plan)
    commit(scheduler, plan.entries)


def commit(scheduler: Scheduler, entries: list) -> None:
    """What settling does to the scheduler's state."""
    for entry in entries:
        if entry.start + entry.tokens == entry.seq.length:
            entry.seq.append(7)
        scheduler.kv.advance(entry.seq, entry.tokens)


def timed(times: list[float], work: Callable[[], object]) -> object:
    began = time.thread_time()
    result = work()
    times.append((time.thread_time() - began) * 1e6)
    return result


def summary(times: list[float]) -> dict[str, float]:
    return {"median_us": round(statistics.median(times), 1), "min_us": round(min(times), 1)}


def measure(running: int, waiting: int, repeat: int) -> dict[str, object]:
    """The figures by name."""
    times: dict[str, list[float]] = {name: [] for name in ("plan_full", "plan_admitting", "reserve", "make_batch", "commit")}
    full = scheduler_of(running, waiting, 0)
    for _ in range(repeat):
        measure_step(full, running, times)
    admitting = scheduler_of(running, waiting, 1)
    for _ in range(repeat):
        plan = timed(times["plan_admitting"], admitting.plan)
        assert len(plan.entries) == running + 1 and plan.entries[-1].hit.blocks == SHARED // PAGE
    return {"running": running, "waiting": waiting, **{name: summary(found) for name, found in times.items()}}


def measure_step(scheduler: Scheduler, running: int, times: dict[str, list[float]]) -> None:
    """One step of `running` decodes, part by part."""
    plan = timed(times["plan_full"], scheduler.plan)
    assert len(plan.entries) == running
    timed(times["reserve"], lambda: scheduler.reserve(plan))
    rows = [sampled_rows(entry) for entry in plan.entries]
    timed(times["make_batch"], lambda: make_batch(plan.entries, rows, scheduler.kv, build_inputs([], 1)))
    timed(times["commit"], lambda: commit(scheduler, plan.entries))


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of planning a step.")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    print(json.dumps(measure(args.running, args.waiting, args.repeat)))


if __name__ == "__main__":
    main()
