"""The `trivium` command."""

from __future__ import annotations

from trivium.cli.main import main

__all__ = ["main"]
