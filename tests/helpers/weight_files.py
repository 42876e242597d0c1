"""Small GGUF and safetensors files, right ones and lying ones. GGUF through the format's own package."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGUFEndian, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

Tensor = tuple[np.ndarray, gguf.GGMLQuantizationType]


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes as a tensor of a block type. Scales may be anything, also not finite."""
    return np.random.default_rng(seed).integers(0, 256, quant_shape_to_byte_shape(shape, kind), np.uint8)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Tensor],
    *,
    endianess: GGUFEndian = GGUFEndian.LITTLE,
    alignment: int | None = None,
) -> Path:
    """float32 arrays as they are; (bytes, type) as raw blocks. Whole numbers become uint32."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """The keys that every architecture needs, for a model of two layers, hidden size 16, 2 heads; `more` without the prefix."""
    keys = {
        "context_length": 64, "embedding_length": 16, "block_count": 2, "feed_forward_length": 32, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5, **more,
    }  # fmt: skip
    return {f"{architecture}.{key}": value for key, value in keys.items()}


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ü", "<s>"], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True,
}  # fmt: skip


def llama_tensors(*, layers: int = 2, hidden: int = 16, inter: int = 32, kv: int = 8, vocab: int = 40) -> dict[str, np.ndarray]:
    """float32 tensors of a Llama model under GGUF names, without output.weight."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for i in range(layers):
        layer = {
            "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (kv, hidden),
            "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
            "ffn_gate": (inter, hidden), "ffn_up": (inter, hidden), "ffn_down": (hidden, inter),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def tiny_gguf(path: Path, **more: Any) -> Path:
    """A whole tiny Llama with a tokenizer; `more` are further keys under "llama."."""
    return write_gguf(path, "llama", llama_metadata(**more) | TOKENIZER, llama_tensors())


def whole_blocks_gguf(path: Path, positions: int = 64) -> Path:
    """A Llama of two layers with a tokenizer and a template, whose rows are whole blocks: of 64 numbers, and of 256 (ffn_down)."""
    sizes = {
        "context_length": positions,
        "embedding_length": 64,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    vocabulary = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [chr(33 + i) for i in range(94)] + ["Ġ", "<s>"],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 95, "tokenizer.ggml.eos_token_id": 95,
        "tokenizer.chat_template": "{{ messages }}", "general.name": "tiny", "general.tags": ["a", "b"],
    }  # fmt: skip
    vocabulary["tokenizer.ggml.tokens"][-3] = "ab"
    tensors = llama_tensors(hidden=64, inter=256, kv=32, vocab=96)
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    return write_gguf(path, "llama", llama_metadata(**sizes) | TOKENIZER | vocabulary, tensors)


_DTYPES = {
    "float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip


def safetensors_bytes(
    tensors: Mapping[str, np.ndarray], *, header: Any = None, metadata: dict[str, str] | None = None, dtypes: Mapping[str, str] = {}
) -> bytes:
    """The file with these arrays; `header` replaces the true header (an object, or its text as bytes); `dtypes`: of tensors whose
    arrays are bit patterns."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, array in tensors.items():
        dtype = dtypes.get(name) or _DTYPES[str(array.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = entries if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b"" if isinstance(header, bytes) else b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values())


HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 6,
}  # fmt: skip


def hf_tensors() -> dict[str, np.ndarray]:
    """A few float32 tensors under Hugging Face names."""
    rng = np.random.default_rng(2)
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"]
    return {name: rng.standard_normal((4,) if "norm" in name else (6, 4), np.float32) for name in names}


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """Files by name: bytes as they are, text as UTF-8, anything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def hf_folder(folder: Path, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A folder with config.json and model.safetensors."""
    data = safetensors_bytes(hf_tensors() if tensors is None else tensors)
    return write_folder(folder, {"config.json": HF_CONFIG | config, "model.safetensors": data})


def sharded_folder(folder: Path) -> Path:
    """The same in two shards with an index."""
    tensors = hf_tensors()
    names = list(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    files: dict[str, Any] = {file: safetensors_bytes({n: tensors[n] for n in held}) for file, held in shards.items()}
    files["model.safetensors.index.json"] = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    return write_folder(folder, files | {"config.json": HF_CONFIG})
