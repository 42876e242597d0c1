"""The Ascend backend for processes that find no CANN: each loads the emulated one, and meets the others over its HCCL."""

from __future__ import annotations

from functools import cache

from trivium.plugin import Backend, Probe, hookimpl
from trivium_ascend.plugin import AscendBackend


@cache
def emulate() -> None:
    from emulated_cann import load

    load()
    from emulated_cann.hccl import install

    install()


class EmulatedRanks(AscendBackend):
    name = "ascend_emulated"

    def probe(self) -> Probe:
        emulate()
        return super().probe()


@hookimpl
def trivium_backend() -> Backend:
    return EmulatedRanks()
