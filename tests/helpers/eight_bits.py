"""W8A8 weights, and emulated CUDA sessions to multiply them in."""

from __future__ import annotations

import emulated_cuda
import numpy as np
import torch
from trivium_cuda.weights import W8A8, Float8
from trivium_torch.weights import Int8


def opened(capability=(9, 0), dtype="float32", **options):
    """A session of the emulated backend on a chip of its own."""
    backend = emulated_cuda.EmulatedBackend((emulated_cuda.EmulatedDevice(capability),))
    [device] = backend.probe().devices
    return backend.open(device, {"dtype": dtype, **options})


def held(kind, out, inputs, seed=0):
    """A W8A8 matrix with random numbers, its scales for rows or for 128 by 128."""
    rng = np.random.default_rng(seed)
    if kind == "int8":
        return W8A8(Int8.rounded(torch.from_numpy(rng.standard_normal((out, inputs), np.float32))))
    codes = torch.from_numpy(rng.standard_normal((out, inputs), np.float32)).to(torch.float8_e4m3fn)
    shape = (-(-out // 128), -(-inputs // 128)) if kind == "fp8 blocks" else (out, 1)
    return W8A8(Float8(codes, torch.from_numpy(rng.random(shape, np.float32) + 0.5)))
