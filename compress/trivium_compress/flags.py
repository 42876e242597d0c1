"""The flags of `trivium quantize` and `trivium eval`, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivium.cli.parser import UsageError, add_json, add_model, load_options, named, number, table

from trivium_compress.recipe import FORMATS, METHODS, PRUNINGS
from trivium_compress.work import WINDOW, WINDOWS, Calibration, Progress, quantise

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
GATE = 3
"""The exit code of `trivium eval` where a limit is not kept."""
NO_BACKEND_SKIPS = "no backend skips zeros: a pruned model runs as fast as it did, and takes as much memory"


def size(text: str) -> int:
    """An argparse type: bytes, or 1.5GiB, 800M and the like, all in powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 4GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def by_module(text: str) -> tuple[str, str]:
    """An argparse type: REGEX=FORMAT."""
    pattern, found, format = text.rpartition("=")
    if not found or not pattern or format not in FORMATS:
        raise argparse.ArgumentTypeError(f"must be REGEX=FORMAT with one of {', '.join(FORMATS)}, not {text!r}")
    return pattern, format


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium quantize`."""
    parser.add_argument("model", metavar="MODEL", type=named, help="a folder, a .gguf file, or as for `trivium run`")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="PATH", help="a new folder, or X.gguf: a file")
    add_json(parser)
    group = parser.add_argument_group("format")
    group.add_argument("--format", choices=FORMATS, default="int4", help="of the projections in layers (default: int4)")
    group.add_argument("--embedding", choices=FORMATS, default="none", help="of embedding and head (default: none, as they are)")
    group.add_argument("--method", choices=METHODS, help="how codes are chosen (default: gptq with a text, rtn without)")
    group.add_argument("--group-size", type=number(int, 1), metavar="N", help="inputs that share a scale (not of .gguf files)")
    group.add_argument("--symmetric", action="store_true", help="int4 without zero points (not of .gguf files)")
    group.add_argument("--keep", action="append", default=[], metavar="REGEX", help="modules that stay as they are")
    other = "another format for modules, such as down_proj=int8; may be repeated, the first that matches counts"
    group.add_argument("--modules", action="append", default=[], type=by_module, metavar="REGEX=FORMAT", help=other)
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
        args.format, args.embedding, args.method, args.group_size, args.symmetric, args.prune, args.sparsity, tuple(args.keep),
        tuple(args.modules),
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
    parser.epilog = f"Exit code {GATE}: a figure is beyond its limit."
    add_model(parser)
    add_json(parser)
    group = parser.add_argument_group("against")
    group.add_argument("--against", type=named, metavar="MODEL", help="the measure: the same model in another format, or another")
    group.add_argument("--against-backend", metavar="NAME[:DEVICE]", help="its backend (default: that of --backend)")
    group.add_argument("--against-dtype", metavar="DTYPE", help="its activations' (default: what its backend does best)")
    group.add_argument("--against-quantize", metavar="FORMAT", help="its resident format (default: as stored)")
    group = parser.add_argument_group("on what")
    group.add_argument("--text", type=Path, metavar="FILE", help="a text, cut into windows")
    group.add_argument("--chats", type=Path, metavar="FILE", help='a line each: {"messages": [...]}; the last answers count')
    group.add_argument("--window", type=number(int, 2), default=512, metavar="N", help="tokens of a window (default: 512)")
    group.add_argument("--context", type=number(int, 1), metavar="N", help="of these, the first that don't count (default: half)")
    group.add_argument("--max-windows", type=number(int, 1), metavar="N", help="so many, evenly (default: all)")
    group = parser.add_argument_group("report")
    group.add_argument("--html", type=Path, metavar="FILE", help="a page with the figures, and answers side by side")
    group.add_argument(
        "--answers", type=number(int, 0), metavar="N", help="prompts that both answer (default: 8, without --html 0)"
    )
    group.add_argument("--answer-tokens", type=number(int, 1), default=128, metavar="N", help="of each answer (default: 128)")
    group = parser.add_argument_group("gate")
    group.add_argument("--max-kl", type=number(float, 0), metavar="NATS", help="largest mean KL divergence")
    group.add_argument("--min-top1", type=number(float, 0, 1), metavar="SHARE", help="least share of equal likeliest tokens")
    group.add_argument("--max-ppl-ratio", type=number(float, 0), metavar="RATIO", help="largest perplexity by the measure's")


def evaluate(args: argparse.Namespace) -> int:
    """Measures, reports, and says whether the limits are kept."""
    from trivium_compress import evaluate as measured
    from trivium_compress.report import as_html, as_table

    limits = [
        measured.Limit(figure, bound, at_most)
        for figure, bound, at_most in (
            ("kl_mean", args.max_kl, True), ("top1", args.min_top1, False), ("perplexity_ratio", args.max_ppl_ratio, True),
        ) if bound is not None
    ]  # fmt: skip
    if args.against is None and (limits or args.html or args.answers):
        raise UsageError("trivium eval: limits, --html and --answers compare two models; name the measure with --against")
    if args.html is not None:
        _check_page(args.html)
    material = measured.Material(args.text, args.chats, args.window, args.context, args.max_windows)
    judged = measured.Side(args.model, {**load_options(args), "progress": not args.json})
    answers = args.answers if args.answers is not None else 8 if args.html else 0
    with progress_bar(args.json) as progress:
        report = measured.evaluate(
            judged, material, _measure(args), answers=answers, answer_tokens=args.answer_tokens, progress=progress
        )  # fmt: skip
    report["gate"] = [limit.check(report) for limit in limits]
    print(json.dumps(report) if args.json else as_table(report))
    if args.html is not None:
        args.html.write_text(as_html(report), "utf-8")
    return 0 if all(gate["passed"] for gate in report["gate"]) else GATE


def _check_page(path: Path) -> None:
    """UsageError for a place where no file can be written: better said now than when all is measured."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"trivium eval: --html {path}: no file can be written there")


def _measure(args: argparse.Namespace) -> Any:
    """The other side; None: there is none."""
    from trivium_compress.evaluate import Side

    if args.against is None:
        return None
    options = {"backend": args.against_backend or args.backend, "dtype": args.against_dtype or "auto", "threads": args.threads}
    own = {"quantize": args.against_quantize, "strict": args.strict, "progress": not args.json}
    return Side(args.against, {**options, **own})
