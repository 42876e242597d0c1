"""The public surface for plugin authors: the contract, the hook, and the ready-made parts a backend may build on.

Everything named here is stable within a plugin API version; everything else in trivium may change freely.
"""

from __future__ import annotations

from trivium.extensions import cache_folder
from trivium.ops import Pages
from trivium.plugin.contract import (
    API_VERSION, Backend, Capabilities, Device, Executable, Kernel, Memory, OperatorTime, Probe, Profile, Session, Step, Tensor,
    WeightFormat,
)  # fmt: skip
from trivium.plugin.eager import EagerExecutable, HostFallbackWarning, announce_fallbacks, run_on_host
from trivium.plugin.hooks import ModelSource, hookimpl, hookspec
from trivium.plugin.registry import Status, find_backends, find_plugins, resolve
from trivium.plugin.select import Choice, select_kernels

__all__ = [
    "API_VERSION", "Backend", "Capabilities", "Choice", "Device", "EagerExecutable", "Executable", "HostFallbackWarning", "Kernel",
    "Memory", "ModelSource", "OperatorTime", "Pages", "Probe", "Profile", "Session", "Status", "Step", "Tensor", "WeightFormat",
    "announce_fallbacks", "cache_folder", "find_backends", "find_plugins", "hookimpl", "hookspec", "resolve", "run_on_host",
    "select_kernels",
]  # fmt: skip
