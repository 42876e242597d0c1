"""The `trivium` command."""

from __future__ import annotations

from trivium.cli.main import main
from trivium.cli.parser import Command

__all__ = ["Command", "main"]
