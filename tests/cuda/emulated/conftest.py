"""Everything here runs with Triton's interpreter, in a process of its own: tests/cuda/run.sh starts it. Elsewhere it is skipped."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("triton")

PLUGIN = """
import emulated_cuda
from trivium.plugin import hookimpl

@hookimpl
def trivium_backend():
    return emulated_cuda.backend()
"""


@pytest.fixture
def emulated(tmp_path, monkeypatch):
    """The device behind the backend "cuda_emulated", new for each test."""
    import emulated_cuda
    from fake_plugins import install

    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "cuda_emulated", PLUGIN)
    device = emulated_cuda.EmulatedDevice()
    monkeypatch.setattr(emulated_cuda, "DEVICES", (device,))
    return device
