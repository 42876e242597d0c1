"""`trivium bench serve`: a load generator for any server of OpenAI's dialect."""

from __future__ import annotations

from trivium_server.load.command import add_arguments

__all__ = ["add_arguments"]
