"""Random models of transformers that folders and .gguf files are written of, and what they make of IDS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import byte_tokenizer

from trivium import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "llama"), "llama-tied": ("Llama", {"tie_word_embeddings": True}, "llama"),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}, "llama"), "mistral": ("Mistral", {"sliding_window": None}, "llama"),
    "qwen2": ("Qwen2", {}, "qwen2"), "qwen3": ("Qwen3", {}, "qwen3"),
    "gemma3": ("Gemma3", {"sliding_window": 8, "num_hidden_layers": 7, "tie_word_embeddings": True}, "gemma3"),
}  # fmt: skip
IDS = [(37 * i + 5) % 250 for i in range(40)]


def model_of(name: str, folder: Path, **more: Any) -> Any:
    """A random model of transformers, saved with a tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    stem, sizes, _ = CASES[name]
    config = getattr(transformers, f"{stem}{'Text' if stem == 'Gemma3' else ''}Config")(**{**SIZES, **sizes, **more})
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return model


def logprobs(path: Path, ids: list[int] = IDS) -> np.ndarray:
    with LLM(str(path), "reference", progress=False, num_kv_blocks=40) as llm:
        (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0))
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


def oracle(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([IDS])).logits[0].double(), -1).numpy()
    return np.array([found[i, token] for i, token in enumerate(IDS[1:])])
