"""MXFP4 as OpenAI writes gpt-oss: 4-bit floats (e2m1) in blocks of 32 with a power of two; held without loss as GGUF's mxfp4.

NAME_blocks uint8[..., in / 32, 16]: a byte has number 2j in its low and 2j + 1 in its high half. NAME_scales uint8[..., in / 32]:
the exponent plus 127. NAME becomes GGUF's blocks of 17 bytes: the scale, then 16 bytes with number j in the low and j + 16 in the
high half.

Sources: OCP 2023, "Microscaling Formats (MX) Specification 1.0"; the files of openai/gpt-oss-20b; ggml's block_mxfp4.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.lazy import Array, Floats, Lazy
from trivium_formats.modules import Config, Hook, Module, Tensors

_BLOCKS, _SCALES = "_blocks", "_scales"


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises CheckpointError for tensors that don't fit together."""
    joined = dict(tensors)
    for name in tensors:
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            stem, _, part = whole.rpartition(".")
            names = {part + kind: whole + kind for kind in (_BLOCKS, _SCALES)}
            module = Module(stem, {key: joined.pop(full) for key, full in names.items() if full in tensors})
            joined[whole] = partial(_weight, module, part)
    return joined


def _weight(module: Module, part: str) -> Weight:
    blocks = module.need(part + _BLOCKS, None, ("uint8",))
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16:
        raise CheckpointError(
            f"{module.stem}.{part}{_BLOCKS} has the shape {list(blocks.shape)}; it must end with blocks of 16 bytes"
        )
    scales = module.need(part + _SCALES, blocks.shape[:-1], ("uint8",))
    origin = f"mxfp4 of {blocks.origin} and {scales.origin}" if blocks.origin and scales.origin else ""
    *leading, count, _ = blocks.shape

    def repack() -> Array:
        if (scales.data == 255).any():
            raise CheckpointError(f"{module.stem}.{part}{_SCALES} says that some numbers are no numbers (255)")
        numbers = np.stack([blocks.data & 15, blocks.data >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
        packed = numbers[..., :16] | numbers[..., 16:] << 4
        return np.concatenate([scales.data[..., None], packed], axis=-1).reshape(*leading, count * 17)

    return Lazy("", (*leading, count * 32), "mxfp4", repack, _decode, origin, blocks.nbytes + scales.nbytes)


def _decode(data: Array) -> Floats:
    """uint8[..., blocks * 17] -> float32[..., blocks * 32], by ggml's own package."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(np.ascontiguousarray(data), GGMLQuantizationType.MXFP4), np.float32)


mxfp4 = Hook(read)
