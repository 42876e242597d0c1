"""FP8 as DeepSeek and transformers write it: float8_e4m3 with a scale for each block, or one for a whole tensor.

STEM.weight float8_e4m3[out, in]. STEM.weight_scale_inv float32 or float8_e8m0[ceil(out / rows), ceil(in / columns)] where
`weight_block_size` is [rows, columns], else a single number; older files have that as STEM.weight_scale. A number is its
float8 times the scale, in float32. Where `activation_scheme` says that activations are meant to be rounded, too, a weight's format
is "w8a8_fp8", and a backend may do so; what they were scaled by (STEM.input_scale, STEM.activation_scale) is not used.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 3.3, and the files of deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

from functools import partial

from trivium.errors import CheckpointError
from trivium.ops import Weight

from trivium_formats.grids import block_of, find_grid, grid_shape
from trivium_formats.lazy import FLOATS, Decoded, Floats, Parts
from trivium_formats.modules import Config, Hook, Module, Tensors, choice, join, numbers

_SCALES = (*FLOATS, "float8_e8m0")


def read(config: Config, tensors: Tensors) -> Tensors:
    """Raises UnsupportedError for experts in 4 bits, CheckpointError for tensors that don't fit together."""
    choice(config, "expert_dtype", ("fp8",), "fp8")
    size = config.get("weight_block_size")
    block = None if size is None else block_of(size, "weight_block_size")
    format = "w8a8_fp8" if config.get("activation_scheme") in ("dynamic", "static") else "fp8"
    for scale in ("weight_scale_inv", "weight_scale"):
        tensors = join(tensors, scale, ("weight",), partial(_weight, scale=scale, block=block, format=format))
    return tensors


def _weight(module: Module, *, scale: str, block: tuple[int, int] | None, format: str) -> Weight:
    codes = module.matrix("weight", ("float8_e4m3",))
    out, size = codes.shape
    rows, columns = block or codes.shape
    grid = find_grid(module, scale, (out, size), (rows, columns), _SCALES)

    def decode(start: int, stop: int) -> Floats:
        return numbers(codes, start, stop) * grid.rows(start, stop)

    def parts(start: int, stop: int) -> Parts:
        if start % rows and (start, stop) != (0, out):
            raise CheckpointError(f"{module.stem}: rows {start} to {stop} begin within a block of scales")
        table = grid.weight.data.reshape(grid_shape((out, size), (rows, columns)))[start // rows : -(-stop // rows)]
        return {"codes": codes.data[start:stop], "scales": grid.weight.decoder(table), "block": (rows, columns)}

    return Decoded((out, size), format, decode, (codes, grid.weight), f"fp8 {rows} {columns}", parts)


fp8 = Hook(read)
