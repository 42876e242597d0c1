"""The host's part of a decode step: microseconds of processor time that Engine.step() takes outside run() and tokens().

The model is that of the engine's tests, with a device that answers at once: run() only reads `--evict` MiB of memory, as weights
would pass through the processor's caches, and returns the same token for every row. Requests are greedy and stream. Medians and
minima over the measured steps; the engine's clock counts processor time of this thread, so other programs disturb it little.

    python benchmarks/engine_host.py [--json] [--batch 1,32,256] [--steps N] [--evict MIB]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from trivium.engine import Engine, EngineConfig
from trivium.ops import Batch, Sampled
from trivium.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from fake_model import FakeTokenizer, fake_model

WARMUP = 8
PROMPT = 24


class Device:
    """Answers every row with one token."""

    def __init__(self, evict: int) -> None:
        self._memory = np.ones(evict << 17, np.float64)

    def run(self, batch: Batch) -> SimpleNamespace:
        self._memory.sum()
        sampled = Sampled(np.full(len(batch.sample_rows), 5, np.int32))
        return SimpleNamespace(tokens=lambda: sampled)


def measure(batch: int, steps: int, evict: int) -> dict[str, float]:
    """Host microseconds a decode step of `batch` sequences."""
    length = PROMPT + WARMUP + steps + 1
    model = fake_model(page_size=16, pages=batch * (length // 16 + 1), max_model_len=length)
    model.executable = Device(evict)
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=max(batch * PROMPT, 64))
    engine = Engine(model, FakeTokenizer(), config, clock=time.thread_time)
    rng = np.random.default_rng(0)
    for _ in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=WARMUP + steps + 1, ignore_eos=True)
        engine.add_request(rng.integers(3, model.vocab_size, PROMPT).tolist(), params, stream=True)
    times = []
    for _ in range(WARMUP + steps):
        before = engine.stats.host_seconds
        engine.step()
        times.append((engine.stats.host_seconds - before) * 1e6)
    times = times[WARMUP:]
    return {"batch": batch, "median_us": statistics.median(times), "min_us": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a decode step.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--batch", default="1,32,256", help="batch sizes, separated by commas")
    parser.add_argument("--steps", type=int, default=300, help="measured steps a batch size")
    parser.add_argument("--evict", type=int, default=0, help="MiB that the device reads in every step")
    args = parser.parse_args()
    rows = [measure(int(batch), args.steps, args.evict) for batch in args.batch.split(",")]
    if args.json:
        print(json.dumps({"steps": args.steps, "evict_mib": args.evict, "host": rows}))
        return
    for row in rows:
        print(f"batch {row['batch']:>4}: median {row['median_us']:.1f} us, minimum {row['min_us']:.1f} us")


if __name__ == "__main__":
    main()
