"""Resident weight formats by name; no torch in here, since capabilities are asked for without it."""

from __future__ import annotations

from trivium_torch.formats import FORMATS as FLOATS

FORMATS = FLOATS
