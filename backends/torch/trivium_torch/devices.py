"""What differs from one torch device to another, by torch's own generic interface."""

from __future__ import annotations

import platform
from typing import Any

import torch

from trivium.plugin.hostinfo import available_memory, total_memory


def about(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type


def memory_info(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes; total 0 where torch can't tell."""
    if device.type == "cpu":
        return available_memory(), total_memory()
    ask: Any = getattr(torch.get_device_module(device), "mem_get_info", None)
    free, total = ask(device) if ask is not None else (0, 0)
    return int(free), int(total)
