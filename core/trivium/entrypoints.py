"""Entry points of the installed distributions. importlib.metadata finds the same, but takes 20 ms to import and 5 to search,
which is much of a start; this takes 2 in all."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple


class EntryPoint(NamedTuple):
    """`name = value` in a group of entry_points.txt; `distribution`: name and version of who installed it."""

    name: str
    value: str
    distribution: str

    def load(self) -> Any:
        """What `module` or `module:attribute` names, imported; extras don't matter."""
        module, _, attributes = re.sub(r"\s|\[.*", "", self.value).partition(":")
        return functools.reduce(getattr, filter(None, attributes.split(".")), importlib.import_module(module))


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of one group, found in the folders on sys.path, where installers put them. Of a distribution that is there
    more than once the first counts, as it does for imports.

    Formats: Python packaging specifications, "Entry points" and "Core metadata".
    """
    infos: dict[str, Path] = {}
    for info in (info for folder in sys.path for info in _metadata(Path(folder))):
        distribution = re.sub("[-_.]+", "-", info.stem.partition("-")[0]).lower()
        infos.setdefault(distribution, info)
    return [EntryPoint(*pair, _label(info)) for info in infos.values() for pair in _pairs(_read(info / "entry_points.txt"), group)]


def _metadata(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.lower().endswith((".dist-info", ".egg-info"))]
    except OSError:  # not there, or not a folder
        return []


def _pairs(text: str, group: str) -> list[tuple[str, str]]:
    section, pairs = "", []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif section == group and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            pairs.append((name.strip(), value.strip()))
    return pairs


def _label(info: Path) -> str:
    header = (_read(info / "METADATA") or _read(info / "PKG-INFO")).partition("\n\n")[0]
    name, version = (re.search(rf"(?m)^{key}: *(.*?)\s*$", header) for key in ("Name", "Version"))
    return f"{name[1]} {version[1]}" if name and version else "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
