"""The table of docs/ascend.md: what a decode step at batch 1 could not beat on a chip as fast as is assumed in chips.py."""

from __future__ import annotations

from trivium_ascend.chips import CHIPS, Chip

BYTES = {"16 bits": 2.0, "w8a8": 1.0, "int4": 4.5 / 8}
"""Bytes a weight."""


def tokens_a_second(chip: Chip, parameters: float, format: str, batch: int = 1) -> float:
    """batch tokens over the time that a step needs at least: to read every weight once, and for 2 · parameters · batch
    operations."""
    arithmetic = chip.int8 if format == "w8a8" else chip.half
    return batch / max(parameters * BYTES[format] / chip.bandwidth, 2 * parameters * batch / arithmetic)


def table(parameters: float = 8e9) -> str:
    """A line for each chip and format."""
    rows = ((chip, f) for chip in CHIPS.values() for f in BYTES if _has(chip, f))
    return "\n".join(f"{chip.name:6} {format:9} {tokens_a_second(chip, parameters, format):6.0f} tokens/s" for chip, format in rows)


def _has(chip: Chip, format: str) -> bool:
    return {"16 bits": True, "w8a8": chip.lacks("npu_quant_matmul") is None, "int4": chip.int4}[format]


if __name__ == "__main__":
    print(table())
