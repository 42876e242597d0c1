"""The `cuda` backend as trivium finds it: trivium_torch with kernels in Triton, asynchronous steps and CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium_cuda import formats
from trivium_torch.loading import import_torch, missing
from trivium_torch.plugin import TorchBackend

if TYPE_CHECKING:
    from trivium_cuda.device import DeviceApi


DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""What the driver installs and everything that uses a device loads."""


class CudaBackend(TorchBackend):
    """NVIDIA's devices. `find`: the devices there are; None: those of torch.cuda."""

    name = "cuda"
    priority = 30
    device_types = ("cuda",)
    options = frozenset({"autotune", "batch_invariant", "graph_sizes", "graph_queries", "graph_memory"})
    """graph_sizes, graph_queries: the contract's. graph_memory: bytes that captured graphs may take, by default a twentieth of the
    device's. batch_invariant: a row's bits do not depend on how many rows are computed together; products are slower for it.
    autotune: True: tiles of products with quantised weights are timed when a model is loaded, and remembered in a file of the cache
    folder; or the path of that file. Not with batch_invariant, since the tiles decide the order of sums."""

    def __init__(self, find: Callable[[], Sequence[DeviceApi]] | None = None) -> None:
        self._find = find
        self._apis: Sequence[DeviceApi] = ()

    def probe(self) -> Probe:
        """Without a driver there are no devices: torch, which takes a second to import, is not asked then."""
        if self._find is None and (reason := missing(DRIVER)):
            return Probe((), f"no driver for CUDA devices is installed ({reason})")
        for package in ("torch", "triton"):
            try:
                import_torch()  # without the extensions of other vendors that are broken here
                __import__(package)
            except ModuleNotFoundError as e:
                absent = f"{package} is not installed: pip install trivium[cuda]"
                return Probe((), absent if e.name == package else f"{package}: {e}")
            except (ImportError, OSError) as e:
                return Probe((), f"{package} can't be imported: {e}")
        from trivium_cuda import device

        try:
            self._apis = (self._find or device.find_devices)()
            found = tuple(self._described(i, api) for i, api in enumerate(self._apis))
        except RuntimeError as e:
            return Probe((), f"CUDA can't be used: {str(e).splitlines()[0]}")
        return Probe(found, "" if found else device.why_none())

    def _described(self, index: int, api: DeviceApi) -> Device:
        import torch
        import triton

        major, minor = api.capability
        about = f"{api.name}, compute capability {major}.{minor}, torch {torch.__version__}, triton {triton.__version__}"
        details = {"about": about, "capability": api.capability, "torch": torch.__version__, "triton": triton.__version__}
        return Device(index, api.name, api.memory_info()[1], details)

    def torch_device(self, device: Device) -> str:
        return str(self._apis[device.index].device)

    def capabilities(self, device: Device) -> Capabilities:
        return formats.capabilities(device.details["capability"])

    def kernels(self, device: Device) -> Sequence[Kernel]:
        if not formats.has_triton_kernels(device.details["capability"]):
            return super().kernels(device)
        from trivium_cuda import flashinfer
        from trivium_cuda.table import KERNELS
        from trivium_cuda.tuning import Notes

        return (*flashinfer.kernels(), *map(Notes(self._apis[device.index]).noted, KERNELS), *super().kernels(device))

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        memory = options.get("graph_memory")
        if memory is not None and (type(memory) is not int or memory < 0):
            raise InvalidRequestError(f"graph_memory must be a number of bytes, not {memory!r}", param="graph_memory")
        if type(options.get("batch_invariant", False)) is not bool:
            raise InvalidRequestError("batch_invariant must be True or False", param="batch_invariant")
        if options.get("batch_invariant") and not formats.has_triton_kernels(device.details["capability"]):
            raise UnsupportedError("batch_invariant needs compute capability 8.0 or later", param="batch_invariant")
        autotune = options.get("autotune", False)
        if type(autotune) is not bool and not isinstance(autotune, str):
            raise InvalidRequestError(f"autotune must be True, False or the path of a file, not {autotune!r}", param="autotune")
        if autotune and options.get("batch_invariant"):
            raise InvalidRequestError(
                "autotune goes by what it measures; batch_invariant wants the same bits always", param="autotune"
            )
        return super().open(device, options)

    def make_session(self, device: Device, options: Mapping[str, Any]) -> Session:
        from trivium_cuda.session import CudaSession

        session = CudaSession(self._apis[device.index], self.name, self.kernels(device), options)
        if session.has_triton:
            from trivium_cuda import flashinfer

            session.kernels = flashinfer.proved(session, session.kernels)
        return session


@hookimpl
def trivium_backend() -> Backend:
    return CudaBackend()
