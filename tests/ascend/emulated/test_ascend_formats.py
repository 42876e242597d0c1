"""Quantised weights on an emulated NPU: the fused products run, and whole numbers that a checkpoint has are kept as they are."""

from __future__ import annotations

import numpy as np
import pytest
from quantised_files import quantised_pair
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams

PROMPT = [(7 * i * i + 3) % 250 for i in range(60)]
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LOAD = {"progress": False, "strict": True, "num_kv_blocks": 12, "max_model_len": 256, "max_num_seqs": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
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
    return parts, ((codes - true.repeat(32, 0)) * scales.astype(np.float32).repeat(32, 0)).T.astype(np.float32)


def logprobs(folder, backend, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        [output] = llm.generate([PROMPT], SCORED)
        tokens = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    return np.array([p[i].logprob for i, p in zip(PROMPT[1:], output.prompt_logprobs[1:])]), tokens


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("m") / "llama", "llama", **SIZES)
    return folder, logprobs(folder, "torch:cpu", dtype="float32", kv_dtype="float32")[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_quantised_products_are_fused_and_change_little(npu, plain, format, dtype):
    folder, wanted = plain
    found, _ = logprobs(folder, "ascend", dtype=dtype, quantize=format)
    assert 0 < np.abs(found - wanted).mean() < (0.4 if format == "int4" else 0.08)
    assert npu.log.count(PRODUCTS[format]) > 0
    assert npu.log.count("aclnnDynamicQuantV2") == (npu.log.count(PRODUCTS[format]) if format == "w8a8" else 0)
    assert npu.log.aten["mm"] < npu.log.count(PRODUCTS[format])  # the head stays as it is, or has 8 bits


def test_tiles_are_left_off_when_the_user_says_so(npu, plain):
    folder, wanted = plain
    found, _ = logprobs(folder, "ascend", dtype="float16", quantize="w8a8", backend_options={"nz": False})
    assert npu.log.count("aclnnQuantMatmulV5") > 0 and not npu.log.count("aclnnQuantMatmulWeightNz")
    assert np.abs(found - wanted).mean() < 0.08


def test_a_gptq_checkpoint_keeps_its_numbers(npu, tmp_path):
    """int4 of what is on a lattice already is the checkpoint itself: only the activations' rounding is left."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False}
    folder, meant, _ = quantised_pair(tmp_path, config, gptq, **SIZES)
    wanted, tokens = logprobs(meant, "torch:cpu", dtype="float32", kv_dtype="float32")
    found, same = logprobs(folder, "ascend", dtype="float16", kv_dtype="float16", quantize="int4")
    assert same == tokens
    assert np.abs(found - wanted).max() < 0.05
    assert npu.log.last("aclnnWeightQuantBatchMatmulV2").group == 32


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
