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
    for info in (path for folder in sys.path for path in Path(folder).glob("*.*-info")):
        if info.suffix in (".dist-info", ".egg-info"):
            distribution = re.sub("[-_.]+", "-", info.stem.partition("-")[0]).lower()
            infos.setdefault(distribution, info)
    return [EntryPoint(*pair, _label(info)) for info in infos.values() for pair in _pairs(_read(info / "entry_points.txt"), group)]


def _pairs(text: str, group: str) -> list[tuple[str, str]]:
    """(name, value) of each `name = value` between `[group]` and the next such line or the end."""
    sections = re.findall(rf"(?ms)^\s*\[{re.escape(group)}\]\s*$(.*?)(?=^\s*\[[^\n]*\]\s*$|\Z)", text)
    return re.findall(r"(?m)^\s*([^#\s][^=\n]*?)\s*=[^\S\n]*(.*?)\s*$", "\n".join(sections))


def _label(info: Path) -> str:
    header = (_read(info / "METADATA") or _read(info / "PKG-INFO")).partition("\n\n")[0]
    name, version = (re.search(rf"(?m)^{key}: *(.*?)\s*$", header) for key in ("Name", "Version"))
    return f"{name[1]} {version[1]}" if name and version else "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
