"""The kernels: every operator by name, and fused patterns where one torch operation does several operators' work.

A subclass of TorchBackend adds to these; to replace one it registers another for the same operator with a higher priority.
"""

from __future__ import annotations

from trivium.plugin import Kernel
from trivium_torch.kernels import attention, dense, fused, moe, movement, recurrent
from trivium_torch.sampling import sample

_RUN = {**dense.KERNELS, **movement.KERNELS, **attention.KERNELS, **moe.KERNELS, **recurrent.KERNELS, "sample": sample}

OPERATOR_KERNELS: tuple[Kernel, ...] = (
    *(Kernel(name, run, f"torch {name}") for name, run in _RUN.items()),
    Kernel("paged_attention", attention.sdpa, "scaled_dot_product_attention", 1, attention.sdpa_supports),
    Kernel("bidirectional_attention", attention.bidirectional_sdpa, "scaled_dot_product_attention", 1),
)
"""Every operator of the set."""

FUSED_KERNELS: tuple[Kernel, ...] = fused.KERNELS
"""Patterns."""
