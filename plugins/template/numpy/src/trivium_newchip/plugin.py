"""newchip as trivium finds it: what devices there are, what they can do, and how one is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivium.errors import InvalidRequestError
from trivium.plugin import Backend, Capabilities, Device, Kernel, Probe, Session, WeightFormat, hookimpl

OPTIONS = frozenset({"dtype", "max_batched_tokens", "max_seqs", "max_model_len", "strict"})
"""What open() is told by trivium; with graph_capture also "graph_sizes". One of your own goes here, too (--option NAME=VALUE)."""
PLAIN = frozenset({"float32", "float16", "bfloat16"})


class NewChipBackend(Backend):
    name = "newchip"
    api_version = 2
    version = "0.1.0"

    def probe(self) -> Probe:
        """Import the driver here, not above. Never raise: Probe((), "the driver is not installed") says why there is no device."""
        return Probe((Device(0, "newchip 0", memory_bytes=4 << 30),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(
            dtypes=("float32",),
            weight_formats=(WeightFormat("float32", 32.0, PLAIN),),
            kv_dtypes=("float32",),
            page_sizes=(16, 32, 64),
            unsupported={"bfloat16": "newchip computes in float32"},
        )

    def kernels(self, device: Device) -> Sequence[Kernel]:
        from trivium_newchip.kernels import KERNELS

        return KERNELS

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        from trivium_newchip.session import NewChipSession

        if unknown := sorted(options.keys() - OPTIONS):
            known = ", ".join(sorted(OPTIONS))
            raise InvalidRequestError(f"the newchip backend has no option {', '.join(unknown)}; it has {known}")
        return NewChipSession(device, self.kernels(device), strict=bool(options.get("strict")))


@hookimpl
def trivium_backend() -> Backend:
    return NewChipBackend()
