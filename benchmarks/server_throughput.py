"""What HTTP leaves of the engine's throughput, printed as JSON: output tokens/s of `trivium bench serve` on `trivium serve`, over
those of `trivium bench throughput`, by turns in one run.

    python benchmarks/server_throughput.py [MODEL] [--backend cpu] [--quantize FORMAT] [--streams 32] [--requests 128]
        [--input-len 128] [--output-len 128] [--repeat 3]

Both sides get `requests` lists of random token ids, greedy, `streams` of them at a time, without a prefix cache, with as many
threads. The rate of either is output tokens over the seconds from the first request to the end of the last answer. Server and load
generator share the machine, as they would not in earnest: `loop_us_per_token` is the CPU time of the server's own thread,
`client_us_per_token` that of the generator. `ratio` is the median of the turns' own ratios; `ratio_of_best` that of the best turns,
which others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop
from trivium import LLM
from trivium.cli import bench
from trivium.cli.main import build_parser
from trivium_server.load.command import measured


def served(args: argparse.Namespace, flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """(the server's process, its URL)."""
    own = ["--port", "0", "--no-enable-prefix-caching", "--max-num-seqs", str(args.streams), *flags]
    command = [sys.executable, "-m", "trivium.cli", "serve", args.model, *own]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)", line):
            return process, found[1]
    raise SystemExit(f"the server did not start: exit code {process.wait()}")


def loop_seconds(pid: int) -> float:
    """CPU time of a process's first thread: the server's event loop. The engine has threads of its own."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def through_http(args: argparse.Namespace, url: str, vocab_size: int, pid: int) -> dict[str, float]:
    """One burst of all streams."""
    lengths = ["--input-len", args.input_len, "--output-len", args.output_len, "--vocab-size", vocab_size]
    count = ["--concurrency", args.streams, "--requests", args.requests, "--warmup", 0]
    words = ["bench", "serve", "--url", url, "--endpoint", "completions", *lengths, *count]
    before = loop_seconds(pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report, _ = runner.run(measured(build_parser("bench").parse_args([str(word) for word in words])))
    spent, tokens = loop_seconds(pid) - before, report["tokens"]["output"]
    if report["requests"]["failed"] or tokens != args.requests * args.output_len:
        raise SystemExit(f"not every answer was whole: {report['failures']}, {tokens} tokens")
    rate, client = report["rates"]["output_tokens_per_s"], report["client"]["cpu_us_per_token"]
    return {"tokens_per_s": rate, "loop_us_per_token": spent / tokens * 1e6, "client_us_per_token": client}


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "each": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    for name, default in (("streams", 32), ("requests", 128), ("input-len", 128), ("output-len", 128), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--quantize", metavar="FORMAT")
    args = parser.parse_args()
    flags = ["--backend", args.backend, *(["--quantize", args.quantize] if args.quantize else [])]
    words = [args.model, "--num-requests", args.requests, "--input-len", args.input_len, "--output-len", args.output_len]
    words += ["--max-num-seqs", args.streams, "--repeat", 1, "--warmup", 0, "--json", *flags]
    engine = build_parser("bench").parse_args(["bench", "throughput", *map(str, words)])
    options = bench.load_options(engine)
    process, url = served(args, flags)
    try:
        with LLM(args.model, **options, enable_prefix_caching=False, progress=False) as llm:
            turns = []
            for turn in range(args.repeat + 1):
                [alone] = bench.measure(llm, engine)
                http = through_http(args, url, llm.loaded.vocab_size, process.pid)
                turns += [(alone["output_tokens_per_s"], http)] if turn else []  # the first warms both
    finally:
        process.terminate()
        process.wait(60)
    report = {
        "model": args.model, **{name: getattr(args, name) for name in ("streams", "requests", "input_len", "output_len")},
        "ratio": statistics.median(http["tokens_per_s"] / alone for alone, http in turns),
        "ratio_of_best": max(http["tokens_per_s"] for _, http in turns) / max(alone for alone, _ in turns),
        "engine_tokens_per_s": summary([alone for alone, _ in turns]),
        **{f"http_{name}": summary([http[name] for _, http in turns]) for name in turns[0][1]},
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
