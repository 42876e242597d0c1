"""GPTQ as AutoGPTQ and GPTQModel write it: 2, 4, 8 bits, groups, order of activations, both conventions of zero points.

STEM.qweight int32[in * bits / 32, out]: codes packed along the inputs, the first in the lowest bits. STEM.qzeros int32[groups,
out * bits / 32]: zero points packed along the outputs, in `checkpoint_format` "gptq" less one, in "gptq_v2" as they are.
STEM.scales float16[groups, out]. STEM.g_idx int32[in], the group of each input: any order where the weights were rounded in the
order of their activations ("desc_act"); where it lacks, groups follow one another.
weight[o, i] = scales[g, o] * (code - zero[g, o]), zero points modulo 2**bits.

Source: the layout of AutoGPTQ's QuantLinear (Frantar et al. 2022, "GPTQ", for the method).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.lazy import FLOATS, Decoded, Floats, Parts
from trivium_formats.modules import Config, Hook, Module, Tensors, check_groups, choice, join, unpack, unpack_columns


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for other layouts (Marlin's, 3 bits), CheckpointError for tensors that don't fit together."""
    bits = choice(config, "bits", (2, 4, 8))
    version = choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    choice(config, "is_marlin_format", (False, None))
    group = config.get("group_size", -1)
    if type(group) is not int or (group < 1 and group != -1):
        raise CheckpointError(f"group_size must be a number of inputs, or -1 for all, not {group!r}")
    make = partial(_weight, bits=bits, group=group, less=1 if version == "gptq" else 0)
    return join(tensors, "qweight", ("qzeros", "scales", "g_idx"), make)


def _weight(module: Module, *, bits: int, group: int, less: int) -> Weight:
    """`group`: inputs of a group, -1 for all; `less`: what stored zero points are short of the true ones."""
    order = module.find("g_idx", None, ("int32", "int64"))
    codes = module.matrix("qweight", ("int32",))
    rows, out = codes.shape
    if order is not None and order.shape:  # GPTQModel can give modules bits of their own
        bits = rows * 32 // max(order.shape[0], 1)
    per = 32 // bits if bits in (2, 4, 8) else 0
    if not per or out % per or (order is not None and order.shape != (rows * per,)):
        raise CheckpointError(f"{module.stem}: qweight{list(codes.shape)} and g_idx don't fit together at {bits} bits")
    scales = module.matrix("scales", FLOATS)
    groups = scales.shape[0]
    scales, zeros = module.need("scales", (groups, out)), module.need("qzeros", (groups, out // per), ("int32",))
    stored = (codes, zeros, scales, *([] if order is None else [order]))

    def decode(start: int, stop: int) -> Floats:
        of = np.arange(rows * per) // (rows * per if group == -1 else group) if order is None else order.data
        of = check_groups(module.stem, of, groups)
        weights = unpack(codes.data[:, start:stop].T, bits).astype(np.float32)
        points = (unpack_columns(zeros.data, bits, start, stop) + np.uint8(less)) & np.uint8((1 << bits) - 1)
        weights -= points.T.astype(np.float32)[:, of]
        weights *= scales.decoder(scales.data[:, start:stop]).T[:, of]
        return weights

    def parts(start: int, stop: int) -> Parts:
        of = None if order is None else check_groups(module.stem, order.data, groups)
        where = None if of is None else np.argsort(of, kind="stable").astype(np.int32)
        if of is not None and (np.bincount(of, minlength=groups) != len(of) // groups).any():
            raise CheckpointError(f"{module.stem}: groups have different numbers of inputs")
        numbers = unpack(codes.data[:, start:stop].T, bits)
        points = (unpack_columns(zeros.data, bits, start, stop) + np.uint8(less)) & np.uint8((1 << bits) - 1)
        return {
            "codes": numbers if where is None else numbers[:, where], "scales": scales.decoder(scales.data[:, start:stop]).T,
            "zeros": points.T, "order": where,
        }  # fmt: skip

    how = f"gptq {bits} {group} {less}"
    if bits != 4:
        return Decoded((out, rows * per), "gptq", decode, stored, how)
    return Decoded((out, rows * per), "gptq_4", decode, stored, how, parts)


gptq = Hook(read)
