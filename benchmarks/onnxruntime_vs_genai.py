"""trivium's backend `onnxruntime` against onnxruntime-genai on one model in int4, by turns in one run: medians and ratios as JSON.

ROOT holds the peer, its script and its form of the model (docs/benchmarks-cpu.md says how to make it). Both hold the weights as
whole numbers of 4 bits in blocks of 32, head included, with a scale each; both round activations to 8 bits. Each measurement is a
fresh process; each figure is the median of the processes' medians. A ratio above 1: trivium is faster.

    python benchmarks/onnxruntime_vs_genai.py --peers ROOT [--rounds N] [--parts a,b,d] [--reps N] [--batches 8] [--options JSON]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
AXES = {"a": ("decode_tps",), "b": ("prefill_tps_512", "prefill_tps_2048"), "d": ("batch8_tps", "batch32_tps")}


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], Path]]:
    """What measures each of the two, and where it runs."""
    root: Path = args.peers.resolve()
    flags = ["--parts", args.parts, "--reps", str(args.reps), "--batches", args.batches]
    options = json.dumps({"backend": "onnxruntime", "quantize": "int4,lm_head=int4"} | args.options)
    model, prompts = root / "models" / "smollm2-135m-hf", root / "bench" / "prompts-smollm2.json"
    ours = [sys.executable, str(HERE / "cpu_vs_peers.py"), "--ours", str(model), str(prompts), *flags, "--options", options]
    python, form = root / "venv" / "ort" / "bin" / "python", root / "models" / "smollm2-135m-ort-int4"
    theirs = [str(python), "bench_ort.py", str(form), "smollm2", *flags]
    return {"trivium": (ours, Path.cwd()), "onnxruntime-genai": (theirs, root / "bench")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, metavar="ROOT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="a,b,d", help="a (decode), b (prefill), d (batches)")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--batches", default="8")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of trivium's LLM(), as JSON")
    parser.add_argument("--timeout", type=float, default=600)
    args = parser.parse_args()
    from peers.running import figures

    samples: dict[str, dict[str, list[float]]] = {}
    versions: dict[str, str] = {}
    for _ in range(args.rounds):
        for who, (command, folder) in commands(args).items():
            found = figures(command, folder, args.timeout)
            versions[who] = f"{found['version']} {found['precision']}"
            for axis in (a for part in args.parts.split(",") for a in AXES[part] if a in found):
                samples.setdefault(axis, {}).setdefault(who, []).append(float(found[axis]["median"]))
    print(json.dumps({"axes": {axis: compared(by) for axis, by in samples.items()}, "versions": versions}, indent=2))


def compared(by: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the two, their ratio, and every sample."""
    medians = {who: statistics.median(values) for who, values in by.items()}
    return {**medians, "ratio": medians["trivium"] / medians["onnxruntime-genai"], "samples": by}


if __name__ == "__main__":
    main()
