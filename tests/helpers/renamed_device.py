"""A vendor's backend on a torch device, in one class: here the device is the processor under other names, two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivium.plugin import Backend, Device, Kernel, hookimpl
from trivium_torch.plugin import TorchBackend


class ChipBackend(TorchBackend):
    name = "chip"

    def device_names(self) -> Sequence[str]:
        return ["lane:0", "lane:1"]

    def describe(self, index: int, name: str) -> Device:
        return Device(index, name, 1 << 34, {"about": "a lane of the processor"})

    def torch_device(self, device: Device) -> str:
        return "cpu"

    def kernels(self, device: Device) -> Sequence[Kernel]:
        return (Kernel("linear", chip_linear, "chip linear", priority=10), *super().kernels(device))

    def session_class(self) -> Any:
        from trivium_torch.session import TorchSession

        class ChipSession(TorchSession):
            def draws(self) -> bool:
                return True

            def memory_info(self) -> tuple[int, int]:
                return 1 << 33, 1 << 34

        return ChipSession


def chip_linear(session: Any, args: Any, attrs: Any) -> Any:
    """The vendor's own kernel; here, a product and a sum."""
    from trivium_torch.kernels.dense import project

    y = project(session, args[0], args[1])
    return y if args[2] is None else (y + args[2]).to(y.dtype)


@hookimpl
def trivium_backend() -> Backend:
    return ChipBackend()
