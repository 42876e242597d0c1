"""Speculative decoding: drafters guess the next tokens, the target checks them in one step, the output stays what it was."""

from __future__ import annotations

from trivium.engine.speculation.drafter import Ask, Drafter, NgramDrafter, Speculative, SuffixDrafter, lookup_drafter
from trivium.engine.speculation.model import HeadDrafter, ModelDrafter
from trivium.engine.speculation.speculator import Speculator

__all__ = [
    "Ask", "Drafter", "HeadDrafter", "ModelDrafter", "NgramDrafter", "Speculative", "Speculator", "SuffixDrafter", "lookup_drafter",
]  # fmt: skip
