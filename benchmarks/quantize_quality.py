"""What `trivium quantize` costs: KL divergence, top-1 agreement and perplexity of rounded checkpoints against the original, at
their bits a weight, and those of a peer's file of the same model.

The original is what --model holds: if that is a .gguf file of rounded weights, these are the measure, and "original" in the report
says so, and a recipe on the grid that they are on already (q4_1 of Q4_1) costs next to nothing: take a bf16 folder to judge
methods by. Calibrated on documents of this project that are not among those it is judged on. Everything is computed by one backend,
in float32 from the stored numbers, so that only the stored numbers differ. --peer: .gguf files of the same model, such as
llama.cpp's Q4_K_M. --resident: the original, rounded on load to these formats of the backend, which rounds activations as it does
for its users. Prints JSON, and a table to standard error.

    python benchmarks/quantize_quality.py [--model M] [--peer FILE ...] [--resident FORMAT ...] [--recipes NAME ...] [--windows N]
    [--max-windows N] [--backend B]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quality import TEXTS, text_of_this_project
from trivium_compress import Calibration, Recipe, quantise
from trivium_compress.evaluate import Material, Measure, Side, evaluate

from trivium.weights import open_checkpoint, resolve

ROOT = Path(__file__).resolve().parents[1]
SENSITIVE = r"v_proj|\.([01258]|1[147]|2[036789])\..*down_proj"
"""All values, and down projections of the first layers, the last of 30, and every third."""
FOLDER: Mapping[str, Recipe] = {
    "int4 rtn, no text": Recipe("int4", "int8", "rtn"), "int4 gptq": Recipe("int4", "int8"),
    "int4 gptq, groups of 32": Recipe("int4", "int8", group_size=32), "int4 awq": Recipe("int4", "int8", "awq"),
    "int4 awq+gptq": Recipe("int4", "int8", "awq+gptq"), "int8": Recipe("int8", "int8"),
    "int4 gptq, int8 for some": Recipe("int4", "int8", group_size=32, modules=(("down_proj|v_proj", "int8"),)),
}  # fmt: skip
FILE: Mapping[str, Recipe] = {
    "q4_0 rtn, no text": Recipe("q4_0", "q8_0", "rtn"), "q4_0 gptq": Recipe("q4_0", "q8_0"),
    "q4_0 awq+gptq": Recipe("q4_0", "q8_0", "awq+gptq"), "int4 gptq": Recipe("int4", "q8_0"),
    "int4 awq+gptq": Recipe("int4", "q8_0", "awq+gptq"), "int8": Recipe("int8", "q8_0"),
    "int8 rtn, no text": Recipe("int8", "q8_0", "rtn"),
    "q4_1 gptq, q8_0 for some": Recipe("q4_1", "q8_0", modules=(("down_proj|v_proj", "q8_0"),)),
    "q4_1 gptq, q8_0 for fewer": Recipe("q4_1", "q8_0", modules=((SENSITIVE, "q8_0"),)),
}  # fmt: skip
"""What is made of a folder of safetensors (compressed-tensors), and of a .gguf file. "no text": nothing is calibrated."""


def calibration_text() -> str:
    """Prose of this repository that nothing is judged on."""
    judged = {ROOT / name for name in TEXTS}
    return "\n".join(p.read_text("utf-8") for p in sorted((ROOT / "docs").glob("*.md")) if p not in judged)


def bits_a_weight(path: Path) -> float:
    """Stored bits of all tensors by the numbers they stand for; what is tied counts once."""
    checkpoint = open_checkpoint(path)
    weights = [make() for make in checkpoint.tensors.values()]
    return 8 * sum(w.nbytes for w in weights) / sum(math.prod(w.shape) for w in weights)


def side(path: Path, args: argparse.Namespace, **resident: str) -> Side:
    """A model in float32, or as the backend holds it for its users."""
    return Side(str(path), {"backend": args.backend, "progress": False, **(resident or {"dtype": "float32"})})


def judged(path: Path, args: argparse.Namespace, material: Material, measure: Measure, **resident: str) -> dict[str, Any]:
    """The figures of a file or folder against the original."""
    report = evaluate(side(path, args, **resident), material, measure)
    names = ("kl_mean", "kl_median", "kl_p99", "top1", "perplexity", "perplexity_of_measure", "perplexity_ratio", "positions")
    formats = {f.name: f.bits for f in measure.scorer.llm.loaded.capabilities.weight_formats}
    bits = formats[resident["quantize"]] if resident else bits_a_weight(path)
    return {"bits_per_weight": bits, **{name: report[name] for name in names}}


def made(name: str, recipe: Recipe, args: argparse.Namespace, text: Path, folder: Path) -> Path:
    """Rounds the original by a recipe."""
    suffix = "" if any(args.original.glob("*.safetensors")) else ".gguf"
    out = folder / f"{''.join(c for c in name if c.isalnum())}{suffix}"
    quantise(args.original, out, recipe, None if name.endswith("no text") else Calibration(text, args.windows))
    return out


def report(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recipes = FOLDER if any(args.original.glob("*.safetensors")) else FILE
    calibrate, on = folder / "calibrate.txt", folder / "judged.txt"
    calibrate.write_text(calibration_text(), "utf-8")
    on.write_text(text_of_this_project(), "utf-8")
    material = Material(on, window=args.window, max_windows=args.max_windows)
    found: dict[str, Any] = {}
    with Measure.open(side(args.original, args), args.window, folder) as measure:

        def judge(name: str, path: Path, **resident: str) -> None:
            found[name] = judged(path, args, material, measure, **resident)
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)

        for name, recipe in recipes.items():
            if args.recipes is None or name in args.recipes:
                judge(name, made(name, recipe, args, calibrate, folder))
        for format in args.resident:
            judge(f"resident {format}", args.original, quantize=format)
        for peer in args.peer:
            judge(f"peer {peer.name}", peer)
    formats = sorted({make().format for make in open_checkpoint(args.original).tensors.values()})
    return {
        "original": str(args.model),
        "original_formats": formats,
        "backend": args.backend,
        "windows": args.windows,
        "found": found,
    }


def table(found: Mapping[str, Any]) -> str:
    """In Markdown."""
    lines = ["| weights | bits | KL divergence (95 %) | likeliest the same | perplexity |", "| --- | --- | --- | --- | --- |"]
    for name, row in found.items():
        low, high = row["kl_mean"]["interval"]
        kl, bits = f"{row['kl_mean']['value']:.4f} ({low:.4f} to {high:.4f})", f"{row['bits_per_weight']:.2f}"
        lines.append(f"| {name} | {bits} | {kl} | {row['top1']['value']:.1%} | {row['perplexity']['value']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What trivium quantize costs")
    parser.add_argument(
        "--model", default="smollm2-135m", help="the original: a folder, a .gguf file or a name (default: smollm2-135m)"
    )
    parser.add_argument("--peer", type=Path, nargs="+", default=[], metavar="FILE", help=".gguf files that another tool made of it")
    parser.add_argument("--resident", nargs="+", default=[], metavar="FORMAT", help="formats of the backend that it is loaded as")
    parser.add_argument("--recipes", nargs="*", choices=sorted({*FOLDER, *FILE}), help="only these, or none (default: all)")
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens that are calibrated on (default: 64)")
    parser.add_argument("--window", type=int, default=512, help="tokens of what is judged (default: 512)")
    parser.add_argument("--max-windows", type=int, help="that are judged (default: all of the text)")
    parser.add_argument("--backend", default="cpu", help="that computes everything (default: cpu)")
    parser.add_argument("--json", action="store_true", help="the default")
    args = parser.parse_args()
    args.original = resolve(args.model)
    with tempfile.TemporaryDirectory() as folder:
        result = report(args, Path(folder))
    print(table(result["found"]), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
