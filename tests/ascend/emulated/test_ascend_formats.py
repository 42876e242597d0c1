"""Quantised weights on an emulated NPU: the fused products run, and whole numbers that a checkpoint has are kept as they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from quantised_files import quantised_pair
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.weights import open_checkpoint
from trivium.weights.formats import make_weight

PROMPT = [(7 * i * i + 3) % 250 for i in range(60)]
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LOAD = {"progress": False, "strict": True, "num_kv_blocks": 12, "max_model_len": 256, "max_num_seqs": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
ROUNDING_NORM = "aclnnAddRmsNormDynamicQuantV2"
PRODUCTS = {"w8a8": "aclnnQuantMatmulWeightNz", "int8": "aclnnWeightQuantBatchMatmulV2", "int4": "aclnnWeightQuantBatchMatmulV2"}


def pack(codes, axis):
    """Eight numbers of 4 bits along an axis in an int32, the first in the lowest bits."""
    shape = codes.shape[:axis] + (codes.shape[axis] // 8, 8) + codes.shape[axis + 1 :]
    places = np.arange(0, 32, 4, dtype=np.uint32).reshape([-1] + [1] * (codes.ndim - axis - 1))
    return np.bitwise_or.reduce(codes.astype(np.uint32).reshape(shape) << places, axis=axis + 1).view(np.int32)


def gptq(stem, array, rng):
    """Random codes, zero points and scales in groups of 32 as GPTQ stores them, and what they stand for."""
    out, inputs = array.shape
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(1, 17, (inputs // 32, out))
    scales = (rng.uniform(0.5, 1.5, zeros.shape) * np.abs(array).max() / 8).astype(np.float16)
    parts = {"qweight": pack(codes, 0), "qzeros": pack((zeros - 1) % 16, 1), "scales": scales}
    true = zeros % 16
    return parts, on_grid(codes - true.repeat(32, 0), scales.astype(np.float32).repeat(32, 0))


def awq(stem, array, rng):
    """The same as AWQ stores it: outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    parts, (inputs, out) = {}, array.shape[::-1]
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(0, 16, (inputs // 32, out))
    scales = (rng.uniform(0.5, 1.5, zeros.shape) * np.abs(array).max() / 8).astype(np.float16)
    for name, numbers in (("qweight", codes), ("qzeros", zeros)):
        shuffled = numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape)
        parts[name] = pack(shuffled, 1)
    return {**parts, "scales": scales}, on_grid(codes - zeros.repeat(32, 0), scales.astype(np.float32).repeat(32, 0))


def on_grid(whole, scales):
    """float32[out, in] of whole numbers and scales [in, out]."""
    return np.ascontiguousarray((whole * scales).T.astype(np.float32))


def bfloat16(shape, array, rng):
    """Random scales with 8 bits of fraction: (float32, their upper halves as they are stored)."""
    scales = (rng.uniform(0.5, 1.5, shape) * np.abs(array).max() / 127).astype(np.float32).view(np.uint32) & 0xFFFF0000
    return scales.view(np.float32), ((scales >> 16).astype(np.uint16), "BF16")


def compressed4(stem, array, rng):
    """compressed-tensors' pack-quantized: numbers -8..7 stored as 0..15, eight inputs a word."""
    out, inputs = array.shape
    whole, (scales, stored) = rng.integers(-8, 8, (out, inputs)), bfloat16((out, inputs // 32), array, rng)
    parts = {"weight_packed": pack(whole + 8, 1), "weight_scale": stored, "weight_shape": np.array([out, inputs], np.int64)}
    return parts, (whole * scales.repeat(32, 1)).astype(np.float32)


def compressed8(stem, array, rng):
    """compressed-tensors' int-quantized, with a scale an output."""
    whole, (scales, stored) = rng.integers(-127, 128, array.shape), bfloat16((len(array), 1), array, rng)
    return {"weight": whole.astype(np.int8), "weight_scale": stored}, (whole * scales).astype(np.float32)


def compressed_config(format, bits, **weights):
    group = {
        "targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "symmetric": True, **weights},
        "input_activations": None, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


STORED = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False}, gptq, "int4", 32,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq, "int4", 32),
    "compressed-tensors, 4 bits": (
        compressed_config("pack-quantized", 4, strategy="group", group_size=32), compressed4, "int4", 32
    ),
    "compressed-tensors, 8 bits": (compressed_config("int-quantized", 8, strategy="channel"), compressed8, "int8", 0),
}  # fmt: skip


def logprobs(folder, backend, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        [output] = llm.generate([PROMPT], SCORED)
        tokens = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    return np.array([p[i].logprob for i, p in zip(PROMPT[1:], output.prompt_logprobs[1:])]), tokens


class Plain(NamedTuple):
    """A model in float32, and what it answers by trivium_torch on the host."""

    folder: Path
    logprobs: np.ndarray
    tokens: list[int]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("m") / "llama", "llama", **SIZES)
    return Plain(folder, *logprobs(folder, "torch:cpu", dtype="float32", kv_dtype="float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_quantised_products_are_fused_and_change_little(npu, plain, format, dtype):
    folder, wanted, _ = plain
    found, _ = logprobs(folder, "ascend", dtype=dtype, quantize=format)
    assert 0 < np.abs(found - wanted).mean() < (0.4 if format == "int4" else 0.08)
    assert npu.log.count(PRODUCTS[format]) > 0
    assert (npu.log.count("aclnnDynamicQuantV2") > 0) == (npu.log.count(ROUNDING_NORM) > 0) == (format == "w8a8")
    assert npu.log.aten["mm"] < npu.log.count(PRODUCTS[format])  # the head stays as it is, or has 8 bits


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_norms_hand_on_8_bits_to_the_products_that_round(npu, plain, graphs):
    """Of a step's 13 products (q, k, v, output, gate with up and down in two layers, and the head) 8 round by themselves: the first
    layer's q, k and v and the head, whose norms have no sum before them, outputs and downs. The three other norms round."""
    options = {"dtype": "float16", "quantize": "w8a8", "backend_options": {"graphs": graphs}}
    found, tokens = logprobs(plain.folder, "ascend", **options)
    counts = [npu.log.ran.count(n) for n in (PRODUCTS["w8a8"], "aclnnDynamicQuantV2", ROUNDING_NORM, "aclnnRmsNorm")]
    steps = counts[-1] // 2
    assert steps >= 9 and counts == [13 * steps, 8 * steps, 3 * steps, 2 * steps]
    assert tokens == plain.tokens and np.abs(found - plain.logprobs).mean() < 0.08


def test_norms_that_round_are_as_exact_as_products_that_do(npu, plain, monkeypatch):
    import trivium_ascend.executor as executor

    options = {"dtype": "float16", "quantize": "w8a8", "backend_options": {"graphs": False}}
    found, _ = logprobs(plain.folder, "ascend", **options)
    monkeypatch.setattr(executor, "round_norms", lambda session, lines, weights: lines)
    npu.log.clear()
    apart, _ = logprobs(plain.folder, "ascend", **options)
    assert npu.log.count("aclnnDynamicQuantV2") == npu.log.count(PRODUCTS["w8a8"]) and not npu.log.count(ROUNDING_NORM)
    assert np.abs(found - plain.logprobs).mean() < 1.3 * np.abs(apart - plain.logprobs).mean()


def test_a_norm_that_anything_else_reads_stays_as_it_is(npu, tmp_path):
    """A gated unit of GELU is no fused operator here, so that its products are torch's and take no 8 bits."""
    folder = make_checkpoint(tmp_path / "gelu", "llama", hidden_act="gelu_pytorch_tanh", **SIZES)
    wanted, _ = logprobs(folder, "torch:cpu", dtype="float32", kv_dtype="float32")
    found, _ = logprobs(folder, "ascend", dtype="float16", quantize="w8a8")
    steps = npu.log.ran.count("aclnnRmsNorm") // 2
    assert steps and npu.log.ran.count(ROUNDING_NORM) == steps  # the second layer's q, k and v
    assert npu.log.ran.count("aclnnAddRmsNorm") == 2 * steps
    assert np.abs(found - wanted).mean() < 0.08


def test_tiles_are_left_off_when_the_user_says_so(npu, plain):
    folder, wanted, _ = plain
    found, _ = logprobs(folder, "ascend", dtype="float16", quantize="w8a8", backend_options={"nz": False})
    assert npu.log.count("aclnnQuantMatmulV5") > 0 and not npu.log.count("aclnnQuantMatmulWeightNz")
    assert np.abs(found - wanted).mean() < 0.08


@pytest.mark.parametrize("name", STORED)
def test_a_checkpoint_keeps_its_numbers(npu, tmp_path, name):
    """Resident numbers are the checkpoint's own, where they are on a lattice already: only the activations' rounding is left."""
    config, store, format, group = STORED[name]
    folder, meant, _ = quantised_pair(tmp_path, config, store, **SIZES)
    wanted, tokens = logprobs(meant, "torch:cpu", dtype="float32", kv_dtype="float32")
    found, same = logprobs(folder, "ascend", dtype="float16", kv_dtype="float16", quantize=format)
    assert same == tokens
    assert np.abs(found - wanted).max() < 0.05
    assert npu.log.last("aclnnWeightQuantBatchMatmulV2").group == group


@pytest.mark.parametrize("name", STORED)
def test_every_resident_number_is_the_checkpoint_s(tmp_path, name):
    torch = pytest.importorskip("torch")
    from trivium_ascend.chips import CHIPS
    from trivium_ascend.weights import make_quantised

    config, store, format, _ = STORED[name]
    folder, _, meant = quantised_pair(tmp_path, config, store, **SIZES)
    checkpoint = open_checkpoint(folder)
    for stem in ("self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.1.{stem}.weight"
        resident = make_quantised(checkpoint.tensor(name), format, torch.device("cpu"), torch.float16, CHIPS["910B"])
        np.testing.assert_array_equal(resident.to(torch.float32).numpy(), meant[name])


def test_every_resident_number_is_that_of_q4_0():
    torch = pytest.importorskip("torch")
    from trivium_ascend.chips import CHIPS
    from trivium_ascend.weights import Groups4, make_quantised

    blocks = gguf.quantize(np.random.default_rng(5).standard_normal((24, 128), np.float32), gguf.GGMLQuantizationType.Q4_0)
    weight = make_weight("w", (24, 128), "q4_0", blocks)
    resident = make_quantised(weight, "int4", torch.device("cpu"), torch.float16, CHIPS["910B"])
    assert isinstance(resident, Groups4) and resident.group == 32
    np.testing.assert_array_equal(resident.to(torch.float32).numpy(), gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))


def test_lattices_are_found_exactly_and_nowhere_else():
    torch = pytest.importorskip("torch")
    from trivium_ascend.weights import groups4, lattice, rows8

    generator = torch.Generator().manual_seed(3)
    scales = (torch.rand(50, 1, generator=generator) + 0.01).half().float()
    whole = torch.randint(-8, 8, (50, 64), generator=generator).float()
    whole[:, :2] = torch.tensor([1.0, 7.0])  # so that no coarser lattice holds them
    assert torch.equal(lattice(whole * scales, 8), scales)
    numbers, steps, offsets, exact = groups4(whole * scales, 64, torch.float16, True)
    assert exact and torch.equal(((numbers.t() + offsets.t().float()) * steps.t().float()), whole * scales)
    noise = torch.randn(50, 64, generator=generator)
    assert not groups4(noise, 64, torch.float16, True)[3]
    wide = torch.randint(-127, 128, (50, 64), generator=generator).float()
    wide[:, :2] = torch.tensor([3.0, 100.0])
    found, sizes = rows8(wide * scales, True)
    assert torch.equal(found.float(), wide) and torch.equal(sizes, scales)
