"""This backend's kernels by operator and pattern; whatever they do not support falls to trivium_torch's."""

from __future__ import annotations

from trivium.plugin import Kernel
from trivium_cuda.sampler import sample

KERNELS: tuple[Kernel, ...] = (Kernel("sample", sample, "queued sample", 10),)
