"""A real NPU in the place of the emulated one, for the tests that need nothing of the emulation."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pytest


@cache
def has_cann() -> bool:
    """Whether the process finds a CANN on its library path. False once the emulated one is loaded: the answer is kept."""
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


class NoLog:
    """Results are compared on a real NPU; who asks which operators ran is told that it keeps no log."""

    def clear(self) -> None:
        """There is nothing to clear."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip("a real NPU keeps no log of its operators")


class Silicon:
    """What tests use of the Device (see the package) on a real NPU."""

    def __init__(self) -> None:
        import torch
        import torch_npu  # noqa: F401

        self.log = NoLog()
        self._synchronize = torch.npu.synchronize

    def flush(self) -> None:
        self._synchronize()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "graph_limit":
            pytest.skip("a real NPU's streams can't be limited")
        super().__setattr__(name, value)
