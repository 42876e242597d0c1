"""A GGUF file gives the logits of the Hugging Face folder that it was converted from, in every architecture.

The conversion here is the format's: names from the gguf package's map, query and key rows of llama in adjacent pairs, Gemma's
norms with their +1 included.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_cases import LLAMA3, make_prompts
from paged_runner import PagedRunner
from tiny_checkpoints import make_checkpoint
from trivium.models import build
from trivium.ops import Batch
from trivium.ops.rope import rope_from_config
from trivium.weights import Checkpoint, open_checkpoint
from weight_files import write_gguf

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3,
}  # fmt: skip


class ShiftedRunner(PagedRunner):
    """Runs with every position `shift` further on than it is; attention sees the same tokens, only angles grow."""

    shift = 0

    def forward(self, batch: Batch) -> np.ndarray:
        return super().forward(replace(batch, positions=batch.positions + np.int32(self.shift)))


def logits(checkpoint: Checkpoint, *, tokens: int = 24, shift: int = 0) -> np.ndarray:
    program = build(checkpoint.config)
    weights = {c.source: checkpoint.tensor(c.source).decode() for c in program.constants if c.array is None}
    runner = ShiftedRunner(program, weights, page_size=8, pages=200)
    runner.shift = shift
    return runner.step([(0, make_prompts((tokens,))[0])])


def adjacent_pairs(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves (0 .. d/2-1, d/2 .. d-1) in the order 0, d/2, 1, d/2+1, ... of each head."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def converted_tensor(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if config["model_type"] == "llama" and part in name:
            return adjacent_pairs(tensor, config[heads])
    return tensor


def converted_keys(config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.key_length": "head_dim", "rope.freq_base": "rope_theta", "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }  # fmt: skip
    found = {key: config[name] for key, name in keys.items() if name in config}
    if "query_pre_attn_scalar" in config:
        found["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    return found


def convert(folder: Path, architecture: str, more: dict[str, np.ndarray] | None = None) -> Checkpoint:
    """The GGUF checkpoint of a Hugging Face folder, with further tensors."""
    source = open_checkpoint(folder)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], source.config["num_hidden_layers"])
    tensors = {}
    for name in source.tensors:
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None
        tensors[new] = converted_tensor(name, source.tensor(name).decode(), source.config)
    metadata = {f"{architecture}.{key}": value for key, value in converted_keys(source.config).items()}
    return open_checkpoint(write_gguf(folder / "m.gguf", architecture, metadata, tensors | (more or {})))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_converted_model_gives_the_same_logits(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path / "hf", architecture, tokenizer=False)
    want, got = logits(open_checkpoint(folder)), logits(convert(folder, architecture))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def llama3_divisors(head_dim: int) -> np.ndarray:
    plain, scaled = (rope_from_config(config, head_dim).inv_freq for config in ({}, {"rope_scaling": LLAMA3}))
    return (plain / scaled).astype(np.float32)


@pytest.mark.faults
@pytest.mark.parametrize("position", [100, 9000])
def test_o44_llama3_factors_in_the_file_give_the_logits_of_the_scaled_folder(tmp_path: Path, position: int) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama", tokenizer=False, rope_scaling=LLAMA3, max_position_embeddings=10_000)
    want = logits(open_checkpoint(folder), shift=position - 23)
    got = logits(convert(folder, "llama", {"rope_freqs.weight": llama3_divisors(16)}), shift=position - 23)
    plain = logits(convert(folder, "llama"), shift=position - 23)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3)
    assert np.abs(plain - want).max() > 0.05


@pytest.mark.faults
def test_o44_factors_of_ones_give_the_same_logits_as_none(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama", tokenizer=False)
    ones = logits(convert(folder, "llama", {"rope_freqs.weight": np.ones(8, np.float32)}))
    np.testing.assert_array_equal(ones, logits(convert(folder, "llama")))
