"""Activations in 8 bits on trivium_cuda over an emulated device: W8A8 weights, who rounds, and checkpoints that say so."""

from __future__ import annotations

import emulated_cuda
import numpy as np
import pytest
import torch
from eight_bits import held, opened
from quantised_files import is_projection, quantised_pair
from trivium_cuda import eights, rounding
from trivium_cuda.kernels.quantise import Given
from trivium_cuda.weights import W8A8, Float8

from trivium import LLM, SamplingParams
from trivium.conformance import formats as kit
from trivium.conformance.lab import Lab
from trivium.conformance.report import Mismatch
from trivium.ops import InputScale, Weight

NARROW = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
LOAD = {
    "kv_dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 40, "num_kv_blocks": 12,
    "max_num_seqs": 2, "max_num_batched_tokens": 8,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9, 10]]
ASKED = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=3)


def nearest(x, kind):
    """What rows x are rounded to, as float32, by torch's own conversions; in blocks of 128 where kind says so."""
    if kind == "fp8 blocks":
        return torch.cat([nearest(part, "fp8") for part in x.split(128, dim=-1)], dim=-1)
    scale = x.abs().amax(dim=-1, keepdim=True) / (127 if kind == "int8" else 448)
    return (x / scale).round() * scale if kind == "int8" else (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 blocks"])
def test_a_product_is_of_the_rounded_activations(kind):
    session, weight = opened(), held(kind, 48, 320)
    assert weight.kind == kind
    rng = np.random.default_rng(4)
    x, bias = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in ((2, 3, 320), (48,)))
    got = eights.linear(session, x, weight, bias)
    torch.testing.assert_close(got, nearest(x, kind) @ weight.to(torch.float32).T + bias, rtol=1e-4, atol=1e-3)
    again = eights.linear(session, eights.rounded(x, kind), weight, bias)
    assert torch.equal(again, got)


class Stored(Weight):
    """A matrix of 8 bits as trivium_formats hands it on."""

    def parts(self):
        return {"codes": self.data, "scales": np.array([[0.003]], np.float32), "block": self.shape}


@pytest.mark.parametrize("offset", [0, 11])
@pytest.mark.parametrize("biased", [False, True])
def test_inputs_are_rounded_as_the_checkpoint_says(offset, biased):
    rng = np.random.default_rng(6)
    codes = rng.integers(-127, 128, (48, 64)).astype(np.int8)
    stored = Stored("w", (48, 64), "w8a8", codes, lambda data: data * np.float32(0.003), inputs=InputScale(0.02, offset))
    session = opened()
    held = session.load(stored, "w8a8")
    x, bias = 1.5 * rng.standard_normal((3, 64), np.float32), rng.standard_normal(48, np.float32) if biased else None
    whole = np.clip(np.rint(x / np.float32(0.02)) + offset, -128, 127)
    want = (whole - offset).astype(np.float64) * 0.02 @ (codes * 0.003).T + (0 if bias is None else bias)
    got = eights.linear(session, torch.from_numpy(x), held, None if bias is None else torch.from_numpy(bias))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)
    assert whole.max() == 127 and np.abs(x / 0.02).max() > 139, "something is out of reach"
    np.testing.assert_array_equal(session.read_weight(held), stored.decode())
    assert (held.shift is None) == (offset == 0) and held[3:7].shape == (4, 64)


def test_many_rows_of_fp8_are_multiplied_by_the_library_where_it_can(monkeypatch):
    monkeypatch.setattr(eights, "LIBRARY_FROM", 2)
    rng = np.random.default_rng(4)
    x, bias = (torch.from_numpy(rng.standard_normal(shape, np.float32)).to(torch.bfloat16) for shape in ((3, 64), (48,)))
    for weight in (held("fp8", 48, 64), W8A8(Float8(held("fp8", 48, 64).weight.numbers, torch.tensor([[0.75]])))):
        rows = eights.rounded(x, "fp8").rows
        exact = (rows.numbers.double() * rows.scales) @ weight.to(torch.float64).T + bias.double()
        got = eights.linear(opened(dtype="bfloat16"), x, weight, bias)
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=2e-2)
        assert torch.equal(got, eights.by_library(rows, weight.weight, bias, torch.bfloat16))


@pytest.mark.parametrize(
    ("kind", "size", "settings", "reason"),
    [
        ("fp8", (48, 64), {"capability": (8, 9)}, "on this chip"),
        ("fp8", (48, 64), {"batch_invariant": True}, "number of rows"),
        ("fp8", (48, 40), {}, r"\[48, 40\] is not a multiple of 16"),
        ("fp8 blocks", (48, 256), {}, "128 by 128"),
    ],
)
def test_what_the_library_can_not_do_has_a_reason(kind, size, settings, reason):
    refused = eights.library_refuses(opened(**settings), held(kind, *size).weight, torch.bfloat16)
    assert refused is not None and __import__("re").search(reason, refused)
    assert (
        eights.library_refuses(opened(), held("fp8", 48, 64).weight, torch.float16) == "its result is bfloat16, not torch.float16"
    )


@pytest.mark.parametrize("name", ["w8a8", "w8a8_fp8"])
def test_the_kit_finds_both_budgets_kept(name, monkeypatch):
    """The kit's own judgement of a matrix from float32, for few rows; with a quarter of the budget it fails."""
    monkeypatch.setattr(kit, "SHAPES", ((48, 512),))
    monkeypatch.setattr(kit, "ROWS", (1, 5))
    backend = emulated_cuda.EmulatedBackend((emulated_cuda.EmulatedDevice(),))
    [device] = backend.probe().devices
    lab = Lab(backend, device, backend.capabilities(device), backend.kernels(device))
    [resident] = [f for f in lab.capabilities.weight_formats if f.name == name]
    assert "projections within" in kit.judge_format(lab, resident, "float32").detail
    with pytest.raises(Mismatch, match="linear"):
        kit.judge_format(lab, resident._replace(activation_budget=resident.activation_budget / 4), "float32")


def w8a8_checkpoint(tmp_path, kind):
    """One layer as LLM Compressor would write it, numbers and scales by torch's own rounding."""
    weights = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True, "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors", "format": "int-quantized" if kind == "int8" else "float-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights,
            "input_activations": {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True},
        }},
    }  # fmt: skip

    def store(stem, array, rng):
        x = torch.from_numpy(array)
        scale = x.abs().amax(dim=-1, keepdim=True) / (127 if kind == "int8" else 448)
        codes = (x / scale).round().to(torch.int8) if kind == "int8" else (x / scale).to(torch.float8_e4m3fn)
        bits = (codes.numpy(), "I8") if kind == "int8" else (codes.view(torch.uint8).numpy(), "F8_E4M3")
        return {"weight": bits, "weight_scale": scale.numpy()}, (codes.float() * scale).numpy()

    return quantised_pair(tmp_path, config, store, **NARROW)


def answered(folder, backend, **options):
    if backend != "reference":
        options["backend_options"] = {"dtype": "float32"}
    with LLM(folder, backend, **{**LOAD, **options}) as llm:
        routes = {(r.resident, r.lossless) for r in llm.loaded.routes if is_projection(r.name)}
        found = [
            (o.outputs[0].token_ids, [{i: p.logprob for i, p in at.items()} for at in o.prompt_logprobs if at])
            for o in llm.generate(PROMPTS, ASKED)
        ]
        tape = getattr(getattr(llm.loaded.executable, "_eager", llm.loaded.executable), "tape", None)
        return found, routes, [] if tape is None else [line.name for line in tape._lines]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_checkpoint_that_rounds_activations_is_held_so_and_they_are_rounded_once(tmp_path, emulated, kind, monkeypatch):
    folder, plain, _ = w8a8_checkpoint(tmp_path, kind)
    found, routes, names = answered(folder, "cuda_emulated", strict=True)
    assert routes == {("w8a8" if kind == "int8" else "w8a8_fp8", True)}
    ahead = [name for name in names if name.endswith(f" to {kind}")]
    assert sorted(ahead) == sorted(
        f"{name} to {kind}" for name in ("triton rms_norm", "triton add_rms_norm", "linear, linear, triton gated")
    )
    monkeypatch.setattr("trivium_cuda.tape.round_ahead", lambda lines, constants: list(lines))
    apart, _, _ = answered(folder, "cuda_emulated", strict=True)
    assert apart == found, "rounding ahead changed the numbers"
    wanted, _, _ = answered(plain, "reference")
    for (_, at), (_, right) in zip(found, wanted, strict=True):
        for mine, other in zip(at, right, strict=True):
            shared = mine.keys() & other.keys()
            assert shared and max(abs(mine[i] - other[i]) for i in shared) < (0.05 if kind == "int8" else 0.2)
            assert max(abs(mine[i] - other[i]) for i in shared) > 0, "nothing was rounded"


def lines_of(*made):
    """Lines (kernel, arguments, results, done) of a tape."""
    from trivium_cuda.tape import Line

    return [Line(run, "it", None, args, results, done, -1) for run, args, results, done in made]


def test_who_else_reads_a_norm_keeps_it_as_it_is():
    """Registers: 1 x, 2 norm's weight, 3 int8 matrix, 4 fp8 matrix, 5 a float matrix; 6 the norm; 7, 8 products."""
    from trivium_cuda import table

    constants = [None, None, None, held("int8", 8, 32), held("fp8", 8, 32), torch.zeros(8, 32), None, None, None]
    norm = (table.rms_norm, (1, 2), (6,), ())

    def ran(*readers):
        return rounding.round_ahead(lines_of(norm, *readers), constants)[0].run

    apart = W8A8(constants[3].weight, Given(0.1, 0))
    int8, other = (table.linear, (6, 3, 0), (7,), ()), (table.linear, (6, 3, 0), (8,), (6,))
    assert ran(int8, other).args == ("int8",) and ran(int8, other).func is rounding.rms_norm
    assert ran(int8, (table.linear, (6, 4, 0), (8,), (6,))) is table.rms_norm, "two kinds"
    assert ran(int8, (table.linear, (6, 5, 0), (8,), (6,))) is table.rms_norm, "floats"
    assert ran(int8, (table.gated, (6, 7), (8,), (6,))) is table.rms_norm, "no product"
    assert ran(int8, (None, (6,), (8,), (6,))) is table.rms_norm, "the host"
    assert ran((table.linear, (6, 3, 6), (7,), (6,))) is table.rms_norm, "its own bias"
    assert ran(int8) is table.rms_norm, "an output of the Program"
    constants[5] = apart
    assert ran(int8, (table.linear, (6, 5, 0), (8,), (6,))) is table.rms_norm, "one by a scale that is given"
    constants[3] = W8A8(apart.weight, Given(0.1, 0))
    assert ran(int8, (table.linear, (6, 5, 0), (8,), (6,))).args == (Given(0.1, 0),)


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_fp8_activations_are_for_chips_that_multiply_them(capability):
    from trivium_cuda import formats

    first = {
        s: next(f.name for f in formats.weight_formats(capability) if s in f.lossless_from)
        for s in ("fp8", "w8a8_fp8", "w8a8", "w8a16")
    }
    assert first == {"fp8": "fp8", "w8a8_fp8": "fp8" if capability == (8, 6) else "w8a8_fp8", "w8a8": "w8a8", "w8a16": "int8"}
