"""W8A8 with scales for inputs that the checkpoint has: the products are those of the definition, and the norms hand on 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from modelslim_files import modelslim_pair
from quantised_files import quantised_pair

from trivium import LLM, SamplingParams
from trivium.ops import InputScale, Weight
from trivium.weights import open_checkpoint

torch = pytest.importorskip("torch")

PROMPT = [(7 * i * i + 3) % 250 for i in range(60)]
SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LOAD = {"progress": False, "num_kv_blocks": 12, "max_model_len": 256, "max_num_seqs": 2}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
STEPS = {**dict.fromkeys(MODULES, 9 / 256), "down_proj": 9 / 32}
"""For inputs up to 4.3 and, of the down projection, 34; numbers of bfloat16."""
HOW = {"steps": STEPS, "sizes": SIZES}
PRODUCT, NORM = "aclnnQuantMatmulWeightNz", "aclnnAddRmsNormQuant"


def answers(folder, backend, **options):
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        [output] = llm.generate([PROMPT], SCORED)
        tokens = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    return np.array([p[i].logprob for i, p in zip(PROMPT[1:], output.prompt_logprobs[1:])]), tokens


def rounded_inputs(x: Any, scale: float, offset: int) -> Any:
    """What inputs are taken for, by the definition of ops.InputScale, in float64."""
    return scale * (np.clip(np.round(x.astype(np.float64) / scale + offset), -128, 127) - offset)


@pytest.fixture
def products(monkeypatch):
    """products(folder, change): in trivium_torch on the host, the inputs of a ModelSlim folder's matrices are change(inputs,
    stem, the folder's weight)."""
    plain, found = torch.nn.functional.linear, list[tuple[Any, str, Weight, Any]]()

    def linear(x, weight, bias=None):
        for matrix, stem, stored, change in found:
            if matrix.shape == weight.shape and torch.equal(matrix, weight):
                x = torch.from_numpy(np.asarray(change(x.numpy(), stem, stored), np.float32))
        return plain(x, weight, bias)

    def use(folder, matrices, change):
        stored = {stem: open_checkpoint(folder).tensor(f"{stem}.weight") for stem in matrices}
        found[:] = [(torch.from_numpy(weight.decode()), stem, weight, change) for stem, weight in stored.items()]
        monkeypatch.setattr(torch.nn.functional, "linear", linear)

    return use


def calibrated(tmp_path, products, family):
    """Steps that bfloat16 has, for the largest input of each kind of module and offsets up to 9; and what the model answers that
    rounds nothing."""
    folder, plain, _, matrices = modelslim_pair(tmp_path, "W8A8", family, **HOW)
    largest = dict.fromkeys(MODULES, 0.0)

    def note(x, stem, _):
        module = stem.rpartition(".")[2]
        largest[module] = max(largest[module], float(np.abs(x).max()))
        return x

    products(folder, matrices, note)
    exact, _ = on_host(plain)
    alike = {**largest, **dict.fromkeys(MODULES[:3], largest["q_proj"]), "up_proj": largest["gate_proj"]}
    return {module: float(torch.tensor(top / 116).bfloat16()) for module, top in alike.items()}, exact


def on_host(folder):
    return answers(folder, "torch:cpu", dtype="float32", kv_dtype="float32")


@pytest.mark.parametrize(("family", "dtype", "shift"), [("llama", "bfloat16", -9), ("qwen2", "float16", 5)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_modelslim_checkpoint_is_as_exact_as_its_definition(npu, tmp_path, products, family, dtype, shift):
    """Rounding to so few steps is chaos: two that differ in the last bits of float16 part within a layer, so that errors are
    compared, not answers. Per step, q, k and v of the first layer, outputs and downs round by themselves; the three norms with
    a sum before them round for q, k, v and for gate with up."""
    steps, exact = calibrated(tmp_path / "calibrate", products, family)
    how = {"steps": steps, "sizes": SIZES, "shift": shift, "half": dtype == "float16"}
    folder, plain, _, matrices = modelslim_pair(tmp_path, "W8A8", family, **how)
    found, _ = answers(folder, "ascend", dtype=dtype, quantize="w8a8,lm_head=auto", strict=True)
    products(folder, matrices, lambda x, stem, weight: rounded_inputs(x, *weight.inputs))
    wanted, _ = on_host(plain)
    assert 0.005 < np.abs(wanted - exact).mean() < 0.7
    assert np.abs(found - exact).mean() < 1.5 * np.abs(wanted - exact).mean()
    steps = npu.log.ran.count("aclnnRmsNorm") // 2  # the first norm and the last before the head
    norms, products = (npu.log.ran.count(name) for name in ("aclnnAddRmsNormQuantV2", PRODUCT))
    assert steps >= 7 and not npu.log.count("aclnnDynamicQuant")
    assert (products, npu.log.ran.count("aclnnQuantize"), norms) == (12 * steps, 7 * steps, 3 * steps)


def test_a_scale_that_bfloat16_has_not_is_left_to_the_products(npu, tmp_path):
    folder, *_ = modelslim_pair(tmp_path, "W8A8", **{**HOW, "steps": dict.fromkeys(MODULES, 0.0351)})
    answers(folder, "ascend", dtype="bfloat16", quantize="w8a8", strict=True)
    assert not npu.log.count(NORM) and npu.log.count("aclnnQuantize") and npu.log.count("aclnnAddRmsNorm")


def test_readers_that_round_otherwise_get_the_norm_as_it_is(npu, tmp_path):
    folder, *_ = modelslim_pair(tmp_path, "W8A8", **{**HOW, "steps": {**STEPS, "k_proj": 0.04, "up_proj": 0.04}})
    answers(folder, "ascend", dtype="float16", quantize="w8a8", strict=True)
    assert not npu.log.count(NORM) and npu.log.count("aclnnAddRmsNorm") and npu.log.count("aclnnQuantize")


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8_MIX"])
def test_kinds_without_a_scale_for_all_tokens_are_rounded_token_by_token(npu, tmp_path, kind):
    folder, plain, *_ = modelslim_pair(tmp_path, kind, **HOW)
    found, _ = answers(folder, "ascend", dtype="float16", quantize="w8a8", strict=True)
    assert npu.log.count("aclnnDynamicQuant") and not npu.log.count("aclnnQuantize") and not npu.log.count("aclnnAddRmsNormQuant")
    assert np.abs(found - on_host(plain)[0]).mean() < 0.08


def test_scales_of_compressed_tensors_are_used(npu, tmp_path):
    """Numbers and scales are resident as they are stored, though they are of float32 and on no lattice of floats."""
    group = {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}, "ignore": []}

    def store(stem, array, rng):
        scales = (np.abs(array).max(axis=1, keepdims=True) / 127).astype(np.float32)
        whole = np.round(array / scales).astype(np.int8)
        step = np.array([STEPS[stem.rpartition(".")[2]]], np.float32)
        return {"weight": whole, "weight_scale": scales, "input_scale": step}, whole.astype(np.float32) * scales

    folder, plain, _ = quantised_pair(tmp_path, config, store, **SIZES)
    found, _ = answers(folder, "ascend", dtype="float16", quantize="w8a8", strict=True)
    assert npu.log.count("aclnnQuantize") and npu.log.count(NORM) and npu.log.last("aclnnQuantize").scale.numel() == 1
    assert np.abs(found - on_host(plain)[0]).mean() < 0.25


@pytest.mark.parametrize("quantize", ["int8", "auto"])
def test_formats_that_do_not_round_inputs_are_as_exact_as_the_weights(npu, tmp_path, quantize):
    folder, plain, *_ = modelslim_pair(tmp_path, "W8A8", **HOW)
    found, tokens = answers(folder, "ascend", dtype="float16", kv_dtype="float16", quantize=quantize, strict=True)
    wanted, same = on_host(plain)
    assert np.abs(found - wanted).max() < 0.05 and tokens == same
    assert not any(npu.log.count(name) for name in ("aclnnQuantize", "aclnnDynamicQuant", "aclnnQuantMatmul"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nz", [True, False])
def test_a_product_is_the_definition_s_to_the_last_bits(npu, dtype, nz):
    """(whole · numbersᵀ - offset * sums) * step * scale in float64; float16 keeps 10 bits of a scale's fraction, bfloat16 8 of the
    result's."""
    from trivium_ascend.chips import CHIPS
    from trivium_ascend.weights import make_quantised, tiled

    rng = np.random.default_rng(5)
    numbers, scales = rng.standard_normal((48, 96), np.float32), InputScale(0.021, -17)
    weight = Weight("w", numbers.shape, "float32", numbers, lambda data: data, inputs=scales)
    kind = getattr(torch, dtype)
    made = make_quantised(weight, "w8a8", torch.device("npu:0"), kind, CHIPS["910B"])
    resident = made.to(torch.float32).cpu().numpy().astype(np.float64)
    x = torch.from_numpy(rng.standard_normal((7, 96), np.float32) * 1.5).to(kind)
    found = (tiled(made) if nz else made).product(x.to("npu:0")).float().cpu().numpy()
    wanted = rounded_inputs(x.float().numpy(), *scales) @ resident.T
    assert (np.abs(rounded_inputs(x.float().numpy(), *scales) - x.float().numpy()) > 0.0211 / 2).any()  # some are cut off
    assert np.abs(found - wanted).max() < np.abs(wanted).max() * (2**-10 if dtype == "float16" else 2**-8)
    call = npu.log.last("aclnnQuantMatmul")
    assert call.bias.dtype == torch.int32 and call.scale.dtype == (torch.int64 if dtype == "float16" else torch.float32)


def test_scales_are_rounded_to_the_nearest_that_products_keep():
    from trivium_ascend.static import nearest19

    x = torch.from_numpy(np.random.default_rng(3).uniform(1e-6, 3, 500).astype(np.float32))
    near, numbers = nearest19(x), x.double()
    assert not (near.view(torch.int32) & 0x1FFF).any()
    assert ((near.double() - numbers).abs() / numbers).max() <= 2**-11


def test_a_matrix_without_a_rule_is_not_joined_to_one_that_has_one(npu):
    from trivium_ascend.chips import CHIPS
    from trivium_ascend.weights import joined, make_quantised

    numbers = np.random.default_rng(5).standard_normal((16, 64), np.float32)

    def made(inputs):
        weight = Weight("w", numbers.shape, "float32", numbers, lambda data: data, inputs=inputs)
        return make_quantised(weight, "w8a8", torch.device("npu:0"), torch.float16, CHIPS["910B"])

    one, two, none = made(InputScale(0.02, 1)), made(InputScale(0.03, 1)), made(None)
    assert joined(one, two) is joined(one, none) is None
    both = joined(one, made(InputScale(0.02, 1)))
    x = torch.ones(3, 64, dtype=torch.float16, device="npu:0")
    assert torch.equal(both.product(x)[:, 16:].cpu(), one.product(x).cpu())
    assert both.nbytes == 2 * one.nbytes > 2 * none.nbytes
