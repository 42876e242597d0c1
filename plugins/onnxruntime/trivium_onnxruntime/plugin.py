"""The `onnxruntime` backend as trivium finds it. onnxruntime and onnx are imported in probe() at the earliest.

Its first device is `cpu`; those of the CUDA provider follow, where there are any, and are taken only if asked for by name. What
there is of them, or why there is nothing, the details of `cpu` say ("cuda"). Nothing of it was ever run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trivium.errors import BackendUnavailableError, InvalidRequestError, UnsupportedError
from trivium.plugin import API_VERSION, Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium.plugin.hostinfo import total_memory
from trivium_onnxruntime import driver
from trivium_onnxruntime.formats import CUDA_FORMATS, FORMATS
from trivium_onnxruntime.pages import KV_DTYPES
from trivium_onnxruntime.providers import NEVER_RUN, about_cuda, cuda_devices

NEEDS = (1, 32)
"""The first onnxruntime whose GroupQueryAttention takes chunks of several sequences (its input `query_seqlens`)."""
CUDA_NEEDS = (1, 31)
"""The oldest one whose PagedAttention was seen to take slots, sinks and bounds from the host (its inputs 10, 11 and 16)."""
_OPTIONS = (
    "accuracy_level", "arena", "dtype", "max_batched_tokens", "max_model_len", "max_seqs", "rows_bytes", "spinning", "strict",
    "threads",
)  # fmt: skip
_CUDA_OPTIONS = ("dtype", "max_batched_tokens", "max_model_len", "max_seqs", "strict")
_NO_OTHER_DTYPE = "activations are float32 on onnxruntime's CPU provider; weights and pages may be smaller"
_HALF_ONLY = "activations and pages are float16 on onnxruntime's CUDA provider: its PagedAttention takes nothing wider"
_NEEDED = f"from {'.'.join(map(str, NEEDS))} on its attention takes chunks of several sequences"
_ONE_PROCESS = "one process runs the whole model here"


class OnnxBackend(Backend):
    """Whole Programs as ONNX models; see README.md."""

    name = "onnxruntime"
    api_version = API_VERSION
    version = "0.1.0"
    priority = 2

    def probe(self) -> Probe:
        try:
            import onnx
            import onnxruntime
        except ImportError as e:
            return Probe((), f"{e}; install onnxruntime and onnx")
        version = onnxruntime.__version__
        found = tuple(int(part) for part in version.split(".")[:2])
        cards, no_cards = cuda_devices() if found >= CUDA_NEEDS else ((), "")
        too_old = "" if found >= NEEDS else f"onnxruntime {version} is too old for its CPU provider: {_NEEDED}"
        about = {"about": f"onnxruntime {version}, its CUDA provider; {NEVER_RUN}", "cpu": too_old}
        devices = [Device(n + 1, name, _card_bytes(n), about) for n, name in enumerate(cards)]
        if not too_old:
            devices.insert(0, Device(0, "cpu", total_memory(), _details(version, onnx.__version__)))
        return Probe(tuple(devices), "; ".join(filter(None, (too_old, no_cards))) if not devices else "")

    def capabilities(self, device: Device) -> Capabilities:
        return _on_cpu(device) if device.name == "cpu" else _on_cuda()

    def kernels(self, device: Device) -> Sequence[Kernel]:
        from trivium_onnxruntime.fusions import FUSED_KERNELS
        from trivium_onnxruntime.lower_ops import OPERATOR_KERNELS

        return (*FUSED_KERNELS, *OPERATOR_KERNELS)

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        """Own options of `cpu`: `threads`; `accuracy_level` (4: what is multiplied with 4- and 8-bit weights is rounded to 8 bits,
        0: not); `arena` (onnxruntime keeps freed memory), `spinning` (its threads stay awake between operators), `rows_bytes` (what
        rows may take; by default as much as the pages), `strict`."""
        if device.name != "cpu":
            return self._open_cuda(device, options)
        _check(options, _OPTIONS, "float32", _NO_OTHER_DTYPE)
        if options.get("accuracy_level", 4) not in (0, 4):
            raise InvalidRequestError(f"accuracy_level is 0 or 4, not {options['accuracy_level']!r}", param="accuracy_level")
        from trivium_onnxruntime.session import OnnxSession

        return OnnxSession(self.kernels(device), {**options, "threads": _threads(options.get("threads"))})

    def _open_cuda(self, device: Device, options: Mapping[str, Any]) -> Session:
        """BackendUnavailableError for a device that the CUDA provider doesn't have."""
        names, reason = cuda_devices()
        if device.name not in names:
            raise BackendUnavailableError(reason or f"onnxruntime's CUDA provider has {', '.join(names)}, not {device.name}")
        _check(options, _CUDA_OPTIONS, "float16", _HALF_ONLY)
        from trivium_onnxruntime.cuda import CudaSession

        return CudaSession(self.kernels(device), options, names.index(device.name))


def _details(version: str, onnx_version: str) -> dict[str, Any]:
    """Of the device `cpu`."""
    import onnxruntime

    threads = _threads(None)
    return {
        "about": f"onnxruntime {version}, {threads} threads", "onnxruntime": version, "onnx": onnx_version,
        "providers": tuple(onnxruntime.get_available_providers()), "threads": threads, "cuda": about_cuda(),
    }  # fmt: skip


def _on_cpu(device: Device) -> Capabilities:
    return Capabilities(
        dtypes=("float32",),
        weight_formats=FORMATS,
        kv_dtypes=tuple(KV_DTYPES),
        page_sizes=(16, 32, 64, 128),
        threads=device.details.get("threads", 0),
        unsupported={
            "bfloat16": _NO_OTHER_DTYPE,
            "float16": _NO_OTHER_DTYPE,
            "int8": "pages of int8 have a scale for each token and head, onnxruntime's attention one for all",
            "paged attention": "onnxruntime has it for its CUDA provider only: a running sequence has a copy of its pages",
            "cuda": device.details.get("cuda", NEVER_RUN),
            "collectives": _ONE_PROCESS,
        },
    )


def _on_cuda() -> Capabilities:
    """Page sizes: PagedAttention takes powers of two from 16 on; its fastest kernels want 256 for heads of up to 64 numbers, 128
    for those of up to 128, else 64."""
    return Capabilities(
        dtypes=("float16",),
        weight_formats=CUDA_FORMATS,
        kv_dtypes=("float16",),
        page_sizes=(256, 128, 64, 32, 16),
        unsupported={
            "a run on a card": NEVER_RUN,
            "float32": _HALF_ONLY,
            "bfloat16": "numpy, in which weights and pages are handed over, has no bfloat16",
            "int8": "pages of int8 have a scale for each token and head, onnxruntime's attention one for all",
            "collectives": _ONE_PROCESS,
        },
    )


def _check(options: Mapping[str, Any], known: Sequence[str], dtype: str, why: str) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InvalidRequestError(f"the onnxruntime backend has no option {', '.join(unknown)} here; it has {', '.join(known)}")
    if options.get("dtype", dtype) not in (dtype, "auto"):
        raise UnsupportedError(f"dtype {options['dtype']!r}: {why}", param="dtype")


def _card_bytes(index: int) -> int:
    """0, which is unknown, without a driver that says."""
    try:
        return driver.total_bytes(index)
    except BackendUnavailableError:
        return 0


def _threads(asked: Any) -> int:
    """As many as there are processors for this process, unless the user says how many."""
    if asked is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if type(asked) is not int or not 1 <= asked <= 1024:
        raise InvalidRequestError(f"threads must be a whole number from 1 to 1024, not {asked!r}", param="threads")
    return asked


@hookimpl
def trivium_backend() -> Backend:
    return OnnxBackend()
