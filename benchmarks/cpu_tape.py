"""What the CPU backend's tape costs beside its kernels: barriers, waking threads after the host's part of a step.

- op_us: a chain of dependent operations on a single number, per operation, for numbers of threads; barrier_us: what more
  than one thread adds to it.
- run_us_after_pause_us: the host works for so many microseconds, then runs a tape of one operation: median microseconds of
  that run. Threads that still spin join at once, sleepers take tens of microseconds.
- operations and barriers of a model's tape, all and a layer.

    python benchmarks/cpu_tape.py [--model smollm2-135m] [--threads N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
from trivium_cpu.plugin import CpuBackend

from trivium.ops import Batch, new_builder
from trivium.ops.sample import plain_inputs
from trivium.conformance.lab import as_weight

CHAIN = 512
PAUSES_US = (0, 20, 50, 100, 200, 300, 1000, 3000)


def chain(length: int, threads: int) -> Any:
    """A tape of `length` dependent operations."""
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": threads})
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (2, 1)))
    for _ in range(length):
        x = b.scale(x, factor=1.0)
    program = b.finish({"logits": x}, vocab_size=1)
    table = np.ones((2, 1), np.float32)
    return session.compile(program, {"table": session.load(as_weight("table", table), "float32")})


def one_token() -> Batch:
    zero = np.zeros(1, np.int32)
    return Batch(
        zero, zero, np.array([0, 1], np.int32), np.ones(1, np.int32), np.zeros((0, 1, 0), np.int32), np.zeros((0, 1), np.int64),
        zero, plain_inputs(1),
    )  # fmt: skip


def run_us(executable: Any, batch: Batch, pause_us: float, repeats: int) -> float:
    """Median microseconds of a run after the host was busy for `pause_us`."""
    times = []
    for _ in range(repeats):
        until = time.perf_counter() + pause_us * 1e-6
        while time.perf_counter() < until:
            pass
        began = time.perf_counter()
        executable.run(batch)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def measure(threads: int, repeats: int) -> dict[str, Any]:
    batch, short = one_token(), chain(1, threads)
    per_op = {
        n: (run_us(chain(CHAIN, n), batch, 0, repeats) - run_us(chain(1, n), batch, 0, repeats)) / (CHAIN - 1) for n in {1, threads}
    }
    pauses = {pause: run_us(short, batch, pause, repeats) for pause in PAUSES_US}
    return {"threads": threads, "op_us": per_op, "barrier_us": per_op[threads] - per_op[1], "run_us_after_pause_us": pauses}


def model_tape(name: str) -> dict[str, Any]:
    from trivium import LLM

    with LLM(name, backend="cpu", progress=False) as llm:
        tape, layers = llm.loaded.executable, max(len(llm.loaded.program.states), 1)
        return {
            "model": name, "operations": tape.operations, "barriers": tape.barriers,
            "operations_a_layer": tape.operations // layers, "barriers_a_layer": tape.barriers // layers,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of the tape beside its kernels.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    print(json.dumps({**measure(args.threads, args.repeats), **model_tape(args.model)}, indent=2))


if __name__ == "__main__":
    main()
