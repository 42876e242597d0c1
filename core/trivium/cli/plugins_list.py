"""`trivium plugin list`: what plugins offer, of every kind, without importing any of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from typing import Any

from trivium.cli.parser import add_json, table
from trivium.extensions import KINDS, Extension, installed


def add_list(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def list_plugins(args: argparse.Namespace) -> int:
    """One line a thing: its kind, its name, who brings it, and why it can't be had."""
    own = builtin()
    found = [_row(extension, own) for kind in KINDS for extension in installed(kind).values()]
    if args.json:
        print(json.dumps({"plugins": found}))
        return 0
    lines = [(p["kind"].replace("_", " "), p["name"], ", ".join(p["distributions"]), p["fault"]) for p in found]
    print(table([("KIND", "NAME", "FROM", ""), *lines]))
    return 0


def _row(extension: Extension, own: Mapping[str, Collection[str]]) -> dict[str, Any]:
    fault = "several distributions bring it; uninstall all but one" if len(extension.distributions) > 1 else ""
    if extension.name in own.get(extension.kind, ()):
        fault = "never used: trivium itself has this name"
    return {"kind": extension.kind, "name": extension.name, "distributions": [*extension.distributions], "fault": fault}


def builtin() -> dict[str, Collection[str]]:
    """The names that trivium itself has, by kind."""
    from trivium.cli.main import COMMANDS
    from trivium.models import ARCHITECTURES
    from trivium.text.syntaxes import REASONING, TOOLS

    return {
        "model": ARCHITECTURES, "tool_parser": {*TOOLS, "auto"}, "reasoning_parser": {*REASONING, "auto"}, "command": COMMANDS,
    }  # fmt: skip
