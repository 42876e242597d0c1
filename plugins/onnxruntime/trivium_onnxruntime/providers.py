"""onnxruntime's execution providers: what its CUDA provider has here, and sessions that run on the provider asked for.

Nothing here was run on a GPU; the tests stand in for onnxruntime where one is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivium.errors import BackendUnavailableError
from trivium_onnxruntime import driver

if TYPE_CHECKING:
    import onnxruntime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
NEVER_RUN = "nothing of this plugin was ever run on a GPU"


def about_cuda() -> str:
    """In words for a user: which devices the CUDA provider has, or why it has none."""
    names, reason = cuda_devices()
    return f"onnxruntime's CUDA provider has {', '.join(names)}; {NEVER_RUN}" if names else reason


def cuda_devices() -> tuple[tuple[str, ...], str]:
    """Names of the devices of the CUDA provider, or none and why. Where onnxruntime's own list has none of it, two bytes on the
    first device are tried, and no other device: each that is opened keeps memory for its context. The driver then says how many
    there are."""
    import onnxruntime

    offered = onnxruntime.get_available_providers()
    if CUDA not in offered:
        return (), f"this onnxruntime has no CUDA provider (it has {', '.join(offered)}); the package onnxruntime-gpu has"
    try:
        found = sum(d.ep_name == CUDA for d in onnxruntime.get_ep_devices())
        if not found:
            onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float16, "cuda", 0)
            found = driver.count()
    except Exception as e:  # whatever a provider's library raises is the reason
        return (), f"onnxruntime's CUDA provider opens no device: {str(e) or type(e).__name__}"
    return tuple(f"cuda:{n}" for n in range(found)), ""


def taken(session: onnxruntime.InferenceSession, provider: str) -> onnxruntime.InferenceSession:
    """The session, if it runs on `provider`; BackendUnavailableError where onnxruntime took another one instead."""
    found = session.get_providers()
    if found[:1] != [provider]:
        took = ", ".join(found) or "none"
        raise BackendUnavailableError(f"onnxruntime was asked for {provider} and took {took}", param="backend")
    return session
