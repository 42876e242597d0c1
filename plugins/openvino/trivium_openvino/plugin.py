"""The `openvino` backend as trivium finds it. OpenVINO is not imported before probe()."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import API_VERSION, Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium.plugin.hostinfo import total_memory
from trivium_openvino.formats import FORMATS

_OPTIONS = (
    "cache_dir", "dtype", "hint", "max_batched_tokens", "max_model_len", "max_seqs", "properties", "strict", "threads",
)  # fmt: skip
_HINTS = ("latency", "throughput")
_ALIKE = {"float32": ("u8", "float32", "float16"), "bfloat16": ("u8", "bfloat16")}
"""KV formats that OpenVINO's CPU kernels take for each activation dtype."""


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """openvino is imported inside as where its telemetry package is not installed: with it, the import reports itself to the maker,
    from a process that it forks off a thread of this one."""
    absent = sys.modules.setdefault("openvino_telemetry", cast(Any, None)) is None
    try:
        yield
    finally:
        if absent:
            del sys.modules["openvino_telemetry"]


class OpenVinoBackend(Backend):
    """OpenVINO's devices; see lowering.py for how a Program becomes a model."""

    name = "openvino"
    api_version = API_VERSION
    version = "0.1.0"
    priority = 5

    def probe(self) -> Probe:
        try:
            with _unreported():
                import openvino as ov
            core = ov.Core()
            names = [name for name in core.available_devices if name.split(".")[0] in ("CPU", "GPU", "NPU")]
            devices = tuple(_device(core, i, name, ov.__version__) for i, name in enumerate(names))
        except Exception as e:
            return Probe((), f"OpenVINO can't be used ({type(e).__name__}: {e}); install it again: pip install openvino")
        return Probe(devices, "" if devices else "OpenVINO sees no CPU, GPU or NPU device")

    def capabilities(self, device: Device) -> Capabilities:
        dtypes = tuple(d for d in _ALIKE if d == "float32" or d in device.details.get("dtypes", ()))
        kv = dict.fromkeys(kv for d in dtypes for kv in _ALIKE[d])
        no = {
            "float16": "OpenVINO computes in float32 or bfloat16 on a CPU",
            "int8": "OpenVINO's 8-bit pages are u8 with a zero point", "collectives": "one process runs the whole model here",
        }  # fmt: skip
        if "bfloat16" not in dtypes:
            no["bfloat16"] = "this processor has no bfloat16 arithmetic"
        threads = int(device.details.get("threads", 0))
        return Capabilities(
            dtypes=dtypes, weight_formats=FORMATS, kv_dtypes=tuple(kv), page_sizes=(32,), asynchronous=True, threads=threads,
            kv_refused=_refused, unsupported=no,
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        from trivium_openvino.attention import ATTENTION_KERNELS
        from trivium_openvino.lower_ops import OPERATOR_KERNELS

        return (*ATTENTION_KERNELS, *OPERATOR_KERNELS)

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        """Own options: `threads`; `hint` ("latency" or "throughput"); `cache_dir` (a folder for compiled models); `properties` (of
        OpenVINO, by name, as they are); `strict`."""
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise InvalidRequestError(f"the openvino backend has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
        can = self.capabilities(device)
        if options.get("dtype", "float32") not in can.dtypes:
            reason = can.unsupported.get(options["dtype"], "it is not known")
            raise UnsupportedError(f"dtype {options['dtype']!r}: {reason}; possible: {', '.join(can.dtypes)}", param="dtype")
        if options.get("hint", "latency") not in _HINTS:
            raise InvalidRequestError(f"hint must be {' or '.join(_HINTS)}, not {options['hint']!r}", param="hint")
        threads = options.get("threads")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise InvalidRequestError(f"threads must be a positive whole number, not {threads!r}", param="threads")
        if device.details.get("kind", "CPU") != "CPU":
            message = f"{device.name}: this plugin does not know how OpenVINO's {device.details['kind']} device lays out its pages"
            raise UnsupportedError(f"{message}; openvino:CPU is possible", param="backend")
        from trivium_openvino.session import OvSession

        return OvSession(device.name, self.kernels(device), options)


def _refused(dtype: str, kv_dtype: str) -> str | None:
    kinds = _ALIKE.get(dtype, ())
    return None if kv_dtype in kinds else f"OpenVINO attends over {' or '.join(kinds)} pages when it computes in {dtype}"


def _device(core: Any, index: int, name: str, version: str) -> Device:
    """One device under OpenVINO's own name, so that a user writes openvino:CPU or openvino:GPU.1."""
    kind = name.split(".")[0]
    can = core.get_property(name, "OPTIMIZATION_CAPABILITIES")
    threads = int(core.get_property(name, "INFERENCE_NUM_THREADS")) if kind == "CPU" else 0
    about = f"{core.get_property(name, 'FULL_DEVICE_NAME')}, OpenVINO {version.split('-')[0]}"
    details = {"kind": kind, "about": about, "dtypes": ("bfloat16",) if "BF16" in can else ()}
    return Device(index, name, total_memory() if kind == "CPU" else 0, {**details, "threads": threads})


@hookimpl
def trivium_backend() -> Backend:
    return OpenVinoBackend()
