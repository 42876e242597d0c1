"""The `cpu` backend as trivium finds it. Nothing compiled is imported before probe()."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from trivium.errors import BackendUnavailableError, InvalidRequestError, UnsupportedError
from trivium.plugin import API_VERSION, Backend, Capabilities, Device, Kernel, Probe, Session, hookimpl
from trivium.plugin.hostinfo import total_memory
from trivium_cpu.formats import FORMATS
from trivium_cpu.threads import count_threads

TIERS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "neon")
_OPTIONS = ("dtype", "isa", "max_batched_tokens", "max_model_len", "max_seqs", "profile", "strict", "threads", "weight_cache")
_NO_OTHER_DTYPE = "activations are float32 on this backend; weights and pages may be smaller"


class CpuBackend(Backend):
    """Kernels in C++ for this machine's best instruction set; see docs/architecture.md and native/."""

    name = "cpu"
    api_version = API_VERSION
    version = "0.1.0"
    priority = 10

    def probe(self) -> Probe:
        try:
            from trivium_cpu import _native
        except ImportError as e:
            return Probe((), f"its compiled module can't be imported ({e}); install trivium again with a C++ compiler present")
        count = count_threads()
        details = {
            "about": f"{_native.linear.isas()[0]}, {count.threads} threads: {count.reason}",
            "isa": _native.tiers()[0], "isas": tuple(_native.tiers()), "linear": _native.linear.isas()[0], "threads": count.threads,
            "threads_reason": count.reason, **{k: v for k, v in _native.features().items() if v},
        }  # fmt: skip
        return Probe((Device(0, _native.cpu_name() or "cpu", total_memory(), details),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(
            dtypes=("float32",),
            weight_formats=FORMATS,
            kv_dtypes=("bfloat16", "float16", "float32", "int8"),
            page_sizes=(32, 16, 64, 128),
            threads=device.details.get("threads", 0),
            unsupported={
                "bfloat16": _NO_OTHER_DTYPE, "float16": _NO_OTHER_DTYPE, "collectives": "one process runs the whole model here",
            },
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        from trivium_cpu.fusions import FUSED_KERNELS
        from trivium_cpu.lower_models import MODEL_KERNELS
        from trivium_cpu.lower_ops import OPERATOR_KERNELS

        return (*FUSED_KERNELS, *OPERATOR_KERNELS.values(), *MODEL_KERNELS)

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        """Own options: `threads`, `isa` ("auto" or one of TIERS), `profile` (time every operation), `strict`, `weight_cache` (True:
        weights that are rounded on load are kept in ~/.cache/trivium/packed, so that the next start only reads them; False: they
        are not; a path: in that folder)."""
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise InvalidRequestError(f"the cpu backend has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
        if options.get("dtype", "float32") not in ("float32", "auto"):
            raise UnsupportedError(f"dtype {options['dtype']!r}: {_NO_OTHER_DTYPE}", param="dtype")
        if not isinstance(options.get("weight_cache", True), bool | str | PathLike):
            message = f"weight_cache must be True, False or a folder, not {options['weight_cache']!r}"
            raise InvalidRequestError(message, param="weight_cache")
        count = count_threads(options.get("threads"))
        from trivium_cpu import _native
        from trivium_cpu.session import CpuSession

        runtime = _native.Runtime(count.threads, _tier(options.get("isa", "auto"), _native.tiers(), _native.missing))
        return CpuSession(self.kernels(device), runtime, options)


def _tier(asked: str, available: Sequence[str], missing: Callable[[str], str]) -> str:
    """The tier of kernels for the option `isa`; missing(tier): why a tier is not among the available ones."""
    if asked == "auto":
        return available[0]
    if asked not in TIERS:
        raise InvalidRequestError(f"isa {asked!r} is not known; choose from auto, {', '.join(TIERS)}", param="isa")
    if asked not in available:
        reason = f"isa {asked!r} is not available: {missing(asked)}; this machine runs {', '.join(available)}"
        raise BackendUnavailableError(reason, param="isa")
    return asked


@hookimpl
def trivium_backend() -> Backend:
    return CpuBackend()
