"""The backends that this environment has, for tests over pairs of them; whoever is installed is picked up."""

from __future__ import annotations

from functools import cache
from typing import Any

from trivium.errors import TriviumError
from trivium.plugin import find_plugins, resolve
from trivium.plugin.guard import capabilities_of


@cache
def available() -> tuple[str, ...]:
    """As users name them: of each backend the host's processor, where it has several devices; `reference` and `cpu` first."""
    found = []
    for name, plugin in find_plugins().items():
        devices = [device.name for device in plugin.status().devices]
        if devices:
            found.append(f"{name}:cpu" if len(devices) > 1 and "cpu" in devices else name)
    return tuple(sorted(found, key=lambda name: (name not in ("reference", "cpu"), name != "reference", name)))


@cache
def exact(backend: str) -> dict[str, Any]:
    """The options with which a backend computes and keeps everything in float32, as far as it can."""
    try:
        can = capabilities_of(*resolve(backend))
    except TriviumError:
        return {}
    options = {"dtype": "float32"} if "float32" in can.dtypes else {}
    return {**options, **({"kv_dtype": "float32"} if "float32" in can.kv_dtypes else {})}
