"""Quantised checkpoints on trivium_cuda over an emulated device: held as they are stored, and the tokens are the reference's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import emulated_cuda
import numpy as np
import pytest
import torch
from quantised_files import is_projection, quantised_pair
from trivium_cuda import weights
from trivium_cuda.plugin import CudaBackend

from trivium import LLM, SamplingParams
from trivium.errors import UnsupportedError
from trivium.ops import Weight
from trivium.weights.formats import make_weight, stored_bytes

NARROW = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
LOAD = {
    "kv_dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 40, "num_kv_blocks": 12,
    "max_num_seqs": 2, "max_num_batched_tokens": 8,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9, 10]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def storing_of(name):
    """The packing of a format's own tests, which goes number by number."""
    path = Path(__file__).parents[2] / "formats" / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"layout_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(folder, backend, **options):
    if backend != "reference":  # activations alone: the option dtype would put the weights into floats, too
        options["backend_options"] = {"dtype": "float32"}
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        routes = {(r.resident, r.lossless) for r in llm.loaded.routes if is_projection(r.name)}
        return [c.token_ids for o in llm.generate(PROMPTS, GREEDY) for c in o.outputs], routes


@pytest.mark.parametrize("name", ["awq", "gptq in order of activations", "fp8"])
def test_a_checkpoint_is_held_as_it_is_stored_and_answers_as_its_numbers_do(tmp_path, emulated, name):
    if name == "awq":
        module = storing_of("awq")
        config, store, resident = module.CONFIG, module.storing(32), "int4_asym_g128"
    elif name == "fp8":
        config, store, resident = *fp8_of_one_scale(), "fp8"
    else:
        config, store = storing_of("gptq").CASES["act order"]
        config, resident = {"quant_method": "gptq", **config}, "int4_asym_g128"
    folder, plain, _ = quantised_pair(tmp_path, config, store, **NARROW)
    found, routes = generated(folder, "cuda_emulated", strict=True)
    assert routes == {(resident, True)}
    assert found == generated(plain, "reference")[0]


def fp8_of_one_scale():
    """Numbers of e4m3 by torch's own rounding, with one scale for a tensor."""

    def store(stem, array, rng):
        codes = torch.from_numpy(array).to(torch.float8_e4m3fn)
        scale = np.float32(rng.random() * 0.5 + 0.5)
        return {
            "weight": (codes.view(torch.uint8).numpy(), "F8_E4M3"),
            "weight_scale": np.array(scale),
        }, codes.float().numpy() * scale

    return {"quant_method": "fp8"}, store


def weight_of(array):
    return Weight("w", array.shape, "float32", array, lambda data: data)


@pytest.mark.parametrize("format", ["int4", "int4_g128", "int4_asym_g128", "mxfp4", "fp8", "int8", "w8a8", "w8a8_fp8"])
def test_experts_and_rows_are_cut_out_of_a_resident_weight(format):
    x = np.random.default_rng(3).standard_normal((3, 48, 256)).astype(np.float32)
    held = weights.make(weight_of(x), format, torch.device("cpu"))
    whole = held.to(torch.float32)
    assert whole.shape == held.shape == x.shape
    for expert in range(3):
        alone = weights.make(weight_of(x[expert]), format, torch.device("cpu"))
        torch.testing.assert_close(held[expert].to(torch.float32), whole[expert], rtol=0, atol=0)
        torch.testing.assert_close(alone.to(torch.float32), whole[expert], rtol=0, atol=0)
        rows = torch.tensor([5, 0, 47])
        torch.testing.assert_close(alone[rows].to(torch.float32), whole[expert][rows], rtol=0, atol=0)
        torch.testing.assert_close(alone[7:20].to(torch.float32), whole[expert][7:20], rtol=0, atol=0)


def test_blocks_of_scales_are_cut_by_rows():
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    held = weights.Float8(codes, scales)
    meant = codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    torch.testing.assert_close(held.to(torch.float32), meant, rtol=0, atol=0)
    rows = torch.tensor([0, 127, 128, 199])
    torch.testing.assert_close(held[rows].to(torch.float32), meant[rows], rtol=0, atol=0)


def test_mxfp4_is_rounded_to_the_nearest_number_of_the_format():
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    x[0, :4] = (0.25, 0.75, -2.5, 5.0)  # ties go to the even code: 0, 1, -2, 4
    x[0, 4] = 6.0
    x[0, 5:32] = 0
    got = weights.make(weight_of(x), "mxfp4", torch.device("cpu")).to(torch.float32).numpy()
    assert got[0, :5].tolist() == [0, 1, -2, 4, 6]
    for row in range(4):
        for block in range(2):
            part = x[row, 32 * block : 32 * block + 32].astype(np.float64)
            scale = 2.0 ** (np.floor(np.log2(np.abs(part).max())) - 2)
            best = np.array([np.abs(values - abs(v) / scale).min() for v in part]) * scale
            np.testing.assert_allclose(np.abs(part - got[row, 32 * block : 32 * block + 32]), best, rtol=0, atol=1e-6)


def test_stored_blocks_are_only_rearranged():
    raw = np.random.default_rng(1).integers(0, 256, stored_bytes((5, 64), "q4_0"), np.uint8)
    raw.reshape(-1, 18)[:, 1] = 0x2C  # scales of a sensible size
    stored = make_weight("w", (5, 64), "q4_0", raw)
    held = weights.make(stored, "int4", torch.device("cpu"))
    np.testing.assert_array_equal(held.to(torch.float32).numpy(), stored.decode())


class Groups(Weight):
    """4 bits in groups of 32, as trivium_formats hands them on."""

    def parts(self):
        rng = np.random.default_rng(8)
        scales = rng.standard_normal((16, 2), np.float32)
        kept = {"float16": scales.astype(np.float16).astype(np.float32), "float32": scales}
        kept["bfloat16"] = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(2**40)
        codes, zeros = rng.integers(0, 16, (16, 64), np.uint8), rng.integers(0, 17, (16, 2), np.uint8)
        return {"codes": codes, "scales": kept[self.name], "zeros": zeros, "order": None}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scales_of_groups_take_the_bits_that_they_were_stored_in(dtype):
    stored = Groups(dtype, (16, 64), "awq", np.zeros((16, 64), np.float32), lambda data: data)
    held, parts = weights.make(stored, "int4_asym_g128", torch.device("cpu")), stored.parts()
    assert held.packed.scales.dtype == held.packed.zeros.dtype == getattr(torch, dtype)
    scales, zeros = (parts[name].astype(np.float32).repeat(32, axis=1) for name in ("scales", "zeros"))
    np.testing.assert_array_equal(held.to(torch.float32).numpy(), scales * (parts["codes"].astype(np.float32) - zeros))


def test_what_has_no_whole_groups_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"w \[4, 96\].*int4_g128: 96 inputs are not whole groups of 128"):
        weights.make(weight_of(np.ones((4, 96), np.float32)), "int4_g128", torch.device("cpu"))


@pytest.mark.parametrize("format", ["int4", "int4_g128", "int4_asym_g128", "mxfp4", "fp8", "int8", "float32"])
def test_products_and_look_ups_are_of_the_numbers_that_are_held(format):
    backend = emulated_cuda.EmulatedBackend((emulated_cuda.EmulatedDevice(),))
    [device] = backend.probe().devices
    kernels = {name: next(k.run for k in backend.kernels(device) if k.op == name) for name in ("linear", "embedding")}
    rng = np.random.default_rng(4)
    x, bias, ids = rng.standard_normal((5, 256)).astype(np.float32), rng.standard_normal(48).astype(np.float32), [47, 0, 5]
    array = rng.standard_normal((48, 256)).astype(np.float32)
    [declared] = [f for f in backend.capabilities(device).weight_formats if f.name == format]
    with torch.inference_mode():
        session = backend.open(device, {"dtype": "float32"})
        held = session.load(weight_of(array), format)
        numbers = session.read_weight(held)
        y = session.get(kernels["linear"](session, (session.put(x), held, session.put(bias)), {}))
        rows = session.get(kernels["embedding"](session, (session.put(np.array(ids, np.int32)), held), {"scale": 2.0}))
    assert np.sqrt(np.square(numbers - array).mean()) <= declared.error_budget
    assert 8 * session.memory().weights / array.size <= 1.5 * declared.bits
    np.testing.assert_allclose(y, x @ numbers.T + bias, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(rows, 2 * numbers[ids])


def test_without_a_device_the_reason_is_one_line():
    probe = CudaBackend().probe()
    assert probe.devices == () and "CUDA" in probe.reason and "\n" not in probe.reason
