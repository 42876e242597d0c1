"""compressed-tensors as LLM Compressor writes it: 2, 4, 8 bits, packed or plain, and FP8, by tensor, channel, group or block.

A module's entry in `config_groups` says how its weights are stored. Packed: STEM.weight_packed int32[out, ceil(in * bits / 32)],
codes plus 2**(bits - 1), the first in the lowest bits; STEM.weight_shape int64[2]. Plain: STEM.weight int8 or float8_e4m3[out, in].
STEM.weight_scale, by `strategy`: "tensor" [1], "channel" [out, 1], "group" [out, in / group_size], "block" [ceil(out / rows),
ceil(in / columns)]. STEM.weight_zero_point, where not `symmetric`: int8 of the same shape; or, of packed codes, packed as they are,
but along the outputs. STEM.weight_g_idx int32[in]: the group of each input, if they are not in order.
weight = scale * (code - zero point). `input_activations` says whether activations are meant to be rounded to 8 bits, too: then a
weight's format is one of "w8a8" and "w8a8_fp8", and a backend may do so; the numbers are the same either way.
STEM.input_scale and STEM.input_zero_point [1]: how whole numbers are to be made of them where these are not `dynamic`.

Source: the package compressed-tensors (Neural Magic, vLLM project).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.grids import Grid, block_of, find_grid, grid_shape
from trivium_formats.lazy import Array, Decoded, Floats, Lazy, Parts
from trivium_formats.modules import Config, Hook, Module, Tensors, check_groups, choice, input_scale, join, numbers, unpack

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_OTHERS = (
    "weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point",
)  # fmt: skip


_HELD_BLOCKS = ((0, 0), (1, 0), (128, 128))
"""Blocks of 8-bit numbers that share a scale, in the formats of Parts."""


class Scheme(NamedTuple):
    """How weights are stored. `kind`: "int" or "float"; `block`: rows and columns that share a scale, 0 for all; `rounds`: whether
    activations are meant to be rounded to 8 bits of the same kind; `static`: to whole numbers, those of all tokens alike."""

    bits: int
    kind: str
    symmetric: bool
    block: tuple[int, int]
    packed_zeros: bool
    rounds: bool
    static: bool

    @property
    def storage(self) -> str:
        """The format of Parts that such weights have, or "compressed-tensors" where they have none."""
        if self.bits == 4 and self.block[0] <= 1:
            return "w4a16"
        if self.bits == 8 and self.symmetric and self.block in _HELD_BLOCKS[: 2 if self.kind == "int" else 3]:
            rounded, kept = ("w8a8", "w8a16") if self.kind == "int" else ("w8a8_fp8", "fp8")
            return rounded if self.rounds else kept
        return "compressed-tensors"


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for what isn't among the formats above (2:4 sparse, 4-bit floats, transforms), CheckpointError for
    tensors that don't fit together."""
    method = {"quant_method": config.get("quant_method")}
    choice(config, "format", (*_FORMATS, "mixed-precision"))
    choice({**method, **(config.get("sparsity_config") or {})}, "format", ("dense", None))
    choice({**method, **(config.get("transform_config") or {})}, "config_groups", ({}, None))
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) and isinstance(g.get("targets"), list) for g in groups.values()):
        raise CheckpointError("quantization_config has no config_groups with their targets")
    schemes = {
        target: _scheme({**method, **group}) for group in groups.values() for target in group["targets"] if group.get("weights")
    }
    joined = join(tensors, "weight_packed", _OTHERS, partial(_weight, schemes=schemes))
    return join(joined, "weight_scale", _OTHERS, partial(_weight, schemes=schemes))


def _scheme(group: Mapping[str, Any]) -> Scheme:
    """The weights of one of config_groups."""
    choice(group, "format", (*_FORMATS, None))
    args = {"quant_method": group["quant_method"], **group["weights"]}
    kind = choice(args, "type", ("int", "float"), "int")
    bits = choice(args, "num_bits", (2, 4, 8) if kind == "int" else (8,), 8)
    size = args.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = choice({**args, "strategy": args.get("strategy") or usual}, "strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group" and not (type(size) is int and size > 0):
        raise CheckpointError(f"group_size must be a number of inputs, not {size!r}")
    block = block_of(args.get("block_structure"), "block_structure") if strategy == "block" else (0, 0)
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0), "block": block}
    inputs = group.get("input_activations") or {}
    rounds = (inputs.get("num_bits"), inputs.get("type", "int")) == (8, kind)
    static = rounds and (kind, inputs.get("strategy"), inputs.get("dynamic", False)) == ("int", "tensor", False)
    packed_zeros = strategy in ("channel", "group")
    return Scheme(bits, kind, bool(args.get("symmetric", True)), blocks[strategy], packed_zeros, rounds, static)


def _find_scheme(stem: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """That of the module's own name, else of a pattern, else of all linear modules; CheckpointError if there is none."""
    if stem in schemes:
        return schemes[stem]
    for target, scheme in sorted(schemes.items()):
        if target.startswith("re:") and re.match(target[3:], stem):
            return scheme
    if "Linear" not in schemes:
        raise CheckpointError(f"{stem} is stored quantised, but none of config_groups is about it")
    return schemes["Linear"]


def _weight(module: Module, *, schemes: Mapping[str, Scheme]) -> Weight:
    scheme = _find_scheme(module.stem, schemes)
    codes, shape = _codes(module, scheme.bits)
    block = scheme.block[0] or shape[0], scheme.block[1] or shape[1]
    scale = find_grid(module, "weight_scale", shape, block)
    zeros = None if scheme.symmetric else _zeros(module, scheme, shape, block)
    order = module.find("weight_g_idx", (shape[1],), ("int32", "int64"))
    across = grid_shape(shape, block)[1]
    half = 1 << (scheme.bits - 1)

    def decode(start: int, stop: int) -> Floats:
        of = None if order is None else check_groups(module.stem, order.data, across)
        if codes.format == "int32":
            weights = unpack(codes.data[start:stop], scheme.bits)[:, : shape[1]].astype(np.float32)
            weights -= half
        else:
            weights = np.array(numbers(codes, start, stop), np.float32)
        if zeros is not None:
            weights -= zeros.rows(start, stop, of)
        weights *= scale.rows(start, stop, of)
        return weights

    stored = [codes, scale.weight, *([zeros.weight] if zeros else []), *([order] if order else [])]
    inputs = input_scale(module, "input_zero_point") if scheme.static else None
    how, format = f"compressed-tensors {scheme} {inputs}", _storage(module.stem, scheme, shape, block, order)
    parts: Callable[[int, int], Parts] | None = None
    if format != "compressed-tensors":
        parts = partial(_groups, codes, scale, zeros, order) if scheme.bits == 4 else partial(_bytes, module.stem, codes, scale)
    made = Decoded(shape, format, decode, tuple(stored), how, parts)
    vars(made).update(inputs=inputs)
    return made


def _storage(stem: str, scheme: Scheme, shape: tuple[int, int], block: tuple[int, int], order: Weight | None) -> str:
    """The scheme's, unless its parts would not say all: groups of different sizes, or 8 bits in another order."""
    if order is not None:
        check_groups(stem, order.data, grid_shape(shape, block)[1])
    whole = shape[1] % block[1] == 0 and (order is None or _sorted(order, shape, block) is not None)
    held = whole if scheme.bits == 4 else order is None
    return scheme.storage if held else "compressed-tensors"


def _sorted(order: Weight, shape: tuple[int, int], block: tuple[int, int]) -> Array | None:
    """int32[in]: inputs by their groups; None where these are not all of one size."""
    counts = np.bincount(order.data, minlength=grid_shape(shape, block)[1])
    return np.argsort(order.data, kind="stable").astype(np.int32) if (counts == block[1]).all() else None


def _groups(codes: Weight, scale: Grid, zeros: Grid | None, order: Weight | None, start: int, stop: int) -> Parts:
    """See Parts: numbers of 4 bits."""
    (_, size), block = scale.shape, scale.block
    where = None if order is None else _sorted(order, scale.shape, block)
    whole = unpack(codes.data[start:stop], 4)[:, :size]
    across = grid_shape(scale.shape, block)[1]
    points = np.zeros((stop - start, across), np.float32) if zeros is None else zeros.table(start, stop)
    return {
        "codes": whole if where is None else whole[:, where], "scales": scale.table(start, stop),
        "zeros": (points + 8).astype(np.uint8), "order": where,
    }  # fmt: skip


def _bytes(stem: str, codes: Weight, scale: Grid, start: int, stop: int) -> Parts:
    """See Parts: numbers of 8 bits."""
    (out, size), rows = scale.shape, scale.block[0]
    if start % rows and (start, stop) != (0, out):
        raise CheckpointError(f"{stem}: rows {start} to {stop} begin within a block of scales")
    data = codes.data[start:stop]
    if codes.format == "int32":
        data = (unpack(data, 8)[:, :size] ^ np.uint8(128)).view(np.int8)
    table = scale.weight.data.reshape(grid_shape(scale.shape, scale.block))[start // rows : -(-stop // rows)]
    return {"codes": data, "scales": scale.weight.decoder(table), "block": scale.block}


def _codes(module: Module, bits: int) -> tuple[Weight, tuple[int, int]]:
    """The stored codes and the shape of the weight."""
    if "weight_packed" not in module.parts:
        codes = module.matrix("weight", ("int8", "float8_e4m3"))
        return codes, (codes.shape[0], codes.shape[1])
    codes = module.matrix("weight_packed", ("int32",))
    shape = tuple(int(n) for n in module.need("weight_shape", (2,), ("int64", "int32")).data)
    if codes.shape != (shape[0], -(-shape[1] * bits // 32)):
        raise CheckpointError(f"{module.stem}: weight_packed{list(codes.shape)} can't be {list(shape)} numbers of {bits} bits")
    return codes, (shape[0], shape[1])


def _zeros(module: Module, scheme: Scheme, shape: tuple[int, int], block: tuple[int, int]) -> Grid:
    """Zero points, as a grid like that of the scales."""
    if "weight_packed" not in module.parts or not scheme.packed_zeros:
        return find_grid(module, "weight_zero_point", shape, block, ("int8",))
    rows, columns = grid_shape(shape, block)
    packed = module.need("weight_zero_point", (-(-rows * scheme.bits // 32), columns), ("int32",))

    def points() -> Floats:
        codes = unpack(packed.data.T, scheme.bits).T[:rows].astype(np.float32)
        return codes - np.float32(1 << (scheme.bits - 1))

    return Grid(Lazy("", (rows, columns), "float32", points, lambda data: data, packed.origin, packed.nbytes), shape, block)


compressed_tensors = Hook(read)
