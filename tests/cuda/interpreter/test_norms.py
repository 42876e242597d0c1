"""Norms, gates and quantised rows against the operators' references."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, exact, near, rng, rounded, tensor, tl, torch, triton

from trivium_cuda.kernels import activations, norms, quantise
from trivium_cuda.kernels.common import from_e4m3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_every_example_is_the_references(dtype):
    for (x, weight), attrs in cases("rms_norm", dtype):
        got = norms.rms_norm(tensor(x, dtype), tensor(weight, dtype), **{"eps": 1e-6, **attrs})
        near(got, OPERATORS["rms_norm"](x, weight, **attrs), dtype, "rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_are_those_of_the_rounded_sum(dtype):
    for (x, weight), attrs in cases("rms_norm", dtype):
        y = rounded(rng(1).normal(0, 30, x.shape).astype(np.float32), dtype)
        total, got = norms.add_rms_norm(tensor(x, dtype), tensor(y, dtype), tensor(weight, dtype), **{"eps": 1e-6, **attrs})
        want = rounded((x + y).astype(np.float32), dtype)
        exact(total, want)
        near(got, OPERATORS["rms_norm"](want, weight, **attrs), dtype, "rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_gate_is_the_references(dtype):
    for (gate, up), attrs in cases("gated", dtype):
        got = activations.gated(tensor(gate, dtype), tensor(up, dtype), **attrs)
        near(got, OPERATORS["gated"](gate, up, **attrs), dtype, "gated")
    for (x,), attrs in cases("activation", dtype):
        got = activations.gated(tensor(x, dtype), tensor(np.ones_like(x), dtype), **attrs)
        near(got, OPERATORS["activation"](x, **attrs), dtype, "activation")


def quantised(x, kind):
    """(numbers, scales) by torch's own conversions, which are those of the host."""
    x = x.to(torch.float32)
    scales = x.abs().amax(dim=-1, keepdim=True) / (127 if kind == "int8" else 448)
    divided = x / torch.where(scales == 0, torch.inf, scales)
    return (divided.round().to(torch.int8) if kind == "int8" else divided.to(torch.float8_e4m3fn)), scales


def same(rows, x, kind):
    if kind == "fp8 blocks":
        for i in range(-(-x.shape[1] // 128)):
            part = slice(128 * i, 128 * (i + 1))
            same(quantise.Rows(rows.numbers[:, part].contiguous(), rows.scales[:, i : i + 1]), x[:, part], "fp8")
        return
    numbers, scales = quantised(x, kind)
    assert torch.equal(rows.scales, scales)
    assert torch.equal(rows.numbers.view(torch.uint8), numbers.view(torch.uint8))


def awkward(dtype, rows=7, n=150):
    """Rows of very different sizes, a row of zeros, one of numbers that are halfway between two bytes."""
    x = rng(2).normal(0, 1, (rows, n)) * 10.0 ** rng(3).uniform(-3, 3, (rows, 1))
    x[2] = 0
    x[3] = np.arange(n) / 2 - 127 * 0.5
    x[3, 0] = 127
    return tensor(x.astype(np.float32), dtype)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_rows_are_the_nearest_bytes(dtype, kind):
    x = awkward(dtype)
    same(quantise.quantise_rows(x, kind), x, kind)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_quantised_in_the_same_pass_is_what_two_passes_give(dtype, kind):
    x, y, weight = awkward(dtype), awkward(dtype) * 0.5, tensor(rng(4).normal(0, 1, 150).astype(np.float32))
    same(norms.rms_norm_quantise(x, weight, 1e-5, kind=kind), norms.rms_norm(x, weight, 1e-5), kind)
    total, rows = norms.add_rms_norm_quantise(x, y, weight, 1e-5, 1.0, kind=kind)
    exact(total, (x + y).float().numpy())
    same(rows, norms.add_rms_norm(x, y, weight, 1e-5, 1.0)[1], kind)
    same(activations.gated_quantise(x, y, limit=20.0, quantise=kind), activations.gated(x, y, limit=20.0), kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_a_scale_and_an_offset_that_are_given(dtype):
    """As ops.InputScale means it; what is out of reach becomes -128 or 127."""
    kind = quantise.Given(0.37, -9)
    x, y, weight = awkward(dtype), awkward(dtype) * 0.5, tensor(rng(4).normal(0, 1, 150).astype(np.float32))
    made = {
        "rows": (quantise.quantise_rows(x, kind), x),
        "norm": (norms.rms_norm_quantise(x, weight, 1e-5, kind=kind), norms.rms_norm(x, weight, 1e-5)),
        "sum": (norms.add_rms_norm_quantise(x, y, weight, 1e-5, kind=kind)[1], norms.add_rms_norm(x, y, weight, 1e-5)[1]),
        "gate": (activations.gated_quantise(x, y, quantise=kind), activations.gated(x, y)),
    }
    for name, (rows, of) in made.items():
        whole = np.rint(of.float().numpy() / np.float32(0.37)) - 9
        np.testing.assert_array_equal(rows.numbers.numpy(), np.clip(whole, -128, 127), err_msg=name)
        assert (rows.scales == np.float32(0.37)).all() and rows.scales.shape == (7, 1)
    reached = made["rows"][0].numbers
    assert reached.min() == -128 and reached.max() == 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_128_have_scales_of_their_own(dtype):
    x = awkward(dtype, n=300)
    rows = quantise.quantise_blocks(x)
    assert rows.scales.shape == (7, 3)
    same(rows, x, "fp8 blocks")


@triton.jit
def decode(X, Y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(Y + i, from_e4m3(tl.load(X + i)))


def test_every_byte_of_e4m3_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.empty(256, dtype=torch.float16)
    decode[(1,)](codes, got, N=256)
    want = codes.view(torch.float8_e4m3fn).to(torch.float16)
    numbers = ~want.isnan()
    assert torch.equal(got[numbers], want[numbers]) and numbers.sum() == 254
