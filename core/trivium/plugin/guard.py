"""What a backend says of itself, held to the contract: a fault of a plugin is a PluginError with its name and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.errors import PluginError
from trivium.extensions import blame, expect
from trivium.ops import Pattern
from trivium.ops.patterns import trace
from trivium.plugin.contract import Backend, Capabilities, Device, Kernel, WeightFormat

_VERSION_1 = frozenset((
    "temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "logprobs", "prompt_logprobs", "structured_outputs",
))  # fmt: skip
"""What "all" sampling parameters were to a plugin of version 1: its sampler reads no other columns of SampleInputs."""


def capabilities_of(backend: Backend, device: Device) -> Capabilities:
    """backend.capabilities(device) without a lie that the core would stumble over later; PluginError otherwise.
    "All" means what it meant in the version of the contract that the backend was written for."""
    with blame(f"backend {backend.name!r}: capabilities()"):
        can: Capabilities = expect(Capabilities, backend.capabilities(device), f"backend {backend.name!r}: capabilities()")
        fault = _fault(can)
    if fault:
        raise PluginError(f"backend {backend.name!r}: capabilities() {fault}")
    return replace(can, sampling=_VERSION_1) if backend.api_version < 2 and can.sampling is None else can


def _fault(can: Any) -> str:
    if not isinstance(can.sampling, frozenset | None) or not isinstance(can.unsupported, Mapping):
        return "says sampling or unsupported of another type than the contract's"
    formats = tuple(f.name for f in can.weight_formats if isinstance(f, WeightFormat))
    listed = {"dtypes": can.dtypes, "kv_dtypes": can.kv_dtypes, "page_sizes": can.page_sizes, "weight_formats": formats}
    for name, values in listed.items():
        kind = int if name == "page_sizes" else str
        if not values or len(set(values)) != len(values) or any(type(v) is not kind for v in values):
            return f"says {name} = {values!r}: it must list something, each once"
    if min(can.page_sizes) < 1 or (can.max_batched_tokens is not None and can.max_batched_tokens < 1):
        return f"says page_sizes = {can.page_sizes!r}, max_batched_tokens = {can.max_batched_tokens!r}: from 1 up"
    return "" if "float32" in formats else f"says weight_formats = {formats!r}: float32 must be among them"


def kernels_of(backend: Backend, device: Device) -> Sequence[Kernel]:
    """backend.kernels(device), each of them a Kernel of an operator or of a well-formed Pattern; PluginError otherwise."""
    what = f"backend {backend.name!r}: kernels()"
    with blame(what):
        kernels = [expect(Kernel, k, what) for k in backend.kernels(device)]
        for kernel in kernels:
            expect(int, kernel.priority, f"{what}, priority of {kernel.name!r}")
            if isinstance(expect(str | Pattern, kernel.op, f"{what}, op of {kernel.name!r}"), Pattern):
                trace(kernel.op)
    return kernels
