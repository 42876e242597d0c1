"""What this machine can do, measured with the backend's own loops, and the least time that a model's work takes there."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

IN, ROWS = 576, 49152


def measure(megabytes: float, repeats: int = 7) -> dict[str, Any]:
    """Reads as many bytes as the weights have from memory, and dot products of registers; all threads, medians and the best."""
    import cpu_linear as own

    linear, threads = own.linear, len(os.sched_getaffinity(0))
    size = ROWS * IN * 2 / 1e6
    arena, rows = linear.Arena(), own.random_rows("bfloat16", ROWS, IN)
    matrices = [linear.pack(arena, "bfloat16", "bfloat16", IN, rows) for _ in range(max(1, round(megabytes / size)))]
    nbytes = sum(m.nbytes for m in matrices)
    reads = [nbytes / 1e9 / s for s in linear.measure_read(matrices, threads, repeats)]
    isa = linear.isas()[0]
    seconds = linear.measure_dots(isa, own.DOT_ROUNDS, threads, repeats)
    dots = [own.DOT_OPERATIONS * own.DOT_ROUNDS * threads / 1e12 / s for s in seconds]
    return {
        "megabytes": nbytes / 1e6, "read_gb_s": statistics.median(reads), "read_gb_s_best": max(reads), "isa": isa,
        "tops": statistics.median(dots), "tops_best": max(dots), "threads": threads,
    }  # fmt: skip


class Work(NamedTuple):
    """A model's linear operators: bytes of its resident weights; weights each token meets, and those only sampled ones meet."""

    weights_bytes: float
    body: float
    head: float


def floors(work: Work, read_gb_s: float, tops: float) -> Mapping[str, float]:
    """Figure of each axis if reading the weights and multiplying by them took all the time: no attention, no norms, no host.
    A step takes the longer of the two: bytes / bandwidth, 2 * weights * tokens / peak."""

    def step(tokens: int, sampled: int) -> float:
        operations = 2 * (work.body * tokens + work.head * sampled)
        return max(work.weights_bytes / (read_gb_s * 1e9), operations / (tops * 1e12))

    def batch(streams: int) -> float:
        # 128 tokens in, 128 out: all prompts as one step, then 127 steps of a token each
        return streams * 128 / (step(128 * streams, streams) + 127 * step(streams, streams))

    return {
        "decode": 1 / step(1, 1), "prefill_512": 512 / step(512, 1), "prefill_2048": 2048 / step(2048, 1),
        "ttft_512": 1e3 * step(512, 1), "batch_8": batch(8), "batch_32": batch(32),
    }  # fmt: skip
