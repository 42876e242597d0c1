"""The hook a plugin implements. Entry point group: `trivium`; the entry point's name is the backend's name."""

from __future__ import annotations

import pluggy

from trivium.plugin.contract import Backend

PROJECT = "trivium"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Hook specifications."""

    @hookspec
    def trivium_backend(self) -> Backend:  # type: ignore[empty-body]
        """Returns the plugin's one Backend. Must be cheap: no heavy import, no device access (that is Backend.probe's place)."""
