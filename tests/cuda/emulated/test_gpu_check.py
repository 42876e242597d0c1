"""benchmarks/gpu_check.py from end to end, on shapes that the interpreter can do."""

from __future__ import annotations

import json

import emulated_cuda
import gpu_check
import numpy as np
import pytest

TINY = {
    **gpu_check.SHAPES["1b"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
SIZES = gpu_check.Sizes((1, 2), (12,), context=5, steps=2, chunk=8, probe=(1 << 16, 64))


def test_every_figure_has_its_floor_and_the_kit_its_rows(emulated, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "DEVICES", (emulated_cuda.EmulatedDevice((7, 5)),))
    found = gpu_check.check("cuda_emulated", {"tiny": TINY}, SIZES, 300, ["sampler"], "float32")
    json.dumps(found, default=float)
    assert found["kit"]["rows"]["passed"] > 5 and not found["kit"]["failed"] and found["left_out"] == []
    ours = {k: v for k, v in found["tiny"].items() if not k.endswith("transformers")}
    assert set(ours) == {"decode, 1 sequences", "decode, 2 sequences", "prefill, 12 tokens"}
    for figure in ours.values():
        assert figure["seconds"] > 0 and figure["share"] == pytest.approx(figure["floor_s"] / figure["seconds"])
    assert all(0 < ours[f"decode, {n} sequences"]["host_share"] < 1 for n in (1, 2))


def test_what_does_not_fit_the_time_is_listed(emulated, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "DEVICES", (emulated_cuda.EmulatedDevice((7, 5)),))
    found = gpu_check.check("cuda_emulated", {"tiny": TINY}, SIZES, 0, ["sampler"], "float32")
    assert found["kit"]["rows"] == {"left out": found["kit"]["rows"]["left out"]}
    assert "tiny: prefill, 12 tokens" in found["left_out"] and "tiny" not in found


def test_transformers_decodes_the_same_shape_with_a_static_cache(emulated):
    pytest.importorskip("transformers")
    import torch

    assert gpu_check.peer_seconds(TINY, torch.device("cpu"), torch.float32, lambda: None, SIZES, 2) > 0


def test_operations_and_bytes_are_those_of_the_tensors():
    config = gpu_check.SHAPES["8b"]
    constants = [c.value for c in gpu_check.build(config).constants]
    weights = sum(np.prod(v.shape) for v in constants if "layers" in v.name and "norm" not in v.name)
    linear = gpu_check.prefill_operations(config, 1) - 2 * 4096 * 128256 - 32 * 4 * 32 * 128
    assert linear == 2 * weights
    assert gpu_check.weight_bytes(config, 2) == 2 * (weights + 4096 * 128256) + 4 * (65 * 4096 + 64), (
        "two norms a layer, one at the end"
    )
    tied = gpu_check.SHAPES["1b"]
    assert gpu_check.weight_bytes(tied, 2) - gpu_check.weight_bytes({**tied, "vocab_size": 256}, 2) == 2 * 2048 * 128000
    assert gpu_check.kv_bytes(config, 2) == 131072, "128 KiB a token, as Llama 3's report has it"
