"""Emulated quantisation and quantised products against plain formulas, FRACTAL_NZ, 4-bit packing, and each limit violated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

NZ = 29
M, K, N = 5, 96, 64


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*shape: int, seed: int = 0, low: int = -127, high: int = 128, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted.double(), atol=tolerance * float(wanted.abs().max()), rtol=tolerance)


@pytest.fixture
def internal_formats(npu):
    torch.npu.config.allow_internal_format = True
    yield npu
    torch.npu.config.allow_internal_format = False


# ---- activations ----


@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quantisation_per_token(npu, smooth):
    x, s = rand(M, K), rand(K, seed=1).abs() + 0.5
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), smooth_scales=s.npu() if smooth else None)
    wanted = x.double() * (s.double() if smooth else 1)
    torch.testing.assert_close(scale.cpu().double(), wanted.abs().amax(-1) / 127, rtol=1e-6, atol=0)
    assert (
        y.dtype == torch.int8
        and (y.cpu().double() * scale.cpu().double()[:, None] - wanted).abs().max() <= scale.max().cpu() * 0.501
    )


def test_a_row_of_zeros_quantises_to_zeros(npu):
    y, scale = torch.ops.npu.npu_dynamic_quant(torch.zeros(2, 32).half().npu())
    assert not y.cpu().any() and not scale.cpu().any()


@pytest.mark.parametrize("divides", [False, True])
def test_static_quantisation(npu, divides):
    x, scale, zero = rand(M, K), torch.tensor([0.037 if divides else 27.0]), torch.tensor([3.0])
    dtypes = (torch.float32, torch.int32) if divides else (torch.float16, torch.float16)
    y = torch.ops.npu.npu_quantize(x.npu(), scale.to(dtypes[0]).npu(), zero.to(dtypes[1]).npu(), torch.qint8, -1, divides)
    given = np.float32(scale.to(dtypes[0]).item())
    scaled = x.float().numpy() / given if divides else x.float().numpy() * given
    assert np.array_equal(y.cpu().numpy(), np.clip(np.rint(scaled + np.float32(3)), -128, 127).astype(np.int8))


# ---- int8 x int8 ----


def product(**changes: Any) -> torch.Tensor:
    given = {"pertoken_scale": rand(M, seed=4).abs().float(), "output_dtype": torch.bfloat16, **changes}
    x1, x2, scale = (
        given.pop(n, d) for n, d in (("x1", ints(M, K)), ("x2", ints(K, N, seed=1)), ("scale", rand(N, seed=3).abs().float()))
    )
    move = lambda v: v.npu() if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v
    return torch.ops.npu.npu_quant_matmul(move(x1), move(x2), move(scale), **{k: move(v) for k, v in given.items()})


def exact() -> torch.Tensor:
    return ints(M, K).double() @ ints(K, N, seed=1).double()


def test_a_product_per_token(npu):
    wanted = exact() * rand(N, seed=3).abs().double() * rand(M, seed=4).abs().double()[:, None]
    close(product(), wanted, 1e-2)
    close(product(output_dtype=torch.float16, pertoken_scale=rand(M, seed=4).abs().float() * 1e-4), wanted * 1e-4)
    assert npu.log.names == ["aclnnQuantMatmulV5"] * 2


def test_a_transposed_weight_gives_the_same(npu):
    stored = ints(K, N, seed=1).t().contiguous().npu()
    assert torch.equal(product(x2=stored.t()).cpu(), product().cpu())


@pytest.mark.parametrize("bias", [torch.int32, torch.float32, torch.bfloat16])
def test_a_bias_is_added_before_the_scale_or_after(npu, bias):
    b = ints(N, seed=5, low=-9000, high=9000, dtype=torch.int32) if bias == torch.int32 else rand(N, seed=5, dtype=bias)
    scales = rand(N, seed=3).abs().double() * rand(M, seed=4).abs().double()[:, None]
    wanted = (exact() + b.double()) * scales if bias == torch.int32 else exact() * scales + b.double()
    close(product(bias=b), wanted, 1e-2)


def test_a_static_product_packs_its_scale(npu):
    scale = torch.full((N,), 2.0**-12)
    close(product(scale=scale, pertoken_scale=None, output_dtype=torch.float16), exact() * 2.0**-12)
    assert npu.log.names == ["aclnnTransQuantParamV3", "aclnnQuantMatmulV5"]
    assert npu.log.last("aclnnQuantMatmulV5").scale.dtype == torch.int64


def test_packed_scales_lose_thirteen_bits_and_carry_an_offset(npu):
    packed = torch.ops.npu.npu_trans_quant_param(torch.tensor([1.00001, 0.25]).npu(), torch.tensor([-3.0, 7.0]).npu()).cpu()
    bits = np.array([1.00001, 0.25], np.float32).view(np.uint32).astype(np.int64) & 0xFFFFE000
    wanted = bits | (1 << 46) | (np.array([-3 & 0x1FF, 7]) << 37)
    assert packed.tolist() == wanted.tolist()


def test_an_int8_output_has_an_offset(npu):
    scale = torch.full((N,), 2.0**-11)
    found = product(scale=scale, offset=torch.full((N,), 5.0), pertoken_scale=None, output_dtype=torch.int8)
    wanted = np.clip(np.rint(exact().numpy() * 2.0**-11 + 5), -128, 127)
    assert np.array_equal(found.cpu().numpy(), wanted)


def test_a_sum_is_left_whole(npu):
    assert torch.equal(product(pertoken_scale=None, output_dtype=torch.int32).cpu().double(), exact())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_dtype": torch.float32}, "no documented row"),
        ({"pertoken_scale": torch.ones(3)}, "pertoken_scale is"),
        ({"bias": torch.zeros(63)}, "bias|63"),
        ({"scale": torch.ones(7)}, "scale has 1 or 64 elements"),
        ({"x1": ints(M, K).half()}, "x1 and x2 are int8"),
        ({"bias": torch.zeros(N).double()}, "no documented row"),
        ({"output_dtype": torch.int8}, "no documented row"),
    ],
)
def test_a_product_beyond_a_limit_is_refused(npu, changes, message):
    with pytest.raises(RuntimeError, match=message):
        product(**changes)


# ---- float x int8 or int4 ----


def weight_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: Any = None, **more: Any) -> torch.Tensor:
    move = lambda v: v.npu() if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v
    return torch.ops.npu.npu_weight_quant_batchmatmul(
        *map(move, (x, weight, scale, offset)), **{k: move(v) for k, v in more.items()}
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_eight_bits_per_channel(npu, dtype):
    x, w, s, o = rand(M, K, dtype=dtype), ints(K, N), rand(1, N, seed=1, dtype=dtype), rand(1, N, seed=2, dtype=dtype)
    bias = rand(N, seed=3, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    wanted = x.double() @ ((w.double() + o.double()) * s.double()) + bias.double()
    close(weight_product(x, w, s, o, bias=bias), wanted, 1e-2)
    assert torch.equal(weight_product(x, w.t().contiguous().npu().t(), s, o).cpu(), weight_product(x, w, s, o).cpu())


@pytest.mark.parametrize("group", [0, 32])
def test_weights_of_four_bits(npu, group):
    x, w = rand(M, K), ints(K, N, low=-8, high=8, dtype=torch.int32)
    groups = K // group if group else 1
    s, o = rand(groups, N, seed=1), rand(groups, N, seed=2)
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(w.npu())
    assert packed.shape == (K, N // 8)
    rows = lambda t: t.double().repeat_interleave(K // groups, 0)
    wanted = x.double() @ ((w.double() + rows(o)) * rows(s))
    close(weight_product(x, packed, s, o, antiquant_group_size=group), wanted)


def test_four_bits_lie_with_the_first_number_lowest(npu):
    w = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, 4]], dtype=torch.int32)
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(w.npu()).cpu()
    assert packed[0, 0].item() & 0xFFFFFFFF == sum((v & 15) << 4 * i for i, v in enumerate(w[0].tolist()))


def test_packing_reads_the_last_dimension_in_eights(npu):
    with pytest.raises(RuntimeError):
        torch.ops.npu.npu_convert_weight_to_int4pack(torch.zeros(4, 12, dtype=torch.int32).npu())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": rand(1, N, dtype=torch.bfloat16)}, "scale and offset have the dtype of x"),
        ({"scale": rand(1, 3), "offset": None}, "a scale is"),
        ({"antiquant_group_size": 48}, "multiple of 32"),
        ({"antiquant_group_size": 32}, "a scale per group is"),
        ({"antiquant_group_size": 96}, "multiple of 32"),
        ({"offset": rand(N)}, "scale and offset have one shape"),
        ({"bias": rand(N).float()}, "bias is torch.float16"),
        ({"x": rand(M, K).float()}, "x is float16 or bfloat16"),
    ],
)
def test_a_weight_product_beyond_a_limit_is_refused(npu, changes, message):
    given = {"x": rand(M, K), "weight": ints(K, N), "scale": rand(1, N), "offset": rand(1, N), **changes}
    with pytest.raises(RuntimeError, match=message):
        weight_product(**given)


# ---- FRACTAL_NZ ----


def nz_by_hand(x: np.ndarray, c0: int) -> np.ndarray:
    """Element (r, c) of [R, C] lies at [c // C0, r // 16, r % 16, c % C0]."""
    rows, columns = x.shape
    out = np.zeros((-(-columns // c0), -(-rows // 16), 16, c0), x.dtype)
    for r in range(rows):
        for c in range(columns):
            out[c // c0, r // 16, r % 16, c % c0] = x[r, c]
    return out


@pytest.mark.parametrize(("dtype", "c0"), [(torch.int8, 32), (torch.float16, 16)])
def test_a_cast_lays_out_fractals_and_back(internal_formats, dtype, c0):
    from emulated_cann.objects import raw_memory

    x = ints(20, 40).to(dtype)
    cast = torch.ops.npu.npu_format_cast(x.npu(), NZ)
    stored = raw_memory(cast).numpy()
    wanted = nz_by_hand(x.numpy(), c0)
    assert torch.ops.npu.get_npu_format(cast) == NZ and np.array_equal(stored.reshape(wanted.shape), wanted)
    assert torch.equal(torch.ops.npu.npu_format_cast(cast, 2).cpu(), x) and torch.equal(cast.cpu(), x)


def test_products_take_weights_in_fractals(internal_formats):
    w = torch.ops.npu.npu_format_cast(ints(K, N, seed=1).npu(), NZ)
    assert torch.equal(product(x2=w).cpu(), product().cpu())
    assert internal_formats.log.count("aclnnQuantMatmulWeightNz") == 1


def test_a_float32_weight_has_no_fractals(internal_formats):
    with pytest.raises(RuntimeError, match="emulated CANN has no aclopCompileAndExecute"):
        torch.ops.npu.npu_format_cast(rand(32, 32).float().npu(), NZ)


def test_operators_that_read_plain_tensors_refuse_fractals(internal_formats):
    w = torch.ops.npu.npu_format_cast(rand(32, 64).npu(), NZ)
    with pytest.raises(RuntimeError, match="npu_swiglu do not support internal format"):
        torch.ops.npu.npu_swiglu(w)
    with pytest.raises(ValueError, match="add takes no FRACTAL_NZ"):
        w + 1


def test_plain_products_take_fractals_whole_or_transposed(internal_formats):
    x, w = rand(3, 40), rand(40, 24, seed=1)
    assert torch.equal((x.npu() @ torch.ops.npu.npu_format_cast(w.npu(), NZ)).cpu(), x @ w)
    stored = torch.ops.npu.npu_format_cast(w.t().contiguous().npu(), NZ)
    assert torch.equal((x.npu() @ stored.t()).cpu(), x @ w)


def test_weight_only_products_take_no_fractals_outside_graph_mode(internal_formats):
    w = torch.ops.npu.npu_format_cast(ints(K, N).npu(), NZ)
    with pytest.raises(RuntimeError, match="takes no FRACTAL_NZ as weight"):
        weight_product(rand(M, K), w, rand(1, N), rand(1, N))
