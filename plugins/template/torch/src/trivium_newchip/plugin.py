"""newchip as trivium finds it: a torch device. Everything that is not said here is as in trivium's own torch backend."""

from __future__ import annotations

from collections.abc import Sequence

from trivium.plugin import Backend, Device, Kernel, hookimpl
from trivium_torch.plugin import TorchBackend


class NewChipBackend(TorchBackend):
    name = "newchip"
    api_version = 2
    version = "0.1.0"
    device_types = ("cpu",)
    """Torch's name of the device; "cpu" until yours is there. If a package adds it to torch, import that in probe()."""

    def kernels(self, device: Device) -> Sequence[Kernel]:
        """Those in plain torch, and newchip's own."""
        from trivium_newchip.kernels import KERNELS

        return (*KERNELS, *super().kernels(device))


@hookimpl
def trivium_backend() -> Backend:
    return NewChipBackend()
