"""Products with weights of four and eight bits against numpy's product with the weight that the format means."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, near, rng, rounded, tensor, torch

from trivium_cuda.kernels import fp8, int4, int8, products, quantise

LINEAR = OPERATORS["linear"]
SHAPES = ((1, 128, 40), (3, 320, 70), (40, 192, 33))
"""Rows, inputs, outputs."""


def activations(rows, inputs, dtype, seed=0):
    return rounded(rng(seed).normal(0, 1, (rows, inputs)).astype(np.float32), dtype)


def check(got, x, weight, bias, dtype):
    near(got, LINEAR(x, weight.astype(np.float32), bias), dtype, "linear", 4)


def int4_weight(out, inputs, group, zeros, seed=1):
    """(codes, scales, zero points, the weight) of numbers of about 1 / sqrt(inputs)."""
    draw, groups = rng(seed), 1 if group == -1 else inputs // group
    codes = draw.integers(0, 16, (out, inputs), np.uint8)
    scales = (draw.uniform(0.1, 0.4, (out, groups)) / inputs**0.5).astype(np.float16)
    points = draw.integers(0, 16, (out, groups), np.uint8) if zeros else None
    of = np.arange(inputs) // (inputs if group == -1 else group)
    less = 8.0 if points is None else points.astype(np.float32)[:, of]
    return codes, scales, points, scales.astype(np.float32)[:, of] * (codes.astype(np.float32) - less)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_four_bit_groups(group, zeros, dtype):
    for rows, inputs, out in SHAPES:
        codes, scales, points, weight = int4_weight(out, inputs, group, zeros)
        packed = int4.pack_int4(tensor(codes), torch.from_numpy(scales), tensor(points))
        x, bias = activations(rows, inputs, dtype), activations(1, out, dtype, 2)[0]
        check(int4.linear(tensor(x, dtype), packed, tensor(bias, dtype)), x, weight, bias, dtype)
        np.testing.assert_array_equal(int4.unpack(packed, torch.float32).numpy(), weight)


def test_groups_of_128_and_of_what_is_no_power_of_two():
    for group, inputs in ((128, 256), (48, 144), (-1, 200)):
        codes, scales, points, weight = int4_weight(24, inputs, group, True)
        x = activations(5, inputs, "float32")
        packed = int4.pack_int4(tensor(codes), torch.from_numpy(scales), tensor(points))
        check(int4.linear(tensor(x), packed), x, weight, None, "float32")
    with pytest.raises(ValueError, match="multiple of 16"):
        int4.pack_int4(tensor(codes), torch.ones(24, 25))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_in_another_order(dtype):
    """As GPTQ has them after "desc_act": codes are sorted by group, and x is read in their order."""
    order = rng(3).permutation(192).astype(np.int32)
    codes, scales, points, weight = int4_weight(33, 192, 64, True)
    x = activations(4, 192, dtype)
    packed = int4.pack_int4(tensor(codes), torch.from_numpy(scales), tensor(points), tensor(order))
    want = np.empty_like(weight)
    want[:, order] = weight
    check(int4.linear(tensor(x, dtype), packed), x, want, None, dtype)
    np.testing.assert_array_equal(int4.unpack(packed, torch.float32).numpy(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_what_ggufs_own_package_reads(dtype):
    """GGUF's block: the exponent, then numbers j in the low and j + 16 in the high halves of 16 bytes."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    codes = rng(4).integers(0, 16, (70, 160), np.uint8)
    exponents = rng(5).integers(118, 128, (70, 5), np.uint8)
    blocks = codes.reshape(70, 5, 2, 16)
    stored = np.concatenate([exponents[..., None], blocks[:, :, 0] | blocks[:, :, 1] << 4], axis=-1).reshape(70, -1)
    weight = dequantize(stored, GGMLQuantizationType.MXFP4)
    packed = int4.pack_mxfp4(tensor(codes), tensor(exponents))
    x = activations(3, 160, dtype)
    check(int4.linear(tensor(x, dtype), packed), x, weight, None, dtype)
    np.testing.assert_array_equal(int4.unpack(packed, torch.float32).numpy(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_with_activations_as_they_come(dtype):
    for rows, inputs, out in (*SHAPES, (2, 129, 5)):
        numbers = rng(6).integers(-127, 128, (out, inputs)).astype(np.int8)
        scales = rng(7).uniform(0.5, 2, (out, 1)).astype(np.float32) / 127 / inputs**0.5
        x, bias = activations(rows, inputs, dtype), activations(1, out, dtype, 2)[0]
        check(int8.linear(tensor(x, dtype), tensor(numbers), tensor(scales), tensor(bias, dtype)), x, numbers * scales, bias, dtype)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_whole_numbers_with_whole_numbers(out_dtype):
    for rows, inputs, out in (*SHAPES, (2, 129, 5)):
        numbers = rng(6).integers(-127, 128, (out, inputs)).astype(np.int8)
        scales, bias = rng(7).uniform(0.5, 2, (out, 1)).astype(np.float32) / 1e4, activations(1, out, "float16", 2)[0]
        x = quantise.quantise_rows(tensor(activations(rows, inputs, "float32")), "int8")
        sums = x.numbers.numpy().astype(np.int64) @ numbers.T.astype(np.int64)
        want = sums.astype(np.float64) * x.scales.numpy() * scales.T + bias
        got = int8.linear_rows(x, tensor(numbers), tensor(scales), tensor(bias), getattr(torch, out_dtype))
        near(got, want, out_dtype, "rms_norm")


def fp8_weight(out, inputs, scaling):
    numbers = torch.from_numpy(rng(8).normal(0, 60, (out, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
    shape = {"tensor": (1, 1), "channel": (out, 1), "block": (-(-out // 128), -(-inputs // 128))}[scaling]
    scales = rng(9).uniform(0.5, 2, shape).astype(np.float32) / 60 / inputs**0.5
    wide = scales
    if scaling == "block":
        wide = scales.repeat(128, axis=0)[:out].repeat(128, axis=1)[:, :inputs]
    return numbers, tensor(scales), numbers.float().numpy() * wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", ["tensor", "channel", "block"])
def test_eight_bit_floats_with_activations_as_they_come(scaling, dtype):
    for rows, inputs, out in ((1, 128, 40), (3, 320, 150)):
        numbers, scales, weight = fp8_weight(out, inputs, scaling)
        x, bias = activations(rows, inputs, dtype), activations(1, out, dtype, 2)[0]
        check(fp8.linear(tensor(x, dtype), numbers, scales, tensor(bias, dtype)), x, weight, bias, dtype)


@pytest.mark.parametrize("scaling", ["tensor", "channel", "block"])
def test_eight_bit_floats_with_eight_bit_floats(scaling):
    for rows, inputs, out in ((1, 128, 40), (35, 320, 150)):
        numbers, scales, weight = fp8_weight(out, inputs, scaling)
        x = tensor(activations(rows, inputs, "float32"))
        given = quantise.quantise_blocks(x) if scaling == "block" else quantise.quantise_rows(x, "fp8")
        factors = given.scales.repeat_interleave(128, dim=1)[:, :inputs] if scaling == "block" else given.scales
        got = fp8.linear_rows(given, numbers, scales, None, torch.float32)
        check(got, (given.numbers.float() * factors).numpy(), weight, None, "float32")


def test_scales_that_fit_nothing_are_refused():
    numbers, scales, _ = fp8_weight(40, 128, "channel")
    x = tensor(activations(2, 128, "float32"))
    with pytest.raises(ValueError, match="none of a weight"):
        fp8.linear(x, numbers, scales[:7])
    with pytest.raises(ValueError, match="can't be multiplied"):
        fp8.linear_rows(quantise.quantise_rows(x, "fp8")._replace(scales=torch.ones(2, 3)), numbers, scales, None, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_are_summed_in_parts_that_do_not_depend_on_the_batch(dtype):
    codes, scales, points, weight = int4_weight(24, 2048, 128, True)
    packed = int4.pack_int4(tensor(codes), torch.from_numpy(scales), tensor(points))
    x = activations(40, 2048, dtype)
    many = int4.linear(tensor(x, dtype), packed, invariant=True)
    check(many, x, weight, None, dtype)
    for row in (0, 17, 39):
        assert torch.equal(many[row : row + 1], int4.linear(tensor(x[row : row + 1], dtype), packed, invariant=True))
    assert torch.equal(many[:20], int4.linear(tensor(x[:20], dtype), packed))


def test_whole_numbers_in_parts_are_exact_and_no_plan_changes_a_bit():
    """2,560 inputs of few outputs: a few rows are summed in five parts, many in one."""
    numbers, scales = (
        rng(6).integers(-127, 128, (24, 2560)).astype(np.int8),
        rng(7).uniform(0.5, 2, (24, 1)).astype(np.float32) / 1e4,
    )
    x = quantise.quantise_rows(tensor(activations(40, 2560, "float32")), "int8")
    bias = activations(1, 24, "float32", 2)[0]
    sums = x.numbers.numpy().astype(np.int64) @ numbers.T.astype(np.int64)
    many = int8.linear_rows(x, tensor(numbers), tensor(scales), tensor(bias), torch.float32)
    near(many, sums * x.scales.numpy().astype(np.float64) * scales.T + bias, "float32", "rms_norm")
    few = quantise.Rows(x.numbers[:3], x.scales[:3])
    assert products.split(2560, products.rows_plan(3, 24, 2560, x.numbers.device, kind="int8", invariant=False)) == (512, 5)
    assert torch.equal(int8.linear_rows(few, tensor(numbers), tensor(scales), tensor(bias), torch.float32), many[:3])


@pytest.mark.parametrize("scaling", ["channel", "block"])
def test_long_rows_of_eight_bit_floats_are_summed_in_parts(scaling):
    numbers, scales, weight = fp8_weight(24, 1100, scaling)
    x, bias = tensor(activations(40, 1100, "float32")), activations(1, 24, "float32", 2)[0]
    given = quantise.quantise_blocks(x) if scaling == "block" else quantise.quantise_rows(x, "fp8")
    factors = given.scales.repeat_interleave(128, dim=1)[:, :1100] if scaling == "block" else given.scales
    got = fp8.linear_rows(given, numbers, scales, tensor(bias), torch.float32, invariant=True)
    check(got, (given.numbers.float() * factors).numpy(), weight, bias, "float32")
    alone = fp8.linear_rows(quantise.Rows(given.numbers[7:8], given.scales[7:8]), numbers, scales, tensor(bias), torch.float32)
    assert torch.equal(alone, got[7:8])
