"""The backend as trivium finds it: which NPUs there are, or in one line why there are none, and what each can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from trivium.plugin import Backend, Capabilities, Device, Kernel, Probe, hookimpl
from trivium_ascend.chips import Chip, chip_of
from trivium_ascend.formats import FORMATS
from trivium_torch.loading import LIBRARIES, import_torch, missing
from trivium_torch.plugin import TorchBackend

if TYPE_CHECKING:
    from trivium_torch.session import TorchSession

PAGE_SIZES = (128,)
MEMORY_SHARE = 0.8
"""The rest is for steps and the graphs' own memory."""


class AscendBackend(TorchBackend):
    """torch-npu's fused operators where a chip has them, plain torch operations elsewhere."""

    name = "ascend"
    version = "0.1.0"
    priority = 20
    device_types = ("npu",)
    options = frozenset({"nz", "graphs"})
    """graphs: False leaves decode steps uncaptured. nz: whether quantised weights are kept in the layout FRACTAL_NZ; by default
    where the chip gains by it."""

    def probe(self) -> Probe:
        reason = unavailable()
        if reason:
            return Probe((), reason)
        return super().probe()

    def device_names(self) -> Sequence[str]:
        import torch

        return [f"npu:{i}" for i in range(torch.get_device_module("npu").device_count())]

    def describe(self, index: int, name: str) -> Device:
        import torch

        found = super().describe(index, name)
        soc = str(torch.get_device_module("npu").get_device_name(index))
        about = f"{soc}, {chip_of(soc).series}, torch-npu {version('torch-npu')}"
        return Device(index, name, found.memory_bytes, {"about": about, "soc": soc, "torch_npu": version("torch-npu")})

    def capabilities(self, device: Device) -> Capabilities:
        chip = chip_of_device(device)
        formats = sorted(FORMATS, key=lambda f: (*chip.dtypes, f.name).index(f.name))
        return Capabilities(
            dtypes=chip.dtypes, weight_formats=tuple(formats), kv_dtypes=(*chip.dtypes, "int8"),
            kv_refused=_refused, page_sizes=PAGE_SIZES, asynchronous=True, graph_capture=chip.graphs, max_graphs=chip.streams,
            graph_cost=lambda layers: layers + 1, collectives=True, memory_share=MEMORY_SHARE, unsupported=_lacking(chip),
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        """torch-npu's scaled_dot_product_attention is another fused operator, for training, with limits of its own: where the one
        for inference doesn't fit, attention is made of products and a softmax."""
        from trivium_ascend.kernels import kernels_for
        from trivium_torch.kernels.attention import TORCH_FUSED

        plain = (kernel for kernel in super().kernels(device) if kernel.run not in TORCH_FUSED)
        return (*kernels_for(chip_of_device(device)), *plain)

    def session_class(self) -> type[TorchSession]:
        from trivium_ascend.session import AscendSession

        return AscendSession


def chip_of_device(device: Device) -> Chip:
    """The chip of a device that probe() found."""
    return chip_of(str(device.details.get("soc", "")))


def _refused(dtype: str, kv_dtype: str) -> str | None:
    """Queries are not rounded a second time, to the other kind of 16 bits, to suit the pages."""
    if {dtype, kv_dtype} != {"bfloat16", "float16"}:
        return None
    return f"the attention operator takes keys and values of 16 bits in the activations' own dtype, {dtype}"


def _lacking(chip: Chip) -> Mapping[str, str]:
    dtypes = ("bfloat16", "float16", "float32")
    return {name: f"{chip.series} has no {name}" for name in dtypes if name not in chip.dtypes}


def unavailable() -> str:
    """In one line, why torch-npu can't be used here; "" if it can, and then it is imported."""
    versions = {name: _version(name) for name in ("torch", "torch-npu")}
    if absent := [name for name, found in versions.items() if not found]:
        return f"{' and '.join(absent)} not installed: pip install trivium[ascend]"
    if _series(versions["torch"]) != _series(versions["torch-npu"]):
        found = versions["torch-npu"]
        return f"torch-npu {found} was built for torch {_series(found)}; torch is {versions['torch']}"
    if reason := missing(LIBRARIES["torch_npu"]):
        return f"CANN is not on the library path ({reason}): source its set_env.sh"
    return _imported(versions["torch-npu"])


def _imported(torch_npu: str) -> str:
    try:
        import_torch()
        import torch_npu as module
    except Exception as e:  # a driver, CANN or another accelerator that doesn't fit says so in whatever way
        return f"torch-npu {torch_npu} can't be imported: {_one_line(e)}"
    try:
        count = int(module.npu.device_count())
    except RuntimeError as e:
        return f"torch-npu {torch_npu} can't ask for devices: {_one_line(e)}"
    return "" if count else f"torch-npu {torch_npu} sees no device: is the driver loaded (npu-smi info)?"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _series(found: str) -> str:
    return ".".join(found.split(".")[:2])


def _one_line(e: BaseException) -> str:
    lines: list[Any] = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"


@hookimpl
def trivium_backend() -> Backend:
    return AscendBackend()
