"""A fresh process to its first token, phase by phase, and its peak memory. Prints JSON: medians of processes that take turns.

python benchmarks/cold_start.py [MODEL] [--repeat N] [--quantize FORMAT] [--rest SECONDS]

The prompt is 32 token ids, the file is in the page cache and the bytecode of all modules is on disk: one run of each kind goes
before the measured ones. With --quantize also the weights rounded on load, without and with the cache of rounded weights. With
--rest each process waits first, in which time a virtual machine may give its free memory back to its host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

CHILD = r"""
import sys, time
started, settings = float(sys.argv[1]), sys.argv[2]
phases = {"interpreter": time.monotonic() - started}
began = time.perf_counter()
import json
from trivium import LLM, SamplingParams
phases["imports"] = time.perf_counter() - began
from trivium.engine import loader
from trivium.text import Tokenizer

def timed(owner, name, phase):
    function = getattr(owner, name)
    def wrapper(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - began
    setattr(owner, name, wrapper)

timed(loader, "open_checkpoint", "open the checkpoint")
timed(loader, "plan", "plan")
timed(Tokenizer, "from_data", "tokenizer")
timed(Tokenizer, "check", "tokenizer")
timed(loader, "_load_weights", "weights are given to the backend")
model, options = json.loads(settings)
began = time.perf_counter()
llm = LLM(model, backend="cpu", progress=False, **options)
load = time.perf_counter() - began
phases["program, fusion and backend"] = phases.pop("plan") - phases["open the checkpoint"]
parts = ("open the checkpoint", "program, fusion and backend", "tokenizer", "weights are given to the backend")
phases["compile, end of packing, engine"] = load - sum(phases[part] for part in parts)
began = time.perf_counter()
token = llm.generate([list(range(100, 132))], SamplingParams(max_tokens=1, temperature=0.0))[0].outputs[0].token_ids[0]
phases["first token"] = time.perf_counter() - began
phases["total"] = time.monotonic() - started
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kilobytes = {name: int(status[key].split()[0]) for name, key in (("peak", "VmHWM"), ("anonymous", "RssAnon"), ("files", "RssFile"))}
print(json.dumps({"phases": phases, "bytes": {name: 1024 * n for name, n in kilobytes.items()}, "token": token}))
"""


def run(model: str, options: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """One process."""
    command = [sys.executable, "-c", CHILD, str(time.monotonic()), json.dumps([model, options])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def medians(runs: list[dict[str, Any]], part: str) -> dict[str, float]:
    return {name: statistics.median(r[part][name] for r in runs) for name in runs[0][part]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--quantize", help="a resident format to round to")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {"as stored": {}}
        if args.quantize:
            for kind, where in (("rounded", False), ("rounded before", f"{folder}/packed")):
                kinds[kind] = {"quantize": args.quantize, "backend_options": {"weight_cache": where}}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        for options in kinds.values():
            run(args.model, options, environment)
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(args.repeat):
            for kind, options in kinds.items():
                time.sleep(args.rest)
                runs[kind].append(run(args.model, options, environment))
    figures = {
        kind: {"seconds": medians(of, "phases"), "bytes": medians(of, "bytes"), "first token": of[0]["token"]}
        for kind, of in runs.items()
    }
    print(json.dumps({"model": args.model, "repeat": args.repeat, **figures}, indent=1))


if __name__ == "__main__":
    main()
