"""What a device can do, by its compute capability; no torch in here, since it is asked for without it."""

from __future__ import annotations

from trivium.plugin import Capabilities, WeightFormat
from trivium_torch.formats import FORMATS as FLOATS

TRITON_SINCE = (8, 0)
"""Below it (Turing and older) Triton's code for matrix products spills registers, and there is no bfloat16: such devices run
trivium_torch's kernels only, which plan on the host and so can't be captured in graphs."""
PAGE_SIZES = (16, 32, 64, 128, 256)
GRAPHS = 48
"""Batch sizes that may be captured; what they take of the memory is limited by the option graph_memory."""
MEMORY_SHARE = 0.95
"""Of what graphs, weights and the largest step leave, which is run to see what it takes; the rest is for what allocations waste."""
_NARROW = (
    WeightFormat("int4", bits=4.5, lossless_from=frozenset({"q4_0"}), error_budget=0.12),
    WeightFormat("int4_g128", bits=4.125, error_budget=0.15),
    WeightFormat("int4_asym_g128", bits=4.25, lossless_from=frozenset({"awq", "gptq_4", "w4a16"}), error_budget=0.14),
    WeightFormat("mxfp4", bits=4.25, lossless_from=frozenset({"mxfp4"}), error_budget=0.18),
)
_FP8 = WeightFormat("fp8", bits=8, lossless_from=frozenset({"fp8"}), error_budget=0.04)
_W8A8_FP8 = WeightFormat(
    "w8a8_fp8", bits=8, lossless_from=frozenset({"w8a8_fp8", "fp8"}), error_budget=0.04, activation_budget=0.04
)
_W8A8 = WeightFormat("w8a8", bits=8, lossless_from=frozenset({"w8a8"}), error_budget=0.02)
_INT8 = WeightFormat("int8", bits=8, lossless_from=frozenset({"w8a16", "w8a8"}), error_budget=0.02)
"""See weights.py. What is held without loss keeps the groups that it was stored with. The budgets hold for weights (activations)
without outliers beyond four standard deviations within a group (a row)."""
FP8_UNITS_SINCE = (8, 9)
"""From here on matrix units multiply e4m3 itself."""
_NO_BFLOAT16 = "bfloat16 needs compute capability 8.0 or later"


def has_triton_kernels(capability: tuple[int, int]) -> bool:
    """Whether this backend's own kernels run there."""
    return capability >= TRITON_SINCE


def weight_formats(capability: tuple[int, int]) -> tuple[WeightFormat, ...]:
    """Resident formats, best first."""
    known = {f.name: f for f in FLOATS}
    if not has_triton_kernels(capability):
        return known["float16"], known["float32"], known["int8"]
    return (*_NARROW, *_bytes(capability), *(known[name] for name in ("bfloat16", "float16", "float32")))


def _bytes(capability: tuple[int, int]) -> tuple[WeightFormat, ...]:
    """Formats of 8 bits: of those that hold a checkpoint exactly the first is taken. Whether its activations are rounded, too, is
    what it says itself, but to FP8 only where that saves time."""
    kept = _FP8.lossless_from | (_W8A8_FP8.lossless_from if capability < FP8_UNITS_SINCE else frozenset())
    return _FP8._replace(lossless_from=kept), _W8A8_FP8, _W8A8, _INT8


def capabilities(capability: tuple[int, int]) -> Capabilities:
    """For a device of this compute capability."""
    modern = has_triton_kernels(capability)
    dtypes = ("bfloat16", "float16", "float32") if modern else ("float16", "float32")
    return Capabilities(
        dtypes=dtypes, weight_formats=weight_formats(capability), kv_dtypes=(*dtypes, "fp8", "int8"), page_sizes=PAGE_SIZES,
        asynchronous=True, graph_capture=modern, graph_drafts=modern, max_graphs=GRAPHS if modern else 0, collectives=True,
        memory_share=MEMORY_SHARE, unsupported={} if modern else {"bfloat16": _NO_BFLOAT16},
    )  # fmt: skip
