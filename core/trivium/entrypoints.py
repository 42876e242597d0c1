"""Entry points of the installed distributions. importlib.metadata finds the same, but takes 20 ms to import and 5 to search,
which is much of a start; this takes 2. Paths are plain text here: a start looks at those of all distributions again and again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
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
    infos: dict[str, str] = {}
    for info in (info for folder in sys.path for info in _infos(folder or ".")):
        distribution = re.sub(r"[-_.]+", "-", info.rpartition("/")[2].rpartition(".")[0].partition("-")[0]).lower()
        infos.setdefault(distribution, info)
    texts = ((info, _read(f"{info}/entry_points.txt")) for info in infos.values())
    found = ((_label(info), _pairs(text, group)) for info, text in texts if f"[{group}]" in text)
    return [EntryPoint(*pair, label) for label, pairs in found for pair in pairs]


def _infos(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208
        return [f"{folder}/{name}" for name in names if name.endswith((".dist-info", ".egg-info"))]
    return []


def _pairs(text: str, group: str) -> list[tuple[str, str]]:
    """(name, value) of each `name = value` between `[group]` and the next such line or the end."""
    sections = re.findall(rf"(?ms)^\s*\[{re.escape(group)}\]\s*$(.*?)(?=^\s*\[[^\n]*\]\s*$|\Z)", text)
    return re.findall(r"(?m)^\s*([^#\s][^=\n]*?)\s*=[^\S\n]*(.*?)\s*$", "\n".join(sections))


def _label(info: str) -> str:
    header = (_read(f"{info}/METADATA") or _read(f"{info}/PKG-INFO")).partition("\n\n")[0]
    name, version = (re.search(rf"(?m)^{key}: *(.*?)\s*$", header) for key in ("Name", "Version"))
    return f"{name[1]} {version[1]}" if name and version else "unknown"


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read()
    return ""
