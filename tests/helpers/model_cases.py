"""The tiny models that are judged against transformers, and how transformers is asked. torch is imported where it is used only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import make_checkpoint

DECODE = 5
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
_PART = {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-heads": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 2, "head_dim": 12}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 10, "hidden_size": 20}),
    "llama3-scaling": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied-yarn": ("qwen2", {"rope_scaling": YARN, "tie_word_embeddings": False, "num_attention_heads": 2}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 3}),
    "gemma3": ("gemma3", {}),
    "gemma3-one-kv-head": ("gemma3", {"num_key_value_heads": 1, "sliding_window": 4, "final_logit_softcapping": 9.0}),
    "gemma3-scaled": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": None, "tie_word_embeddings": True}),
    "phi3-longrope-long": ("phi3", {**_PART, "original_max_position_embeddings": 3, "sliding_window": None}),
    "phi3-longrope-short": ("phi3", {**_PART, "original_max_position_embeddings": 128, "sliding_window": 200}),
}
MAX_MODEL_LEN = {"phi3-longrope-short": 128}
"""The context that a case is built for, where it is not the model's: LongRoPE takes its short table up to the original length."""


def make_prompts(lengths: tuple[int, ...], vocab: int = 320) -> list[list[int]]:
    """Token ids, from a formula of their own so that every model and file has the same."""
    return [[(i * i * 7 + i * 31 + n) % vocab for i in range(n)] for n in lengths]


def random_case(family: str, seed: int) -> dict[str, Any]:
    """Sizes drawn at random within what transformers accepts."""
    rng = np.random.default_rng([seed, *family.encode()])
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    heads, head_dim = kv_heads * group, 2 * int(rng.integers(2, 17))
    sizes: dict[str, Any] = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": int(rng.integers(70, 200)),
        "num_hidden_layers": int(rng.integers(1, 6)), "intermediate_size": int(rng.integers(5, 80)),
        "tie_word_embeddings": bool(rng.integers(2)), "rms_norm_eps": float(10.0 ** -rng.integers(4, 8)),
        "rope_theta": float(rng.integers(100, 100000)), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    if family == "phi3":
        return {**sizes, "hidden_size": heads * head_dim, "sliding_window": int(rng.integers(2, 50))}
    sizes |= {"head_dim": head_dim, "hidden_size": heads * int(rng.integers(3, 17))}
    if family in ("mistral", "gemma2", "gemma3"):
        sizes["sliding_window"] = int(rng.integers(2, 50))
    if family in ("llama", "qwen3", "gemma2", "gemma3"):
        sizes["attention_bias"] = bool(rng.integers(2))
    return sizes


def oracle_model(name: str, folder: Path) -> Any:
    """transformers' model of the case, whose seeded checkpoint is written to `folder`."""
    family, overrides = CASES[name]
    return load_oracle(make_checkpoint(folder, family, seed=len(name), tokenizer=False, **overrides))


def load_oracle(folder: Path) -> Any:
    """transformers' model of a checkpoint, which must hold exactly the tensors that it expects."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


def oracle_logits(model: Any, prompt: list[int], *, decode: int = DECODE) -> np.ndarray:
    """Logits of every position: a prefill, then `decode` steps of one token over transformers' own cache."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model(ids[:, : len(prompt) - decode], use_cache=True)
        parts, cache = [out.logits[0]], out.past_key_values
        for at in range(len(prompt) - decode, len(prompt)):
            out = model(ids[:, at : at + 1], cache=cache, use_cache=True)
            parts.append(out.logits[0])
    return torch.cat(parts).numpy()
