"""What plugins add, of whatever kind: entry points found by name, each imported when it is first asked for, and blamed by name.

A thing of kind KIND called NAME is an entry point NAME in the group `trivium.KINDs` (a backend's group is plain `trivium`) whose
object has the hook `trivium_KIND()`; plugin/hooks.py says what each hook returns. What the core itself calls NAME is not asked for
here, so a plugin can't take its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from trivium.entrypoints import EntryPoint, entry_points
from trivium.errors import PluginError, ProgramError, TriviumError

PROJECT = "trivium"
KINDS = (
    "backend", "model", "checkpoint", "gguf_model", "weight_format", "adapter_format", "tokenizer", "tool_parser",
    "reasoning_parser", "logits_processor", "model_source", "moderation", "command",
)  # fmt: skip


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Whatever is raised inside becomes a PluginError: `what` failed, and why. Interrupts pass, and so do TriviumErrors, except
    ProgramError: plugins make Programs and patterns. As a decorator: inside of each call."""
    try:
        yield
    except (Exception, SystemExit) as e:
        if isinstance(e, TriviumError) and not isinstance(e, ProgramError):
            raise
        raise PluginError(f"{what} failed: {type(e).__name__}: {e}") from e


def expect(kind: type | UnionType, value: Any, what: str) -> Any:
    """`value`, which `what` gave; PluginError if it is of another kind."""
    if not isinstance(value, kind):
        raise PluginError(f"{what} returned a {type(value).__name__}, not a {getattr(kind, '__name__', kind)}")
    return value


@dataclass(frozen=True)
class Extension:
    """An entry point, not yet imported. `distributions`: who claims the name."""

    kind: str
    name: str
    entry_points: tuple[EntryPoint, ...]

    @property
    def distributions(self) -> tuple[str, ...]:
        return tuple(e.distribution for e in self.entry_points)

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} {self.name!r} ({self.distributions[0]})"

    def load(self) -> Any:
        """Imports the plugin and returns what its hook gives; PluginError with the reason, also if two claim the name."""
        import pluggy

        if len(self.entry_points) > 1:
            who = " and ".join(self.distributions)
            raise PluginError(f"two {self.kind.replace('_', ' ')} plugins are called {self.name!r}: {who}; uninstall one")
        manager, hook = pluggy.PluginManager(PROJECT), f"trivium_{self.kind}"
        with blame(f"{self}: loading it"), contextlib.redirect_stdout(sys.stderr):
            manager.register(module := self.entry_points[0].load())
            found = getattr(manager.hook, hook)() if hasattr(manager.hook, hook) else []
        if len(found) != 1:
            raise PluginError(f"{self}: {module!r} must implement the hook {hook}() once; it returned {len(found)} objects")
        return found[0]


def installed(kind: str) -> dict[str, Extension]:
    """All of one kind by name; imports none of them."""
    by_name: dict[str, dict[EntryPoint, None]] = {}
    for e in entry_points(PROJECT if kind == "backend" else f"{PROJECT}.{kind}s"):
        by_name.setdefault(e.name, {})[e] = None
    return {name: Extension(kind, name, tuple(found)) for name, found in sorted(by_name.items())}


def cache_folder() -> Path:
    """Where what can be had again is kept: $XDG_CACHE_HOME/trivium or ~/.cache/trivium."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium"


def find(kind: str, name: str, wanted: Any = Callable) -> tuple[Any, str]:
    """What the plugin called `name` gives, an instance of `wanted`, and how to call it in errors; (None, ...) if there is none.
    PluginError if it can't be loaded or gives something else."""
    extension = installed(kind).get(name)
    if extension is None:
        return None, ""
    return expect(wanted, extension.load(), str(extension)), str(extension)
