"""Checkpoints: where they come from (sources), how they are stored (safetensors, formats), one view of all (checkpoint)."""

from __future__ import annotations

from trivium.weights.checkpoint import Checkpoint, open_checkpoint
from trivium.weights.sources import ALIASES, resolve

__all__ = ["ALIASES", "Checkpoint", "open_checkpoint", "resolve"]
