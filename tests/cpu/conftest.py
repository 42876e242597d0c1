"""Instruction sets, for tests of the CPU backend."""

from __future__ import annotations

import pytest


@pytest.fixture
def isa(request, monkeypatch):
    """An instruction set of this machine, or one whose kernels run on an emulation, which only tests may open."""
    native, name = pytest.importorskip("trivium_cpu._native"), request.param
    if name in native.emulated_tiers():
        monkeypatch.setattr("trivium_cpu.plugin._tier", lambda *_: name)
    elif name not in (*native.tiers(), "auto"):
        pytest.skip(f"this processor has no {name}")
    return name
