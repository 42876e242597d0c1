"""`trivium conformance`: judges a backend against the reference."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from trivium.cli.parser import add_json, key_value, number

if TYPE_CHECKING:
    from trivium.conformance import Row

_AREA = "judge this area only: rules, operators, fusions, formats, pages, sampler, models, serving; may be repeated (default: all)"


def add_conformance(parser: argparse.ArgumentParser) -> None:
    """The backend, the options it is opened with, and the areas to judge."""
    parser.add_argument("backend", metavar="BACKEND", help="see `trivium backends`")
    parser.add_argument("--area", action="append", help=_AREA)
    parser.add_argument("--isa", metavar="NAME", help="instruction set that the backend is held to, such as portable")
    parser.add_argument("--threads", type=number(int, 1), metavar="N", help="host threads of the backend")
    parser.add_argument("--option", type=key_value, action="append", metavar="KEY=VALUE", help="an option of the backend's own")
    parser.add_argument("--performance", action="store_true", help="instead: each operator's share of the machine's ceilings")
    ceiling = "with --performance: what the machine can do a second: bytes=2e11, float32=1e12; may be repeated"
    parser.add_argument("--ceiling", type=key_value, action="append", metavar="KIND=RATE", help=ceiling)
    parser.add_argument("--tokens", type=number(int, 1), metavar="N", default=8, help="with --performance: sequences in a step")
    add_json(parser)


def conformance(args: argparse.Namespace) -> int:
    """Prints one row a check, or the performance page; 1 if any failed, or if this machine lacks what was asked for."""
    from trivium.conformance import run_conformance

    own = {name: getattr(args, name) for name in ("isa", "threads") if getattr(args, name) is not None}
    options = {**own, **dict(args.option or ())}
    if args.performance:
        from trivium.conformance.kit import open_lab
        from trivium.conformance.performance import measure

        found = measure(open_lab(args.backend, options), dict(args.ceiling or ()), args.tokens)
        print(json.dumps(found.to_json()) if args.json else found)
        return 0
    report = run_conformance(args.backend, options, areas=args.area, progress=_tell)
    print(json.dumps(report.to_json()) if args.json else report)
    return 0 if report.ok and not report.count("unavailable") else 1


def _tell(row: Row) -> None:
    """What failed, as soon as it is known."""
    if row.status == "failed":
        print(f"failed: {row.area} {row.name}: {row.detail}", file=sys.stderr, flush=True)
