"""onnxruntime's execution providers: what its CUDA provider has here, and sessions that run on the provider asked for.

Nothing here was run on a GPU; the tests stand in for onnxruntime where one is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivium.errors import BackendUnavailableError

if TYPE_CHECKING:
    import onnxruntime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
NOT_LOWERED = (
    "this plugin has no lowering for onnxruntime's CUDA provider: attention there takes float16 or bfloat16 only, and the models "
    "and rows built here are float32 in host memory; use onnxruntime:cpu, or another backend for that device"
)


def about_cuda() -> str:
    """In words for a user: which devices the CUDA provider has and why they are not used, or why it has none."""
    import onnxruntime

    offered = onnxruntime.get_available_providers()
    if CUDA not in offered:
        return f"this onnxruntime has no CUDA provider (it has {', '.join(offered)}); onnxruntime-gpu has"
    names, reason = cuda_devices()
    if not names:
        return f"onnxruntime's CUDA provider opens no device: {reason}"
    return f"onnxruntime's CUDA provider has {', '.join(names)}, but {NOT_LOWERED}"


def cuda_devices() -> tuple[tuple[str, ...], str]:
    """Names of the devices of the CUDA provider, or none and why. Where onnxruntime's own list has none of it, two bytes on the
    first device are tried, and no other device: each that is opened keeps memory for its context."""
    import onnxruntime

    try:
        listed = sum(d.ep_name == CUDA for d in onnxruntime.get_ep_devices())
        if not listed:
            onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float16, "cuda", 0)
    except Exception as e:  # whatever a provider's library raises is the reason
        return (), str(e) or type(e).__name__
    return tuple(f"cuda:{n}" for n in range(listed or 1)), ""


def taken(session: onnxruntime.InferenceSession, provider: str) -> onnxruntime.InferenceSession:
    """The session, if it runs on `provider`; BackendUnavailableError where onnxruntime took another one instead."""
    found = session.get_providers()
    if found[:1] != [provider]:
        took = ", ".join(found) or "none"
        raise BackendUnavailableError(f"onnxruntime was asked for {provider} and took {took}", param="backend")
    return session
