"""Packed matrices mean what the checkpoint means."""

from __future__ import annotations

import numpy as np
import pytest
from linear_cases import BLOCKS, FLOAT_STORAGES, block_size, decoded, stored
from trivium_cpu.formats import FORMATS, STORAGES

native = pytest.importorskip("trivium_cpu._native")
linear = native.linear

LOSSLESS = [(f.name, storage) for f in FORMATS for storage in sorted(f.lossless_from)]


INTEGERS = [f.name for f in FORMATS if f.name.startswith("int")]


GROUPS = {"int4": 32, "int4_g64": 64, "int4_g128": 128, "int4_asym_g64": 64, "int4_asym_g128": 128}
"""Numbers that share a scale, of the formats whose numbers are whole multiples of it."""


def fits_a_grid(levels: np.ndarray) -> bool:
    """True if some step of at most 15 between the outermost has whole multiples at all levels, zero among them."""
    steps = (levels[-1] - levels[0]) / np.arange(len(levels) - 1, 16)
    return any(np.abs(levels / step - np.rint(levels / step)).max() < 1e-4 for step in steps)


def packed(format: str, storage: str, rows: np.ndarray) -> object:
    return linear.pack(linear.Arena(), format, storage, decoded(storage, rows).shape[1], rows)


@pytest.mark.parametrize("format", [f.name for f in FORMATS])
@pytest.mark.parametrize("storage", FLOAT_STORAGES + BLOCKS)
def test_declared_and_native_lossless_formats_agree(format: str, storage: str) -> None:
    declared = {f.name: f for f in FORMATS}[format].lossless_from
    assert (storage in declared) == linear.is_lossless(format, storage)
    assert storage in STORAGES


@pytest.mark.parametrize(("format", "storage"), LOSSLESS)
@pytest.mark.parametrize("out", [1, 16, 37])
def test_lossless_formats_keep_every_bit(format: str, storage: str, out: int) -> None:
    in_ = 3 * block_size(storage) if storage not in FLOAT_STORAGES else 77
    rows = stored(storage, out, in_, seed=out)
    values = packed(format, storage, rows).unpack()
    np.testing.assert_array_equal(values.view(np.uint32), decoded(storage, rows).view(np.uint32))


@pytest.mark.parametrize("format", [f for f in FORMATS if f.name != "float32"], ids=lambda f: f.name)
@pytest.mark.parametrize("distribution", ["standard_normal", "laplace", "uniform"])
def test_rounding_stays_within_the_error_budget(format: object, distribution: str) -> None:
    rng = np.random.default_rng(5)
    weights = (getattr(rng, distribution)(size=(64, 320)) * 0.04).astype(np.float32)
    values = packed(format.name, "float32", weights.view(np.uint8)).unpack()
    error = np.sqrt(np.mean(np.square(values - weights)) / np.mean(np.square(weights)))
    assert 0 < error <= format.error_budget


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("storage", ["bfloat16", "q6_k", "q5_1", "q8_0"])
def test_any_storage_can_be_rounded(format: str, storage: str) -> None:
    rows = stored(storage, 20, 512)
    expected = decoded(storage, rows)
    values = packed(format, storage, rows).unpack()
    error = np.sqrt(np.mean(np.square(values - expected)) / np.mean(np.square(expected)))
    assert error <= {f.name: f for f in FORMATS}[format].error_budget


def test_rounding_to_eight_bits_takes_the_nearest_code() -> None:
    weights = np.random.default_rng(1).standard_normal((3, 64), dtype=np.float32)
    groups = weights.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    expected = scale * np.clip(np.rint(groups / scale), -127, 127)
    values = packed("int8", "float32", weights.view(np.uint8)).unpack()
    np.testing.assert_allclose(values.reshape(-1, 32), expected, atol=float(scale.max()) * 1e-3)


@pytest.mark.parametrize("format", [f.name for f in FORMATS])
def test_zeros_stay_zeros(format: str) -> None:
    assert not packed(format, "float32", np.zeros((5, 40), np.float32).view(np.uint8)).unpack().any()


def test_bfloat16_and_float16_round_to_nearest_even() -> None:
    weights = np.concatenate([np.float32([1 + 2**-9, 1 + 3 * 2**-9, 1e-40, -2.5e-8, 65504, 2**-25, 3 * 2**-25]),
                              np.random.default_rng(2).standard_normal(57).astype(np.float32)])[None]  # fmt: skip
    half = packed("float16", "float32", weights.view(np.uint8)).unpack()
    np.testing.assert_array_equal(half, weights.astype(np.float16).astype(np.float32))
    brain = packed("bfloat16", "float32", weights.view(np.uint8)).unpack()
    bits = weights.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(brain, rounded)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_have_no_whole_numbers(bad: float) -> None:
    weights = np.ones((2, 64), np.float32)
    weights[1, 40] = bad
    with pytest.raises(ValueError, match="finite"):
        packed("int4_i8", "float32", weights.view(np.uint8))


@pytest.mark.parametrize("format", [f for f in INTEGERS if f != "int4_i8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_weights_without_a_float16_scale_are_refused(format: str, bad: float) -> None:
    weights = np.ones((2, 64), np.float32)
    weights[1, 40] = bad
    with pytest.raises(ValueError, match="float16"):
        packed(format, "float32", weights.view(np.uint8))


def test_float16_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="65504"):
        packed("float16", "float32", np.full((1, 8), 1e6, np.float32).view(np.uint8))


def test_short_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        linear.pack(linear.Arena(), "int4", "q4_0", 64, np.zeros((4, 18), np.uint8))
    with pytest.raises(ValueError, match="whole number of blocks"):
        linear.pack(linear.Arena(), "int4", "q4_0", 40, np.zeros((4, 36), np.uint8))


@pytest.mark.parametrize(("format", "group"), list(GROUPS.items()))
def test_a_group_is_whole_multiples_of_its_scale(format: str, group: int) -> None:
    """At most 16 numbers a group, evenly spaced; the last group of a row is shorter."""
    weights = np.random.default_rng(3).standard_normal((5, 300), dtype=np.float32)
    values = packed(format, "float32", weights.view(np.uint8)).unpack().astype(np.float64)
    for start in range(0, 300, group):
        for numbers in values[:, start : start + group]:
            levels = np.unique(numbers)
            assert len(levels) <= 16
            assert fits_a_grid(levels), levels


def test_a_part_is_bytes_of_which_a_group_has_sixteen_evenly_spaced() -> None:
    """Every weight is a whole multiple, of 8 bits, of its part's largest / 127, which need not fit float16."""
    weights = np.random.default_rng(3).standard_normal((5, 600), dtype=np.float32)
    weights[1] *= 1e-12
    weights[2] *= 1e30
    values = packed("int4_i8", "float32", weights.view(np.uint8)).unpack().astype(np.float64)
    for start in range(0, 600, 256):
        scale = (np.abs(weights[:, start : start + 256]).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float64)
        units = values[:, start : start + 256] / scale
        assert np.abs(units - np.rint(units)).max() < 1e-4 and units.min() > -128.5 and units.max() < 127.5
        for first in range(0, units.shape[1], 32):
            for numbers in np.rint(units[:, first : first + 32]):
                steps = np.diff(np.unique(numbers))
                assert len(steps) < 16 and not (steps % max(np.gcd.reduce(steps.astype(int)), 1)).any()
                assert steps.sum() / max(np.gcd.reduce(steps.astype(int)), 1) <= 15


def test_whole_steps_err_little_more_than_free_ones() -> None:
    weights = np.random.default_rng(4).standard_normal((64, 512), dtype=np.float32)

    def error(format: str) -> float:
        return float(np.square(packed(format, "float32", weights.view(np.uint8)).unpack() - weights).sum())

    assert error("int4_i8") < 1.1 * error("int4_asym")


def test_a_channel_is_whole_multiples_of_its_scale() -> None:
    weights = np.random.default_rng(3).standard_normal((5, 300), dtype=np.float32)
    values = packed("int8_channel", "float32", weights.view(np.uint8)).unpack()
    scale = (np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(values, scale * np.clip(np.rint(weights / scale), -127, 127), atol=float(scale.max()) * 1e-3)


@pytest.mark.parametrize("format", list(GROUPS))
def test_four_bit_scales_beat_the_plain_range(format: str) -> None:
    """The searched and refined scale errs less than largest / 8 (symmetric) or range / 15 (zero point) rounded to nearest."""
    group = GROUPS[format]
    weights = np.random.default_rng(4).standard_normal((64, 384), dtype=np.float32)
    x = weights.reshape(-1, group)
    if "asym" not in format:
        step, zero, least, most = np.abs(x).max(1, keepdims=True) / 8, 0, -8, 7
    else:
        low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
        step = (high - low) / 15
        zero, least, most = np.rint(-low / step), 0, 15
    rounded = step * (np.clip(np.rint(x / step) + zero, least, most) - zero)
    values = packed(format, "float32", weights.view(np.uint8)).unpack().reshape(-1, group)
    assert np.square(values - x).sum() < 0.97 * np.square(rounded - x).sum()


def test_a_minimum_is_the_line_of_least_squares() -> None:
    """Four-bit codes on a slope of 16 levels come back as they are, wherever the slope lies."""
    levels = (np.arange(32) % 16).astype(np.float32)
    weights = np.stack([levels * np.float32(0.5) + np.float32(offset) for offset in (-40, -3.5, 0, 7, 100)])
    np.testing.assert_array_equal(packed("int4_asym", "float32", weights.view(np.uint8)).unpack(), weights)


def test_an_mxfp4_scale_beyond_float16_is_refused() -> None:
    block = np.full((1, 17), 0x22, np.uint8)
    block[0, 0] = 90
    with pytest.raises(ValueError, match="mxfp4"):
        packed("int8", "mxfp4", block)
    block[0, 1:] = 0  # a block of zeros has no scale to keep
    assert not packed("int8", "mxfp4", block).unpack().any()
