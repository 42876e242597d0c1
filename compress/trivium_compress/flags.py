"""The flags of `trivium quantize` and `trivium eval`, and what they print."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivium.cli.parser import add_json, add_model, named, number, table

from trivium_compress.recipe import FORMATS, METHODS, PRUNINGS
from trivium_compress.work import WINDOW, WINDOWS, Calibration, Progress, quantise

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
NO_BACKEND_SKIPS = "no backend skips zeros: a pruned model runs as fast as it did, and takes as much memory"


def size(text: str) -> int:
    """An argparse type: bytes, or 1.5GiB, 800M and the like, all in powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 4GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium quantize`."""
    parser.add_argument("model", metavar="MODEL", type=named, help="a folder of safetensors or a .gguf file, or as for `trivium run`")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="PATH", help="a new folder, or a new .gguf file")
    add_json(parser)
    group = parser.add_argument_group("format")
    group.add_argument("--format", choices=FORMATS, default="int4", help="of the projections in layers (default: int4)")
    group.add_argument("--embedding", choices=FORMATS, default="none", help="of embedding and head (default: none, as they are)")
    group.add_argument("--method", choices=METHODS, help="how codes are chosen (default: gptq with a text, rtn without)")
    group.add_argument("--group-size", type=number(int, 1), metavar="N", help="inputs that share a scale (folder only; int4: up to 128)")
    group.add_argument("--symmetric", action="store_true", help="int4 without zero points (folder only)")
    group.add_argument("--keep", action="append", default=[], metavar="REGEX", help="modules that stay as they are; may be repeated")
    group = parser.add_argument_group("pruning")
    group.add_argument("--prune", choices=PRUNINGS, help="makes weights 0; --format none: and nothing else")
    group.add_argument("--sparsity", metavar="SHARE", help="0.5: so many of them; 2:4: two of four consecutive inputs stay")
    group = parser.add_argument_group("calibration")
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="a text such as the model will see")
    group.add_argument("--windows", type=number(int, 1), metavar="N", help=f"of the text that are read (default: up to {WINDOWS})")
    group.add_argument("--window", type=number(int, 1), default=WINDOW, metavar="N", help=f"tokens of each (default: {WINDOW})")
    group.add_argument("--memory", type=size, metavar="SIZE", help="what may be held at a time, such as 4GiB; see docs/compress.md")


def quantize(args: argparse.Namespace) -> int:
    """Makes the checkpoint and says what has become of it."""
    from trivium.weights import resolve

    from trivium_compress.recipe import Recipe

    recipe = Recipe(
        args.format, args.embedding, args.method, args.group_size, args.symmetric, args.prune, args.sparsity, tuple(args.keep)
    )  # fmt: skip
    calibration = Calibration(args.calibrate, args.windows, args.window) if args.calibrate is not None else None
    model = resolve(args.model, progress=not args.json)
    with progress_bar(args.json) as progress:
        report = quantise(model, args.output, recipe, calibration, memory_bytes=args.memory, progress=progress)
    if recipe.prune is not None:
        report["zeros_skipped_by"] = []
    print(json.dumps(report) if args.json else _told(report))
    return 0


def _told(report: dict[str, Any]) -> str:
    """For people."""
    formats = ", ".join(f"{n} {name}" for name, n in report["formats"].items())
    rows = [
        ("output", report["output"]), ("bytes", f"{report['bytes']:,}"), ("bits a weight", f"{report['bits_per_weight']:.3f}"),
        ("matrices", formats), ("projections as they were", str(report["unrounded"])), ("method", report["method"]),
        ("text", f"{report['windows']} windows, {report['tokens']} tokens"), ("memory planned for", f"{report['memory_bytes']:,}"),
    ]  # fmt: skip
    if report["relative_error"] is not None:
        rows.append(("relative error of outputs" if report["windows"] else "relative error", f"{report['relative_error']:.4f}"))
    if report["zeros"] is not None:
        rows.append(("zeros", f"{100 * report['zeros']:.1f} %; {NO_BACKEND_SKIPS}"))
    if report["resumed_parts"]:
        rows.append(("went on after", f"{report['resumed_parts']} parts"))
    return table(rows)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="part", file=sys.stderr) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_description(what)
            bar.update(done - bar.n)

        yield progress


def add_eval(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium eval`."""
    add_model(parser)
    add_json(parser)


def evaluate(args: argparse.Namespace) -> int:
    raise NotImplementedError
