"""What the eager loop of the torch backend costs: seconds a decode step and to a prompt's end beside the cpu backend with equal
weights (float32), and which share of a decode step's time torch spends in matrix products; the rest is the loop, in Python, and
small operations.

    python benchmarks/torch_eager.py [MODEL] [--device cpu] [--dtype float32] [--threads N] [--tokens N] [--repeat N]

Both models run by turns; times are processor times of the whole process a thread (with another device, of the clock); medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from trivium import LLM, SamplingParams

PROMPT = [1000 + 37 * i % 20000 for i in range(512)]
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::mkldnn_linear",
    "aten::_addmm_activation",
)


def seconds(llm: LLM, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> float:
    began = clock()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return clock() - began


def decode(llm: LLM, seqs: int, tokens: int, clock: Callable[[], float]) -> float:
    """Seconds a step, from two runs that differ in nothing but their length."""
    prompts = [PROMPT[i : i + 32] for i in range(seqs)]
    return (seconds(llm, prompts, tokens + 1, clock) - seconds(llm, prompts, 1, clock)) / tokens


def share_of_products(llm: LLM, tokens: int) -> float:
    """Which part of a run's clock time passes inside torch's matrix products."""
    from torch.profiler import profile

    with profile() as watched:
        whole = seconds(llm, [PROMPT[:1]], tokens, time.perf_counter)
    return sum(e.self_cpu_time_total for e in watched.key_averages() if e.key in PRODUCTS) / 1e6 / whole


def measure(llms: dict[str, LLM], tokens: int, repeat: int, clock: Callable[[], float]) -> dict[str, Any]:
    cases: dict[str, Callable[[LLM], float]] = {
        "decode, 1 sequence": lambda llm: decode(llm, 1, tokens, clock),
        "decode, 8 sequences": lambda llm: decode(llm, 8, tokens, clock),
        "prefill, 512 tokens": lambda llm: seconds(llm, [PROMPT], 1, clock),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, case in cases.items():
        times = [{side: case(llm) for side, llm in llms.items()} for _ in range(repeat)]
        medians = {f"{side}_s": statistics.median(t[side] for t in times) for side in llms}
        found[name] = {**medians, "cpu/torch": medians["cpu_s"] / medians["torch_s"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    load: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 1024, "num_kv_blocks": 256, "progress": False}
    options: dict[str, Any] = {"backend_options": {"threads": asked.threads}}
    with (
        LLM(asked.model, f"torch:{asked.device}", dtype=asked.dtype, **load, **options) as ours,
        LLM(asked.model, "cpu", dtype="float32", kv_dtype="float32", **load, **options) as other,
    ):
        clock = time.process_time if asked.device == "cpu" else time.perf_counter
        found = measure({"torch": ours, "cpu": other}, asked.tokens, asked.repeat, clock)
        share = share_of_products(ours, 8)
    print(json.dumps({"model": asked.model, "dtype": asked.dtype, "threads": asked.threads, **found, "products": share}, indent=1))


if __name__ == "__main__":
    main()
