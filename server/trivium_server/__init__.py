"""trivium's HTTP server: the dialects of OpenAI, Anthropic and Ollama over one internal request, on trivium's public names."""

from __future__ import annotations

from trivium_server.app import App
from trivium_server.models import Models, Served, Slot
from trivium_server.moderation import Asked, Moderator
from trivium_server.settings import Settings

__all__ = ["App", "Asked", "Models", "Moderator", "Served", "Settings", "Slot"]
