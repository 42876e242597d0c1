"""Checkpoints that bring scales for FP8 keys and values: they load, and what they say is not needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_checkpoint
from trivium_torch.pages import Eights
from weight_files import safetensors_bytes

from trivium import LLM, SamplingParams

LOAD = {
    "kv_dtype": "fp8", "block_size": 16, "progress": False, "max_model_len": 40, "num_kv_blocks": 8, "max_num_seqs": 1,
    "max_num_batched_tokens": 8, "backend_options": {"dtype": "float32", "graph_sizes": ()},
}  # fmt: skip
ASKED = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)


def answered(folder):
    with LLM(folder, "cuda_emulated", **LOAD) as llm:
        [output] = llm.generate([[5, 6, 7]], ASKED)
        logprobs = [{i: p.logprob for i, p in at.items()} for at in output.prompt_logprobs if at]
        return output.outputs[0].token_ids, logprobs


NAMES = "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale"
"""Of LLM Compressor, of AutoFP8, and of older files: one number for all tokens and heads of a layer."""


def test_scales_that_come_with_a_checkpoint_change_nothing(tmp_path, emulated):
    folder = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    before = answered(folder)
    given = {f"model.layers.0.self_attn.{name}": np.array([0.011], np.float32) for name in NAMES}
    (folder / "kv_scales.safetensors").write_bytes(safetensors_bytes(given))
    assert answered(folder) == before


def kept(rows, scale):
    """float32 rows[..., n] as e4m3 numbers times a scale, as a cache with given scales keeps them."""
    return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale


def rms(x):
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("calibrated", [0.5, 1.0, 20.0])
def test_a_scale_for_each_token_and_head_is_nearer_than_any_for_a_layer(spread, calibrated):
    """Against the best case of a scale for a layer (its largest number is 448 exactly), one that clips half of the range, and one
    with room for larger numbers; heads and tokens are of like sizes or of very different ones."""
    rng = np.random.default_rng(3)
    sizes = np.exp(rng.normal(0, spread, (64, 4, 1)))
    rows = torch.from_numpy((rng.standard_normal((64, 4, 128)) * sizes).astype(np.float32))
    numbers, scales = (torch.zeros(4, 64, n, dtype=dtype) for n, dtype in Eights.dtypes(128, "fp8"))
    pages = Eights((numbers, scales))
    pages.write(torch.arange(64), rows)
    ours = pages.read(torch.arange(64)[None])[:, 0].transpose(0, 1) - rows
    theirs = kept(rows, rows.abs().max() / 448 * calibrated) - rows
    assert rms(ours) <= 1.1 * rms(theirs), "beyond where between two powers of two the largest rows happen to lie"
    largest = rows.abs().amax(dim=-1, keepdim=True)
    assert float((ours.abs() / torch.maximum(rows.abs(), largest * 2**-14)).max()) < 2**-4 + 2**-8
    relative = [float((error.square().sum(-1) / rows.square().sum(-1)).max().sqrt()) for error in (ours, theirs)]
    assert relative[0] <= 1.1 * relative[1], "nor is any one row further off"
