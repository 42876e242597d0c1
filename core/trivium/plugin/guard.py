"""What a plugin says and raises, held to the contract: a fault of a plugin is a PluginError with its name and reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trivium.errors import PluginError, TriviumError
from trivium.plugin.contract import Backend, Capabilities, Device, Kernel, WeightFormat


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Whatever is raised inside, other than a TriviumError or an interrupt, becomes a PluginError: `what` failed, and why."""
    try:
        yield
    except TriviumError:
        raise
    except (Exception, SystemExit) as e:
        raise PluginError(f"{what} failed: {type(e).__name__}: {e}") from e


def expect(kind: type, value: Any, what: str) -> Any:
    """`value`, which `what` returned; PluginError if it is of another kind."""
    if not isinstance(value, kind):
        raise PluginError(f"{what} returned a {type(value).__name__}, not a {kind.__name__}")
    return value


def capabilities_of(backend: Backend, device: Device) -> Capabilities:
    """backend.capabilities(device) without a lie that the core would stumble over later; PluginError otherwise."""
    with blame(f"backend {backend.name!r}: capabilities()"):
        can: Capabilities = expect(Capabilities, backend.capabilities(device), f"backend {backend.name!r}: capabilities()")
        fault = _fault(can)
    if fault:
        raise PluginError(f"backend {backend.name!r}: capabilities() {fault}")
    return can


def _fault(can: Any) -> str:
    if not isinstance(can.sampling, frozenset | None) or not isinstance(can.unsupported, Mapping):
        return "says sampling or unsupported of another type than the contract's"
    formats = tuple(f.name for f in can.weight_formats if isinstance(f, WeightFormat))
    listed = {"dtypes": can.dtypes, "kv_dtypes": can.kv_dtypes, "page_sizes": can.page_sizes, "weight_formats": formats}
    for name, values in listed.items():
        kind = int if name == "page_sizes" else str
        if not values or len(set(values)) != len(values) or any(type(v) is not kind for v in values):
            return f"says {name} = {values!r}: it must list something, each once"
    if min(can.page_sizes) < 1 or (can.max_batched_tokens is not None and can.max_batched_tokens < 1):
        return f"says page_sizes = {can.page_sizes!r}, max_batched_tokens = {can.max_batched_tokens!r}: from 1 up"
    return "" if "float32" in formats else f"says weight_formats = {formats!r}: float32 must be among them"


def kernels_of(backend: Backend, device: Device) -> Sequence[Kernel]:
    """backend.kernels(device), each of them a Kernel; PluginError otherwise."""
    with blame(f"backend {backend.name!r}: kernels()"):
        return [expect(Kernel, k, f"backend {backend.name!r}: kernels()") for k in backend.kernels(device)]
