"""The openvino plugin against openvino-genai's continuous batching: one model, one precision, by turns; medians and ratios.

Both engines are processes that stay loaded and are asked in turn, so that what the machine does meanwhile meets both. Prompts are
random ids, new ones each time; greedy; no prefix is reused. decode: one sequence, batch_N: N at once, both in generated tokens a
second, prompts of 32 tokens included; prefill: prompt tokens a second, one token made. JSON to standard output.

    python benchmarks/openvino_vs_genai.py --python PEER_PYTHON --peer-model OPENVINO_FOLDER --model CHECKPOINT
        [--quantize FORMAT] [--dtype bfloat16] [--kv-dtype u8] [--axes decode,prefill,batch_8] [--rounds 5] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

AXES = {"decode": (1, 32, 64), "prefill": (1, 512, 1), "batch_8": (8, 32, 48), "batch_32": (32, 32, 32)}
"""Sequences, prompt tokens, generated tokens."""
_PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "u8": "u8"}


class Ours:
    """trivium with the plugin."""

    def __init__(self, args: argparse.Namespace) -> None:
        from trivium import LLM, SamplingParams

        formats = {"quantize": args.quantize, "dtype": args.dtype, "kv_dtype": args.kv_dtype}
        self.params = SamplingParams
        limits = {"max_model_len": 2048, "enable_prefix_caching": False, "threads": args.threads, "progress": False}
        self.llm = LLM(args.model, backend="openvino", **formats, **limits)

    def run(self, prompts: list[list[int]], count: int) -> int:
        params = self.params(temperature=0.0, max_tokens=count, ignore_eos=True)
        return sum(len(out.outputs[0].token_ids) for out in self.llm.generate(prompts, params))


class Peer:
    """openvino-genai's ContinuousBatchingPipeline."""

    def __init__(self, args: argparse.Namespace) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        self.genai, self.number = genai, 0
        self.tensor = lambda ids: ov.Tensor(np.array([ids], np.int64))
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
        properties = {"INFERENCE_PRECISION_HINT": _PRECISION[args.dtype], "KV_CACHE_PRECISION": _PRECISION[args.kv_dtype]}
        properties |= {"INFERENCE_NUM_THREADS": args.threads} if args.threads else {}
        self.pipe = genai.ContinuousBatchingPipeline(args.peer_model, scheduler, "CPU", properties)

    def run(self, prompts: list[list[int]], count: int) -> int:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        handles = []
        for prompt in prompts:
            self.number += 1
            handles.append(self.pipe.add_request(self.number, self.tensor(prompt), config))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        return sum(len(out.generated_ids) for handle in handles for out in handle.read_all())


def work(engine: Any) -> None:
    """Answers one line of JSON (an axis and a seed) with one: seconds and tokens made."""
    print("ready", flush=True)
    for line in sys.stdin:
        axis, seed = json.loads(line)
        sequences, length, count = AXES[axis]
        rng = random.Random(seed)
        prompts = [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(sequences)]
        began = time.perf_counter()
        made = engine.run(prompts, count)
        print(json.dumps([time.perf_counter() - began, made]), flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, python: str, which: str, args: list[str]) -> None:
        self.process = subprocess.Popen(
            [python, __file__, *args, "--worker", which], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        self._line("ready")

    def _line(self, start: str) -> str:
        for line in self._out:
            if line.startswith(start):
                return line
        raise SystemExit(f"an engine ended with {self.process.wait()}; its messages are above")

    def rate(self, axis: str, seed: int) -> float:
        """Tokens a second."""
        print(json.dumps([axis, seed]), file=self._in, flush=True)
        seconds, made = json.loads(self._line("["))
        sequences, length, count = AXES[axis]
        assert made == sequences * count, f"{made} tokens instead of {sequences * count}"
        return (length * sequences if axis == "prefill" else made) / seconds


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Both engines in turn, `rounds` times an axis after one round that does not count."""
    workers = {"ours": Worker(sys.executable, "ours", rest), "peer": Worker(args.python, "peer", rest)}
    found: dict[str, Any] = {}
    for axis in args.axes.split(","):
        rates: dict[str, list[float]] = {name: [] for name in workers}
        for seed in range(args.rounds + 1):
            for name, worker in workers.items() if seed % 2 else reversed(workers.items()):
                rates[name].append(worker.rate(axis, seed))
        medians = {name: statistics.median(r[1:]) for name, r in rates.items()}
        found[axis] = {**{k: round(v, 2) for k, v in medians.items()}, "ratio": round(medians["ours"] / medians["peer"], 3)}
        found[axis]["runs"] = {name: [round(r, 1) for r in all_] for name, all_ in rates.items()}
    for worker in workers.values():
        worker.process.terminate()
    return {"setting": {k: v for k, v in vars(args).items() if k not in ("worker", "python")}, "axes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has openvino-genai")
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantize", default="int4_g64,lm_head=int4_g64,embedding=int4_g64")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="u8")
    parser.add_argument("--axes", default="decode,prefill,batch_8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work((Ours if args.worker == "ours" else Peer)(args))
    else:
        print(json.dumps(compare(args, sys.argv[1:])))


if __name__ == "__main__":
    main()
