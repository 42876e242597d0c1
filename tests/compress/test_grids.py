"""Scales, codes and their bytes: against brute force, and against the formats' own packages."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from trivium_compress.floats import bits, rounded
from trivium_compress.grids import Affine, Grid, Steps, SuperBlocks, Symmetric, ZeroPoint, meant, nearest
from trivium_compress.stored import BLOCKS, block_tensor, packed_tensors


def heavy_tailed(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Weights with outliers, where the whole range is a bad choice."""
    return (np.random.default_rng(seed).standard_t(4, (rows, columns)) * 0.02).astype(np.float32)


def weighted_error(grid: Grid, w: np.ndarray, importance: np.ndarray, steps: Steps) -> np.ndarray:
    """By group, in float64."""
    size = grid.size(w.shape[1])
    miss = meant(grid, nearest(grid, w, steps), steps).astype(np.float64) - w
    return (importance * miss * miss).reshape(len(w), -1, size).sum(-1)


def test_bfloat16_is_rounded_as_by_torch():
    torch = pytest.importorskip("torch")
    words = np.random.default_rng(3).integers(0, 1 << 32, 20000, dtype=np.uint32)
    words[:4] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000]  # ties, the largest number, a subnormal tie
    numbers = words.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    want = torch.from_numpy(numbers.copy()).to(torch.bfloat16)
    np.testing.assert_array_equal(bits(numbers, "bfloat16"), want.view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(rounded(numbers, "bfloat16"), want.float().numpy())


@pytest.mark.parametrize("weighted", [False, True])
def test_no_scale_of_a_dense_brute_force_is_much_better_than_the_one_found(weighted: bool):
    """Every scale from a tenth to 1.2 of the whole range's, in steps of a thousandth; symmetric, so that there is only one
    unknown."""
    w, size = heavy_tailed(40, 64), 32
    importance = np.random.default_rng(1).random(64).astype(np.float32) ** 3 if weighted else np.ones(64, np.float32)
    grid = Symmetric(size, -8, 7, dtype="float32")
    found = weighted_error(grid, w, importance, grid.fit(w, importance))
    groups, best = w.reshape(40, 2, size).astype(np.float64), np.full((40, 2), np.inf)
    for share in np.arange(0.1, 1.2, 0.001):
        scale = np.abs(groups).max(-1, keepdims=True) / 7 * share
        miss = np.clip(np.rint(groups / scale), -8, 7) * scale - groups
        best = np.minimum(best, (importance.reshape(2, size) * miss * miss).sum(-1))
    assert found.sum() < 1.02 * best.sum()
    whole = weighted_error(grid, w, importance, grid.fit(w, importance, search=False))
    assert found.sum() < 0.9 * whole.sum()


def test_an_offset_is_found_as_by_brute_force_over_both_ends():
    w = heavy_tailed(12, 32, seed=5) + np.float32(0.01)
    grid = Affine(32, 0, 15, dtype="float32")
    found = weighted_error(grid, w, np.ones(32), grid.fit(w))[:, 0]
    low, high, best = w.min(1).astype(np.float64), w.max(1).astype(np.float64), np.full(12, np.inf)
    for cut_low in np.linspace(0, 0.5, 60):
        for cut_high in np.linspace(0, 0.5, 60):
            start, scale = low + cut_low * (high - low), (high - low) * (1 - cut_low - cut_high) / 15
            codes = np.clip(np.rint((w - start[:, None]) / np.maximum(scale, 1e-9)[:, None]), 0, 15)
            best = np.minimum(best, ((codes * scale[:, None] + start[:, None] - w) ** 2).sum(1))
    assert found.sum() < 1.15 * best.sum()
    assert found.sum() < 0.9 * weighted_error(grid, w, np.ones(32), grid.fit(w, search=False)).sum()


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_to_the_format_s_package_what_the_grid_says(kind: str):
    w, grid = heavy_tailed(24, 512), BLOCKS[kind].grid
    w[3] = 0
    w[4] *= 1e-6  # below what a float16 scale can be
    steps = grid.fit(w)
    codes = nearest(grid, w, steps)
    stored = block_tensor(codes, steps, kind)
    got = gguf.quants.dequantize(stored.array, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_allclose(got, meant(grid, codes, steps), rtol=2e-6, atol=1e-9)
    assert np.abs(got - w).max() < 0.05 and not got[3].any()


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_blocks_are_nearer_to_the_weights_than_those_of_the_format_s_package(kind: str):
    w, grid, number = heavy_tailed(64, 512), BLOCKS[kind].grid, gguf.GGMLQuantizationType[kind.upper()]
    steps = grid.fit(w)
    ours = gguf.quants.dequantize(block_tensor(nearest(grid, w, steps), steps, kind).array, number)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w, number), number)
    least = 0.94 if kind != "q8_0" else 1.0
    assert ((ours - w) ** 2).sum() < least * ((theirs - w) ** 2).sum()


GRIDS = {
    "symmetric": (Symmetric(32, -8, 7), 4), "zero points": (ZeroPoint(16, -8, 7), 4), "bytes": (Symmetric(0, -127, 127), 8),
    "zero points of rows": (ZeroPoint(0, -8, 7, dtype="float16"), 4), "odd rows": (ZeroPoint(32, -8, 7, dtype="float32"), 4),
}  # fmt: skip


@pytest.mark.oracles
@pytest.mark.parametrize("name", GRIDS)
def test_packed_tensors_mean_to_the_format_s_package_what_the_grid_says(name: str):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    grid, width = GRIDS[name]
    w = heavy_tailed(21 if name == "odd rows" else 24, 96) + np.float32(0.004)
    steps = grid.fit(w)
    codes = nearest(grid, w, steps)
    tensors = packed_tensors(codes, steps, grid, width)
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
    module = {
        part: torch.from_numpy(np.ascontiguousarray(s.array).view(np.uint8)).view(kinds[s.kind]).reshape(s.array.shape)
        for part, s in tensors.items()
    }
    args = QuantizationArgs(
        num_bits=width, type="int", symmetric=isinstance(grid, Symmetric), strategy="group" if grid.group else "channel",
        group_size=grid.group or None,
    )  # fmt: skip
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    got = compressor.decompress(module, QuantizationScheme(targets=["Linear"], weights=args))["weight"].float().numpy()
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}[grid.dtype]  # in which the package multiplies
    np.testing.assert_allclose(got, meant(grid, codes, steps), rtol=tolerance, atol=1e-7)
    assert ((got - w) ** 2).mean() < 0.03 * (w**2).mean()


@pytest.mark.parametrize("grid", [Symmetric(32, -8, 7), ZeroPoint(32, -8, 7), BLOCKS["q4_0"].grid, BLOCKS["q8_0"].grid])
def test_zero_stays_zero_where_a_grid_says_so(grid: Grid):
    w = np.where(np.random.default_rng(0).random((16, 64)) < 0.5, 0, heavy_tailed(16, 64) + np.float32(0.03)).astype(np.float32)
    assert grid.holds_zero
    steps = grid.fit(w)
    assert not meant(grid, nearest(grid, w, steps), steps)[w == 0].any()


def test_scales_of_superblocks_are_whole_multiples():
    grid = SuperBlocks(32, 0, 15)
    steps = grid.fit(heavy_tailed(8, 512))
    scale, whole, least, negative = steps.parts
    assert whole.max() <= 63 and negative.max() <= 63 and (np.sort(whole, -1)[..., -1] == 63).all()
    np.testing.assert_array_equal(steps.scale.reshape(8, 2, 8), scale[..., None] * whole)
    np.testing.assert_array_equal(steps.offset.reshape(8, 2, 8), -least[..., None] * negative)
