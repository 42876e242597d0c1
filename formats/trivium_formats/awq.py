"""AWQ as AutoAWQ writes it for its GEMM kernels: 4 bits in groups, with zero points.

STEM.qweight int32[in, out / 8] and STEM.qzeros int32[groups, out / 8]: codes packed along the outputs, eight a word; from the
lowest bits on a word has its outputs 0, 2, 4, 6, 1, 3, 5, 7. STEM.scales float16[groups, out]; groups of in / groups inputs follow
one another. weight[o, i] = scales[g, o] * (code - zero[g, o]).

Source: the layout of AutoAWQ's WQLinear_GEMM (Lin et al. 2023, "AWQ", for the method).
"""

from __future__ import annotations

import numpy as np
from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.lazy import FLOATS, Array, Decoded, Floats, Parts
from trivium_formats.modules import Config, Hook, Module, Tensors, choice, join, unpack

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word output 0, 1, ... is."""


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for the layouts of other kernels, CheckpointError for tensors that don't fit together."""
    choice(config, "w_bit" if "w_bit" in config else "bits", (4,))
    choice(config, "version" if "version" in config else "format", ("gemm", "GEMM", "exllama", "ipex"), "gemm")
    choice(config, "zero_point", (True,), True)
    return join(tensors, "qweight", ("qzeros", "scales"), _weight)


def _weight(module: Module) -> Weight:
    codes, scales = module.matrix("qweight", ("int32",)), module.matrix("scales", FLOATS)
    (size, words), groups = codes.shape, scales.shape[0]
    scales, zeros = module.need("scales", (groups, words * 8)), module.need("qzeros", (groups, words), ("int32",))
    if size % groups:
        raise CheckpointError(f"{module.stem}: {size} inputs can't be {groups} groups of one size")
    of = np.arange(size) // (size // groups)

    def decode(start: int, stop: int) -> Floats:
        weights = _columns(codes.data, start, stop).T.astype(np.float32)
        weights -= _columns(zeros.data, start, stop).T.astype(np.float32)[:, of]
        weights *= scales.decoder(scales.data[:, start:stop]).T[:, of]
        return weights

    def parts(start: int, stop: int) -> Parts:
        points = np.ascontiguousarray(_columns(zeros.data, start, stop).T)
        steps = np.ascontiguousarray(scales.decoder(scales.data[:, start:stop]).T)
        return {"codes": np.ascontiguousarray(_columns(codes.data, start, stop).T), "scales": steps, "zeros": points, "order": None}

    return Decoded((words * 8, size), "awq", decode, (codes, zeros, scales), "awq", parts)


def _columns(words: Array, start: int, stop: int) -> Array:
    """int32[n, out / 8] -> codes of outputs start..stop, uint8[n, stop - start]."""
    first = start // 8
    fields = unpack(words[:, first : -(-stop // 8)], 4).reshape(len(words), -1, 8)
    return fields[..., _PLACES].reshape(len(words), -1)[:, start - first * 8 : stop - first * 8]


awq = Hook(read)
