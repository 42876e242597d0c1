"""trivium alone on the CPU, every axis, measured in one run through the `trivium bench` command. Run it on an idle machine.

python benchmarks/figures.py [--json | --markdown] [--repeat N] [MODEL ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

MODELS = ("smollm2-135m", "gemma3-270m")
ROWS = {
    "decode, one stream (tokens/s)": lambda r: f"{r['latency']['decode_tokens_per_s']['median']:.0f}",
    "prefill, 512 tokens (tokens/s)": lambda r: f"{r['latency']['prefill_tokens_per_s']['median']:.0f}",
    "time to first token, 512 tokens (ms)": lambda r: f"{1e3 * r['latency']['ttft_s']['median']:.0f}",
    "8 streams, 128 in, 128 out (tokens/s)": lambda r: f"{r['throughput'][8]['output_tokens_per_s']['median']:.0f}",
    "32 streams, 128 in, 128 out (tokens/s)": lambda r: f"{r['throughput'][32]['output_tokens_per_s']['median']:.0f}",
    "host's time in a decode step (µs; share)": lambda r: (
        f"{1e6 * r['decode']['host_s_per_step']:.0f}; {100 * r['decode']['host_share']:.1f} %"
    ),
    "load (s)": lambda r: f"{r['latency']['load_s']:.2f}",
    "peak memory, one stream (MB)": lambda r: f"{r['latency']['peak_rss_bytes'] / 1e6:.0f}",
}


def bench(kind: str, model: str, *flags: str) -> dict[str, Any]:
    """One `trivium bench` in a process of its own."""
    command = [sys.executable, "-m", "trivium.cli", "bench", kind, model, "--backend", "cpu", "--json", *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(model: str, repeat: int) -> dict[str, Any]:
    """All figures of one model."""
    times = ("--repeat", str(repeat))
    streams = {
        n: bench("throughput", model, "--num-requests", str(n), "--input-len", "128", "--output-len", "128", *times)
        for n in (8, 32)
    }
    return {
        "latency": bench("latency", model, "--input-len", "512", "--output-len", "64", *times),
        "decode": bench("latency", model, "--input-len", "32", "--output-len", "128", *times),
        "throughput": streams,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line an axis, a column a model."""
    lines = ["| | " + " | ".join(results) + " |", "| --- " * (len(results) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(show(r) for r in results.values()) + " |" for name, show in ROWS.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="the default")
    args = parser.parse_args()
    results = {model: measure(model, args.repeat) for model in args.models}
    print(table(results) if args.markdown else json.dumps(results))


if __name__ == "__main__":
    main()
