"""Decode beside a busy neighbour: tokens a second alone, and with one process that keeps one processor busy.

A fair system gives two threads on two processors beside one busy process between half (both threads share what is left of one
processor) and three quarters of both processors. Alone and beside alternate, figures are medians; `ratio` is beside over alone.

    python benchmarks/cpu_neighbour.py [--model smollm2-135m] [--threads 2,1] [--tokens N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

from trivium import LLM, SamplingParams

PROMPT = [1000 + i for i in range(16)]


def spin(ready: Any) -> None:
    ready.set()
    while True:
        pass


def rate(llm: LLM, tokens: int) -> float:
    """Tokens a second of one stream, prefill of a short prompt included."""
    began = time.perf_counter()
    llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return tokens / (time.perf_counter() - began)


def beside(llm: LLM, tokens: int) -> float:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    neighbour = context.Process(target=spin, args=(ready,), daemon=True)
    neighbour.start()
    try:
        ready.wait()
        return rate(llm, tokens)
    finally:
        neighbour.kill()
        neighbour.join()


def measure(model: str, threads: int, tokens: int, repeats: int) -> dict[str, Any]:
    with LLM(model, backend="cpu", backend_options={"threads": threads}, enable_prefix_caching=False, progress=False) as llm:
        rate(llm, 8)
        pairs = [(rate(llm, tokens), beside(llm, tokens)) for _ in range(repeats)]
    alone, busy = (statistics.median(p) for p in zip(*pairs, strict=True))
    return {
        "threads": threads, "alone_tokens_per_s": alone, "beside_tokens_per_s": busy,
        "ratio": statistics.median(b / a for a, b in pairs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode beside a busy process.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", default="2,1", help="numbers of threads, separated by commas")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [measure(args.model, int(n), args.tokens, args.repeats) for n in args.threads.split(",")]
    print(json.dumps({"model": args.model, "tokens": args.tokens, "repeats": args.repeats, "decode": rows}, indent=2))


if __name__ == "__main__":
    main()
