"""Tiny models of every family with seeded weights, as arrays or as a Hugging Face style folder; needs numpy only.

The weights are a formula of (config, seed): raw words of PCG64, whose stream numpy guarantees, in the sorted order of the
tensors' names. So files of expected numbers need not hold them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from trivium.models import build

_COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
    "torch_dtype": "float32",
}  # fmt: skip
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 24, "query_pre_attn_scalar": 20}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_GEMMA, "sliding_window": 6,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_GEMMA, "sliding_window": 6, "num_hidden_layers": 4,
        "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 9},
}  # fmt: skip


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of the family's tiny model."""
    return {**_COMMON, **FAMILIES[family], **overrides}


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the model reads from its checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for constant in build(config).constants:
        if constant.array is None:
            first, *rest = constant.value.shape
            rows = max(constant.rows[1] if constant.rows else first, shapes.get(constant.source, (0,))[0])
            shapes[constant.source] = (rows, *rest)
    return shapes


def _uniform(bits: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Zero mean, unit variance."""
    words = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
    return ((words.astype(np.float64) * 2.0**-24 - 0.5) * 12**0.5).astype(np.float32).reshape(shape)


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by checkpoint name: norms near 1, biases near 0, matrices that keep the scale of activations."""
    bits = np.random.PCG64(seed)
    stored = config.get("norm_offset", 1.0 if config["architectures"][0].startswith("Gemma") else 0.0)
    weights = {}
    for name, shape in sorted(weight_shapes(config).items()):
        x = _uniform(bits, shape)
        if len(shape) == 1:
            weights[name] = x * np.float32(0.2) + np.float32(0.0 if name.endswith("bias") else 1.0 - stored)
        else:
            weights[name] = x * np.float32(1.0 if "embed_tokens" in name else 1.5 * shape[-1] ** -0.5)
    return weights


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """float32 tensors in the safetensors layout: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(np.ascontiguousarray(t, "<f4").tobytes() for t in tensors.values())


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """What write_safetensors() wrote."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: np.frombuffer(body[slice(*e["data_offsets"])], "<f4").reshape(e["shape"]) for name, e in entries.items()}


def byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: ids 0..255 are the bytes in the order of their code points' stand-ins,
    256 <s>, 257 </s>, 258 <pad>."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    letters = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 256 + i, "content": t, **flags} for i, t in enumerate(["<s>", "</s>", "<pad>"])],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letters[b]: b for b in range(256)}, "merges": []},
    }  # fmt: skip


def make_checkpoint(folder: Path, family: str, seed: int = 0, *, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes config.json, model.safetensors and a byte-level tokenizer (unless refused) into `folder` and returns it."""
    config = tiny_config(family, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", make_weights(config, seed), {"format": "pt"})
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
