"""trivium under the peers' conditions, in a process of its own: prints one line `JSON {...}` as the peers' scripts do.

Prompts are the peers' own token ids; parts, repeats and names of figures are those of their scripts. The processor's caches, the
page cache and the clock of the first token are treated alike: `cold` counts from BENCH_T0, when the parent started this process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STARTED = float(os.environ.get("BENCH_T0", time.time()))
LIMITS: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 2304, "enable_prefix_caching": False, "progress": False}


def stats(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and number of the samples."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def peak_megabytes() -> float:
    """The largest resident memory of this process so far."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


class Ours:
    """A loaded model and what is measured with it. `prompts`: lists of token ids by kind."""

    def __init__(self, model: str, prompts: dict[str, list[list[int]]], options: dict[str, Any], reps: int) -> None:
        from trivium import LLM, SamplingParams

        self.llm = LLM(model, **{"backend": "cpu"} | LIMITS | options)
        self._params = SamplingParams
        self.prompts = prompts
        self.reps = reps

    def stream(self, prompt: list[int], count: int) -> list[float]:
        """Seconds from the call to each of `count` greedy tokens."""
        start = time.perf_counter()
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [time.perf_counter() - start for _ in self.llm.stream(prompt, params)]

    def cold(self) -> dict[str, Any]:
        self.stream(self.prompts["p32"][0], 1)
        return {"cold_first_token_s": time.time() - STARTED}

    def decode(self) -> dict[str, Any]:
        """One stream, 32 tokens in, 128 out; the peak memory of a process that did nothing else."""
        prompts, rates = self.prompts["p32"], []
        self.stream(prompts[0], 16)
        self.stream(prompts[1], 128)
        for i in range(self.reps):
            times = self.stream(prompts[i + 2], 128)
            rates.append((len(times) - 1) / (times[-1] - times[0]))
        return {"decode_tps": stats(rates), "rss_mb_single": peak_megabytes()}

    def prefill(self) -> dict[str, Any]:
        """Seconds to the first token, which stand for prefill as well."""
        found: dict[str, Any] = {}
        for length, reps in ((512, self.reps), (2048, min(self.reps, 3))):
            prompts = self.prompts[f"p{length}"]
            self.stream(prompts[0], 2)
            times = [self.stream(prompts[i + 1], 2)[0] for i in range(reps)]
            found[f"prefill_tps_{length}"] = stats([length / t for t in times])
            if length == 512:
                found["ttft_512_ms"] = stats([1e3 * t for t in times])
        return found

    def batch(self, streams: int) -> dict[str, Any]:
        """Output tokens a second of requests that come at once, 128 tokens in, 128 out."""
        prompts, rates = self.prompts["p128"], []
        self._together(prompts[-streams:], 8)
        for i in range(3):
            some = prompts[i * streams : (i + 1) * streams] if (i + 1) * streams <= 96 else prompts[:streams]
            rates.append(streams * 128 / self._together(some, 128))
        return {f"batch{streams}_tps": stats(rates)}

    def _together(self, prompts: list[list[int]], count: int) -> float:
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, self._params(temperature=0.0, max_tokens=count, ignore_eos=True))
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return seconds

    def facts(self) -> dict[str, Any]:
        """What was measured: resident bytes, weights that each token meets (`body`; `head`: for sampled tokens only)."""
        loaded = self.llm.loaded
        sizes = [call.args[1].shape for call in loaded.traced.calls if call.name == "linear"]
        head = [shape for shape in sizes if shape[0] == loaded.traced.vocab_size]
        details = loaded.device.details
        return {
            "peer": "trivium", "version": f"{_version()}, {details.get('linear', '')}", "precision": loaded.summary(),
            "weights_bytes": loaded.session.memory().weights, "body": sum(map(math.prod, sizes)) - sum(map(math.prod, head)),
            "head": sum(map(math.prod, head)), "device": {**details, "name": loaded.device.name},
        }  # fmt: skip


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trivium")
    except PackageNotFoundError:
        return "unreleased"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="trivium's own figures under the peers' conditions")
    parser.add_argument("model")
    parser.add_argument("prompts", help="the peers' JSON file of token ids")
    parser.add_argument("--parts", default="a,b,d", help="cold, a (decode), b (prefill), d (batches)")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM(), as JSON")
    args = parser.parse_args(arguments)
    ours = Ours(args.model, json.loads(Path(args.prompts).read_text()), args.options, args.reps)
    parts: dict[str, Callable[[], dict[str, Any]]] = {"cold": ours.cold, "a": ours.decode, "b": ours.prefill}
    found: dict[str, Any] = {}
    for part in args.parts.split(","):
        for measure in [parts[part]] if part != "d" else [lambda n=n: ours.batch(int(n)) for n in args.batches.split(",")]:
            found |= measure()
    print("\nJSON " + json.dumps({**ours.facts(), **found}), flush=True)
