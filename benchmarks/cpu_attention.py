"""Attention kernels of the CPU backend against this machine's ceilings, on the heads of SmolLM2-135M (9 query heads, 3 kv heads of
64).

For each format of pages: prefill of 512 to 8,192 tokens in 10^9 operations a second (causal: only keys that a query sees count)
against register sums of the same format's products; decode of one token at 512 to 32,768 tokens of context, through as many layers
as make the pages larger than the caches, in GB/s of keys and values against a plain read of the same memory; writing keys and
values, in nanoseconds a token and kv head. Every thread works on caches of its own. Kernel and ceilings alternate; times are
processor times of each thread, so that other programs count as little as they can; figures are medians, the slowest thread's.

    python benchmarks/cpu_attention.py [--isa NAME] [--threads N] [--repeats N] [--kv-dtypes bfloat16,int8,float32]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trivium_cpu import _native

GROUP, KV_HEADS, HEAD_DIM, PAGE_SIZE = 3, 3, 64, 32
PREFILL = (512, 2048, 8192)
DECODE = (512, 4096, 32768)
LAYERS = 30
ROUNDS = 2_000_000
CACHE_BYTES = 256 << 20


def run(isa: str, kv_dtype: str, context: int, queries: int, layers: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    """What each thread measured."""
    layer = _native.KvLayer(0, 0, kv_dtype, PAGE_SIZE, KV_HEADS, HEAD_DIM)

    def work(_: int) -> dict[str, Any]:
        return _native.measure_attention(isa, layer, GROUP, context, queries, layers, ROUNDS, repeats)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads)))


def rate(measured: list[dict[str, Any]], amount: str, times: str) -> float:
    """10^9 a second, all threads together: the slowest thread's median rate times their number."""
    return min(m[amount] / statistics.median(m[times]) for m in measured) * len(measured) / 1e9


def prefill(isa: str, kv_dtype: str, tokens: int, threads: int, repeats: int) -> dict[str, float]:
    measured = run(isa, kv_dtype, tokens, tokens, 1, threads, repeats)
    reached, peak = rate(measured, "operations", "attend"), rate(measured, "product_operations", "products")
    return {"gflops": reached, "ceiling_gflops": peak, "of_ceiling": reached / peak}


def decode(isa: str, kv_dtype: str, context: int, threads: int, repeats: int) -> dict[str, float]:
    page_bytes = _native.KvLayer(0, 0, kv_dtype, PAGE_SIZE, KV_HEADS, HEAD_DIM).nbytes
    layers = max(1, CACHE_BYTES // threads // (page_bytes * context // PAGE_SIZE))
    measured = run(isa, kv_dtype, context, 1, layers, threads, repeats)
    reached, peak = rate(measured, "bytes", "attend"), rate(measured, "bytes", "read")
    write = max(statistics.median(m["write"]) for m in measured) / (context * layers * KV_HEADS)
    micro = max(statistics.median(m["attend"]) for m in measured) * 1e6 * LAYERS / layers / threads
    shares = {"gb_s": reached, "read_gb_s": peak, "of_read": reached / peak}
    return {**shares, "us_a_token_30_layers": micro, "write_ns_token_head": write * 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=_native.tiers()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-dtypes", default="bfloat16,int8,float32")
    args = parser.parse_args()
    results: dict[str, Any] = {"cpu": _native.cpu_name(), "isa": args.isa, "threads": args.threads}
    for kv_dtype in args.kv_dtypes.split(","):
        each = args.isa, kv_dtype
        results[kv_dtype] = {
            "prefill": {n: prefill(*each, n, args.threads, args.repeats) for n in PREFILL},
            "decode": {n: decode(*each, n, args.threads, args.repeats) for n in DECODE},
        }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
