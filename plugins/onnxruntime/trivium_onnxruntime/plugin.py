"""The `onnxruntime` backend as trivium finds it. onnxruntime and onnx are imported in probe() at the earliest.

Its one device is `cpu`. What the CUDA provider has is said in that device's details ("cuda"), and refused; not run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import API_VERSION, Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium.plugin.hostinfo import total_memory
from trivium_onnxruntime.formats import FORMATS
from trivium_onnxruntime.pages import KV_DTYPES
from trivium_onnxruntime.providers import NOT_LOWERED, about_cuda

NEEDS = (1, 32)
"""The first onnxruntime whose GroupQueryAttention takes chunks of several sequences (its input `query_seqlens`)."""
_OPTIONS = (
    "accuracy_level", "arena", "dtype", "max_batched_tokens", "max_model_len", "max_seqs", "rows_bytes", "spinning", "strict",
    "threads",
)  # fmt: skip
_NO_OTHER_DTYPE = "activations are float32 on onnxruntime's CPU provider; weights and pages may be smaller"


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
        found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
        if found < NEEDS:
            return Probe((), f"onnxruntime {onnxruntime.__version__} is too old: from {'.'.join(map(str, NEEDS))} on its attention "
                             "takes chunks of several sequences")  # fmt: skip
        threads = _threads(None)
        details = {
            "about": f"onnxruntime {onnxruntime.__version__}, {threads} threads", "onnxruntime": onnxruntime.__version__,
            "onnx": onnx.__version__, "providers": tuple(onnxruntime.get_available_providers()), "threads": threads,
            "cuda": about_cuda(),
        }  # fmt: skip
        return Probe((Device(0, "cpu", total_memory(), details),))

    def capabilities(self, device: Device) -> Capabilities:
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
                "cuda": device.details.get("cuda", NOT_LOWERED),
                "collectives": "one process runs the whole model here",
            },
        )

    def kernels(self, device: Device) -> Sequence[Kernel]:
        from trivium_onnxruntime.fusions import FUSED_KERNELS
        from trivium_onnxruntime.lower_ops import OPERATOR_KERNELS

        return (*FUSED_KERNELS, *OPERATOR_KERNELS)

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        """Own options: `threads`; `accuracy_level` (4: what is multiplied with 4- and 8-bit weights is rounded to 8 bits, 0: not);
        `arena` (onnxruntime keeps freed memory), `spinning` (its threads stay awake between operators), `rows_bytes` (what rows
        may take; by default as much as the pages), `strict`."""
        if device.name != "cpu":
            raise UnsupportedError(f"device {device.name!r}: {NOT_LOWERED}", param="backend")
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise InvalidRequestError(f"the onnxruntime backend has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
        if options.get("dtype", "float32") not in ("float32", "auto"):
            raise UnsupportedError(f"dtype {options['dtype']!r}: {_NO_OTHER_DTYPE}", param="dtype")
        if options.get("accuracy_level", 4) not in (0, 4):
            raise InvalidRequestError(f"accuracy_level is 0 or 4, not {options['accuracy_level']!r}", param="accuracy_level")
        from trivium_onnxruntime.session import OnnxSession

        return OnnxSession(self.kernels(device), {**options, "threads": _threads(options.get("threads"))})


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
