"""The linear kernels of every instruction set against numpy, and the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import BLOCKS, K_BLOCKS, assert_close, decoded, product_of_quantised, quantised, stored

native = pytest.importorskip("trivium_cpu._native")
linear = native.linear

ISAS = linear.isas()
# Every layout: (format, storage).
LAYOUTS = [
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "q8_0"), ("int8", "q5_1"), ("int8", "q5_k"),
    ("int8", "q6_k"), ("int4", "q4_0"), ("int4", "q4_1"), ("int4", "q4_k"), ("int8", "float32"), ("int4", "float32"),
    ("int4", "q3_k"), ("int4", "tq2_0"), ("int8_channel", "float32"), ("int4_g64", "float32"), ("int4_g128", "float32"),
    ("int4_asym_g64", "float32"), ("int4_asym_g128", "float32"), ("int4_i8", "float32"),
]  # fmt: skip
ROWS = [1, 2, 3, 8, 17, 64]


def matrix(format: str, storage: str, out: int, in_: int, seed: int = 0) -> object:
    return linear.pack(linear.Arena(), format, storage, in_, stored(storage, out, in_, seed))


def inputs(rows: int, in_: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, in_), dtype=np.float32)


def multiply(isa: str, m: object, x: np.ndarray, **options: object) -> np.ndarray:
    y = np.zeros((len(x), m.shape[0]), np.float32)
    linear.multiply(isa, m, x, y, **options)
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("in_", [32, 77, 576])
def test_inputs_are_quantised_to_nearest(isa: str, in_: int) -> None:
    x = inputs(5, in_)
    x[2, :32] = 0
    x[3] *= 1e-20
    x[4, :32] *= 1e-6
    codes, multiplier, scale = quantised(x)
    result = linear.quantise(isa, x)
    np.testing.assert_array_equal(result["q"], codes.reshape(5, -1))
    np.testing.assert_allclose(result["scale"] * np.float32(2**10), scale, rtol=2e-7)
    np.testing.assert_array_equal(2.0 ** (result["shift"] - 10) * (1 + result["quarters"] / 4), multiplier)
    np.testing.assert_array_equal(result["start4"], -8 * codes.sum(axis=2))
    np.testing.assert_array_equal(result["start8"], -128 * codes.sum(axis=2))
    np.testing.assert_array_equal(result["start8_half"], -128 * codes.reshape(5, -1, 16).sum(axis=2))
    np.testing.assert_array_equal(result["scaled_sum"], 2**10 * multiplier * codes.sum(axis=2).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_a_group_keeps_its_own_precision_beside_a_large_one(isa: str) -> None:
    x = inputs(8, 320)
    x[:, 64:96] *= 300
    result = linear.quantise(isa, x)
    multiplier = 2.0 ** result["shift"] * (1 + result["quarters"] / 4)
    decoded_x = result["q"].reshape(8, -1, 32) * (result["scale"][:, None] * multiplier)[..., None]
    error = np.abs(decoded_x - x.reshape(8, -1, 32)).max(axis=2)
    largest = np.abs(x).reshape(8, -1, 32).max(axis=2)
    assert (error <= largest / 127 * 1.25 / 2 * 1.0001).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
def test_an_input_that_is_not_finite_shows_in_its_row_only(isa: str, bad: float, format: str, storage: str) -> None:
    m = matrix(format, storage, 16, 256)
    x = inputs(3, 256)
    clean = multiply(isa, m, x)
    x[1, 70] = bad
    y = multiply(isa, m, x)
    assert not np.isfinite(y[1]).any()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
def test_product_equals_numpy(isa: str, rows: int, format: str, storage: str) -> None:
    in_ = 512 if storage in K_BLOCKS else 96 if storage in BLOCKS else 205  # plain ones: within a group, whatever its size
    m = matrix(format, storage, 41, in_)
    x = inputs(rows, in_)
    weights = m.unpack()
    y = multiply(isa, m, x)
    if format.startswith("int"):
        assert_close(y, product_of_quantised(x, weights, format), 1e-5)
        assert_close(y, x @ weights.T, 0.05)
        assert_close(y, x @ decoded(storage, stored(storage, 41, in_)).T, 0.5)
    else:
        assert_close(y, x.astype(np.float64) @ weights.T.astype(np.float64), 1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_full_range_codes_do_not_saturate(isa: str) -> None:
    codes = np.where(np.arange(64) % 2, 127, -128).astype(np.int8)
    blocks = np.concatenate([np.float16([1]).view(np.uint8), codes[:32].view(np.uint8)])
    m = linear.pack(linear.Arena(), "int8", "q8_0", 64, np.tile(blocks, (16, 2)))
    for sign in (1.0, -1.0):
        x = np.full((1, 64), sign, np.float32)
        assert_close(multiply(isa, m, x), np.full((1, 16), sign * float(codes.astype(int).sum())), 1e-6)
        x = np.where(codes < 0, -sign, sign).astype(np.float32)[None]
        assert_close(multiply(isa, m, x), np.full((1, 16), sign * float(np.abs(codes.astype(int)).sum())), 1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_a_part_of_the_largest_whole_numbers_is_exact(isa: str, rows: int) -> None:
    """Weights of both ends of a byte and inputs of both ends of another: the largest sums that a part can have."""
    signs = np.where(np.arange(256) % 32 < 16, 1, -1).astype(np.float32)
    m = linear.pack(linear.Arena(), "int4_i8", "float32", 256, np.tile(signs, (16, 1)).view(np.uint8))
    weights = np.rint(m.unpack()[0] * 127)
    assert weights.min() == -128 and weights.max() == 127
    for x in (signs, -signs, np.ones(256, np.float32), np.arange(-127, 129, dtype=np.float32).clip(-127, 127)):
        y = multiply(isa, m, np.tile(x, (rows, 1)).astype(np.float32))
        np.testing.assert_allclose(y, np.full((rows, 16), float(weights @ x) / 127), rtol=3e-7, atol=1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(isa: str, format: str, storage: str) -> None:
    m = matrix(format, storage, 96, 256)
    x = inputs(64, 256)
    alone = np.concatenate([multiply(isa, m, x[r : r + 1]) for r in range(64)])
    for rows in ROWS + [4, 5, 6, 7, 9, 12, 13, 24, 31]:
        np.testing.assert_array_equal(multiply(isa, m, x[:rows]).view(np.uint32), alone[:rows].view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
def test_a_row_has_the_same_bits_alone_and_among_more_than_a_kernel_takes_at_once(isa: str, format: str, storage: str) -> None:
    m = matrix(format, storage, 37, 768)  # an odd number of tiles, the last not whole, and inputs in several pieces
    x = inputs(135, 768)
    alone = np.concatenate([multiply(isa, m, x[r : r + 1]) for r in range(135)])
    for rows in (32, 37, 128, 130, 135):
        np.testing.assert_array_equal(multiply(isa, m, x[:rows]).view(np.uint32), alone[:rows].view(np.uint32))


@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_ranges_compute_their_part_and_touch_nothing_else(format: str, storage: str, data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from(ISAS))
    out, rows = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 30))
    m = matrix(format, storage, out, 256)
    x = inputs(rows, 256)
    whole = multiply(isa, m, x)
    row_begin = data.draw(st.integers(0, rows))
    row_end = data.draw(st.integers(row_begin, rows))
    tile_begin = data.draw(st.integers(0, (out - 1) // 16))
    tile_end = data.draw(st.integers(tile_begin, (out + 15) // 16))
    out_begin, out_end = 16 * tile_begin, min(16 * tile_end, out)
    expected = np.zeros_like(whole)
    expected[row_begin:row_end, out_begin:out_end] = whole[row_begin:row_end, out_begin:out_end]
    np.testing.assert_array_equal(multiply(isa, m, x, ranges=[row_begin, row_end, out_begin, out_end]), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("out", [16, 37, 64])
@pytest.mark.parametrize(("format", "storage"), [("float32", "float32"), ("int4", "q4_0")])
def test_bias_and_residual_are_added(isa: str, out: int, format: str, storage: str) -> None:
    m = matrix(format, storage, out, 64)
    x = inputs(5, 64)
    plain = multiply(isa, m, x)
    bias = inputs(1, out, seed=9)[0]
    np.testing.assert_array_equal(multiply(isa, m, x, bias=bias), plain + bias)
    y = residual = inputs(5, out, seed=10)
    y = y.copy()
    linear.multiply(isa, m, x, y, bias=bias, accumulate=True)
    np.testing.assert_array_equal(y, residual + (plain + bias))


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
def test_instruction_sets_agree_with_the_portable_twin(isa: str, format: str, storage: str) -> None:
    m = matrix(format, storage, 50, 512)
    x = inputs(9, 512)
    assert_close(multiply(isa, m, x), multiply("portable", m, x), 2e-6)


def test_codes_of_a_k_block_equal_the_package_decoding_through_a_product() -> None:
    rows = stored("q4_k", 16, 256)
    m = linear.pack(linear.Arena(), "int4", "q4_k", 256, rows)
    x = inputs(4, 256)
    assert_close(multiply(ISAS[0], m, x), product_of_quantised(x, decoded("q4_k", rows)), 1e-5)
