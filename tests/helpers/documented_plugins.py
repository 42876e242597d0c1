"""The plugins of docs/plugins.md, installed as pip would: modules and a dist-info in a folder on sys.path."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "plugins.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of the document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Returns the entry points, by group."""
    project = tomllib.loads(blocks("toml")[0])["project"]
    for code in blocks("python"):
        name = re.match(r"# (\w+)\.py", code)[1]
        (site / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    distribution(site, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(site)
    return project["entry-points"]


def distribution(site: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """A dist-info with these entry points."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
