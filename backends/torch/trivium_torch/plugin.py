"""The `torch` backend as trivium finds it, and the base class of backends for one vendor's torch devices.

A subclass names itself and says what is its own: the device types, further kernels (a higher priority wins), a session class.
docs/torch.md shows one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import API_VERSION, Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium_torch.formats import DTYPES, FORMATS
from trivium_torch.loading import import_torch

if TYPE_CHECKING:
    from trivium_torch.session import TorchSession

_CONTRACT_OPTIONS = frozenset({"dtype", "max_batched_tokens", "max_model_len", "max_seqs", "strict"})
PAGE_SIZES = (16, 4, 8, 32, 64, 128, 256)


class TorchBackend(Backend):
    """Every operator as plain torch operations, call by call."""

    name = "torch"
    api_version = API_VERSION
    version = "0.1.0"
    device_types: tuple[str, ...] | None = None
    """Torch device types to offer; None: all that torch sees, and "cpu" last."""
    ranks_options: frozenset[str] = frozenset({"tensor_parallel", "pipeline_parallel"})
    """Over how many devices, from the one that is opened on, a model is shared out by heads and by layers; each has a process."""
    options: frozenset[str] = frozenset({"threads"})
    """Further options of open() beyond the contract's. threads: of torch on the host, for the whole process."""

    def probe(self) -> Probe:
        try:
            import_torch()
            import torch
        except ModuleNotFoundError as e:
            return Probe((), "torch is not installed: pip install trivium[torch]" if e.name == "torch" else f"torch: {e}")
        except (ImportError, OSError) as e:
            return Probe((), f"torch can't be imported: {e}")
        names = self.device_names()
        found = tuple(self.describe(index, name) for index, name in enumerate(names))
        return Probe(
            found, "" if found else f"torch {torch.__version__} sees no device of type {', '.join(self.device_types or ())}"
        )

    def device_names(self) -> Sequence[str]:
        """Torch's names of the devices, best first. Users ask for "torch:cpu", "torch:TYPE" (the first) or "torch:TYPE:1"."""
        import torch

        names, seen = [], torch.accelerator.current_accelerator(check_available=True)
        if seen is not None:
            names = [f"{seen.type}:{i}" for i in range(torch.accelerator.device_count())]
        return [n for n in (*names, "cpu") if self.device_types is None or n.partition(":")[0] in self.device_types]

    def describe(self, index: int, name: str) -> Device:
        """The Device of a torch device."""
        import torch

        from trivium_torch.devices import about, memory_info

        details = {"about": f"{about(torch.device(name))}, torch {torch.__version__}", "torch": torch.__version__}
        return Device(index, name, memory_info(torch.device(name))[1], details)

    def torch_device(self, device: Device) -> str:
        """Torch's name of a device that probe() found."""
        return device.name

    def capabilities(self, device: Device) -> Capabilities:
        on_host = self.torch_device(device) == "cpu"
        floats = ("float32", "bfloat16", "float16") if on_host else ("bfloat16", "float16", "float32")
        formats = sorted(FORMATS, key=lambda f: (*floats, f.name).index(f.name))
        return Capabilities(
            dtypes=floats, weight_formats=tuple(formats), kv_dtypes=(*floats, "int8"), page_sizes=PAGE_SIZES, collectives=True,
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        """Operators and fused patterns. A subclass adds its own; of several that support a call the highest priority runs."""
        from trivium_torch.kernels import FUSED_KERNELS, OPERATOR_KERNELS

        return (*FUSED_KERNELS, *OPERATOR_KERNELS)

    def session_class(self) -> type[TorchSession]:
        """What open() makes."""
        from trivium_torch.session import TorchSession

        return TorchSession

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        can = self.capabilities(device)
        graphs = {name for name, has in (("graph_sizes", can.graph_capture), ("graph_queries", can.graph_drafts)) if has}
        known = sorted(_CONTRACT_OPTIONS | self.ranks_options | self.options | graphs)
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidRequestError(f"the {self.name} backend has no option {', '.join(unknown)}; it has {', '.join(known)}")
        _set_threads(options.get("threads"))
        possible = can.dtypes
        dtype = possible[0] if options.get("dtype", "auto") == "auto" else options["dtype"]
        if dtype not in possible or dtype not in DTYPES:
            raise UnsupportedError(f"dtype {dtype!r} is not possible on {device.name}; {', '.join(possible)} are", param="dtype")
        own = {**options, "dtype": dtype}
        ways = {by: own.pop(by, 1) for by in ("tensor_parallel", "pipeline_parallel")}
        for by, ranks in ways.items():
            if type(ranks) is not int or ranks < 1:
                raise InvalidRequestError(f"{by} must be a positive integer, not {ranks!r}", param=by)
        if set(ways.values()) == {1}:
            return self.make_session(device, own)
        from trivium_torch.ranks.division import Ways
        from trivium_torch.ranks.session import RanksSession, rank_devices

        both = Ways(*ways.values())
        return RanksSession(self, rank_devices(self, device, both), own, both)

    def make_session(self, device: Device, options: Mapping[str, Any]) -> Session:
        """What open() returns. `options`: checked, with a definite "dtype"."""
        return self.session_class()(self.name, self.torch_device(device), self.kernels(device), options)


def _set_threads(count: Any) -> None:
    if count is None:
        return
    if type(count) is not int or count < 1:
        raise InvalidRequestError(f"threads must be a positive integer, not {count!r}", param="threads")
    import torch

    torch.set_num_threads(count)


@hookimpl
def trivium_backend() -> Backend:
    return TorchBackend()
