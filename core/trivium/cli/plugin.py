"""`trivium plugin`: a new backend as a distribution of its own, and the installed ones."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import re
import shutil
import tempfile
from importlib.resources.abc import Traversable
from pathlib import Path

from trivium.cli.parser import Parser, add_json
from trivium.cli.plugins_list import add_list, list_plugins
from trivium.errors import InvalidRequestError, TriviumError

NAME = re.compile("[a-z][a-z0-9]*([-_][a-z0-9]+)*")
NEXT = """{folder} is a working backend of trivium. In five minutes:

  pip install {path}
  trivium backends
  trivium conformance {name}
"""


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """`new` and `list`."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    new = commands.add_parser("new", help="write a distribution with a backend that passes the kit")
    new.add_argument("name", metavar="NAME", help="what users will ask for, such as mychip")
    kinds = sorted(entry.name for entry in templates().iterdir() if entry.is_dir())
    new.add_argument("--from", dest="kind", choices=kinds, default="numpy", help="what it starts from (default: numpy)")
    new.add_argument("--path", type=Path, default=Path(), metavar="DIR", help="where the folder NAME is made (default: here)")
    add_json(new)
    add_list(commands.add_parser("list", help="what plugins offer, of every kind, importing none of them"))


def plugin(args: argparse.Namespace) -> int:
    """Writes a plugin, or lists those that are installed."""
    if args.action == "list":
        return list_plugins(args)
    folder = write(args.name, args.kind, args.path)
    path = str(folder) if folder.is_absolute() else f"./{folder}"
    made = NEXT.format(folder=folder, path=path, name=args.name)
    print(json.dumps({"plugin": args.name, "path": str(folder)}) if args.json else made, end="\n" if args.json else "")
    return 0


def templates() -> Traversable:
    """The folder of templates: inside an installed trivium, else in the checkout that this file belongs to."""
    installed = importlib.resources.files("trivium.cli") / "template"
    checkout = Path(__file__).parents[3] / "plugins" / "template"
    for found in (installed, checkout):
        if found.is_dir():
            return found
    raise TriviumError(f"this trivium has no template for plugins: neither {installed} nor {checkout} exists; install it again")


def check_name(name: str) -> None:
    """Raises InvalidRequestError for a name that can't be a distribution, a package and a backend, or that is taken."""
    from trivium.plugin import find_plugins

    if not NAME.fullmatch(name):
        rule = "lower-case letters and digits, words joined by single - or _, a letter first"
        raise InvalidRequestError(f"{name!r} can't name a plugin: {rule}, such as mychip or my-chip", param="name")
    if name == "auto" or name in find_plugins():
        raise InvalidRequestError(f"a backend called {name!r} exists already; choose another name", param="name")


def write(name: str, kind: str, where: Path) -> Path:
    """Makes the folder `where`/`name` and returns it. InvalidRequestError if there is one, or for a bad name; then nothing is
    written."""
    check_name(name)
    folder = where / name
    if folder.exists() or not where.is_dir():
        reason = (
            "exists already; move it away or give another --path" if folder.exists() else f"can't be made: {where} is no folder"
        )
        raise InvalidRequestError(f"{folder} {reason}", param="path")
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        made = Path(scratch) / name
        _copy(templates() / kind, made, _words(name))
        shutil.move(made, folder)
    return folder


def _words(name: str) -> dict[str, str]:
    """What is written in place of each word of the template, longer ones first."""
    words = re.split("[-_]", name)
    return {
        "trivium_newchip": "trivium_" + "_".join(words), "trivium-newchip": "trivium-" + "-".join(words),
        "test_newchip": "test_" + "_".join(words), "NewChip": "".join(w.capitalize() for w in words), "newchip": name,
    }  # fmt: skip


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    if source.is_dir():
        target.mkdir()
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                _copy(entry, target / _replaced(entry.name, words), words)
    else:
        target.write_text(_replaced(source.read_text(encoding="utf-8"), words), encoding="utf-8")


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, own in words.items():
        text = text.replace(word, own)
    return text
