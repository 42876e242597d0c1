"""Smaller checkpoints, and what they cost: the commands `trivium quantize` and `trivium eval`, and the functions behind them."""

from __future__ import annotations

from trivium_compress.recipe import Recipe
from trivium_compress.work import Calibration, quantise

__all__ = ["Calibration", "Recipe", "quantise"]
