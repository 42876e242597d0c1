"""Installs throw-away plugins: a real dist-info with a real entry point in a folder on sys.path."""

from __future__ import annotations

import textwrap
import uuid
from pathlib import Path

HEALTHY = """
from trivium.plugin import API_VERSION, Device, Probe, hookimpl
from trivium_reference.plugin import ReferenceBackend

class Chip(ReferenceBackend):
    name = {name!r}
    priority = {priority}
    api_version = {api_version}
    def probe(self):
        {probe}

@hookimpl
def trivium_backend():
    return Chip()
"""


def healthy(name: str, *, priority: int = -200, api_version: str = "API_VERSION", probe: str | None = None) -> str:
    """Source of a plugin that is the reference backend under another name; `probe` is the body of its probe()."""
    probe = probe or f"return Probe((Device(0, {name!r}),))"
    return HEALTHY.format(name=name, priority=priority, api_version=api_version, probe=probe)


def install(site: Path, name: str, source: str, *, distribution: str | None = None) -> Path:
    """Puts a distribution with one plugin called `name` into the folder `site` (which must be on sys.path).

    The module gets a name of its own, so that plugins of other tests still in sys.modules don't answer for it.
    """
    distribution = distribution or f"trivium-{name}"
    module = f"{distribution.replace('-', '_')}_{uuid.uuid4().hex}"
    (site / f"{module}.py").write_text(textwrap.dedent(source))
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trivium]\n{name} = {module}\n")
    return info
