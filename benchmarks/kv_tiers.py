"""Time to the first token of a prompt whose prefix the KV cache gave away: computed again, and restored from memory and from disk.

One process, one model, one run: the ratios say what the tiers gain on this machine. In each round the prefix is asked for, driven
out of the pool by another prompt, and asked for again.

    python benchmarks/kv_tiers.py [--model NAME] [--backend NAME] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import numpy as np

from trivium import LLM, SamplingParams


def time_to_first_token(llm: LLM, prompt: list[int]) -> Any:
    """The metrics of one greedy token."""
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))[0]
    assert output.metrics is not None
    return output.metrics


def measure(args: argparse.Namespace, **tiers: Any) -> dict[str, float]:
    """Median seconds to the first token of a prefix that is asked for again, and how many of its tokens were restored."""
    rng = np.random.default_rng(0)
    pages = 16 * (args.tokens // 16 + 40)
    with LLM(
        args.model, args.backend, num_kv_blocks=pages // 16, block_size=16, max_model_len=args.tokens + 64, progress=False, **tiers
    ) as llm:

        def text(count: int) -> list[int]:
            return [int(i) for i in rng.integers(100, min(llm.loaded.vocab_size, 40_000), count)]

        times, restored = [], []
        for _ in range(args.rounds):
            prefix = text(args.tokens - 4)
            time_to_first_token(llm, [*prefix, *text(4)])
            time_to_first_token(llm, text(args.tokens))
            metrics = time_to_first_token(llm, [*prefix, *text(4)])
            times.append(metrics.time_to_first_token)
            restored.append(metrics.num_restored_host_tokens + metrics.num_restored_disk_tokens)
        return {"ttft_s": statistics.median(times), "restored_tokens": statistics.median(restored)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What KV tiers gain.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "recomputed": measure(args), "host": measure(args, kv_host_bytes=4 << 30), "disk": measure(args, kv_disk_path=folder),
        }  # fmt: skip
    ratios = {name: rows["recomputed"]["ttft_s"] / row["ttft_s"] for name, row in rows.items()}
    print(json.dumps({"model": args.model, "backend": args.backend, "tokens": args.tokens, "tiers": rows, "speedup": ratios}))


if __name__ == "__main__":
    main()
