"""What a GGUF file's names and metadata mean, in the terms of Hugging Face checkpoints: tensor names and config.json keys.

Source of names and keys: the GGUF specification (ggml docs/gguf.md) and the `gguf` package's constants. A key that a converter
may leave out has the format's own default here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights.gguf_file import GGUFFile

Config = dict[str, Any]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Tensors that become part of the configuration, or repeat what it says.
_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class _Metadata:
    """The metadata of one architecture: `get("block_count", int)` reads "llama.block_count"."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."

    def has(self, key: str) -> bool:
        return self._prefix + key in self.file.metadata

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value as `kind`, or `default`. CheckpointError if neither is there or it is of another type."""
        value = self.file.metadata.get(self._prefix + key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedError(f"{self.file.path}: {self._prefix}{key} differs from layer to layer, which no model here does")
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.file.path}: the metadata key {self._prefix}{key} is {value!r}, not a {kind.__name__}")
        return kind(value)

    def size(self, key: str, largest: int = 1 << 30, default: int | None = None) -> int:
        """A whole number from 1 to `largest`."""
        value: int = self.get(key, int, default)
        if not 1 <= value <= largest:
            raise CheckpointError(f"{self.file.path}: the metadata key {self._prefix}{key} is {value}, not in 1..{largest}")
        return value

    def find(self, key: str, kind: type[Any]) -> Any:
        """The value, or None where the file has no such key."""
        return self.get(key, kind) if self.has(key) else None


class _Architecture(NamedTuple):
    """`names`: what differs from _LAYER. `extend` fills in what only this architecture has."""

    hf_class: str
    model_type: str
    names: Mapping[str, str]
    extend: Callable[[_Metadata, Config], None]


def read_config(file: GGUFFile) -> Config:
    """The model's configuration with the keys of config.json; UnsupportedError names an architecture that is not known."""
    architecture = _architecture(file)
    metadata = _Metadata(file, file.metadata["general.architecture"])
    config = _common(metadata)
    config |= {"architectures": [architecture.hf_class], "model_type": architecture.model_type}
    config |= _rope(metadata, config["head_dim"])
    architecture.extend(metadata, config)
    return config


def map_names(file: GGUFFile) -> dict[str, str]:
    """Canonical name -> name in the file. Tensors that no model of the architecture has give one warning and are left out."""
    layer_names = _LAYER | dict(_architecture(file).names)
    mapped: dict[str, str] = {}
    unknown = []
    for tensor in file.tensors:
        match = _NAME.fullmatch(tensor)
        layer, stem, suffix = match.groups() if match else ("", "", "")
        new = layer_names.get(stem) if layer else _OUTER.get(stem)
        name = f"model.layers.{int(layer)}.{new}.{suffix}" if layer else f"{new}.{suffix}"
        if name in mapped:
            raise CheckpointError(f"{file.path}: the tensors {mapped[name]!r} and {tensor!r} are the same one")
        if new:
            mapped[name] = tensor
        elif tensor not in _TABLES:
            unknown.append(tensor)
    if unknown:
        names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        warnings.warn(f"{file.path}: tensors that this architecture does not use are left out: {names}", stacklevel=2)
    return mapped


def _architecture(file: GGUFFile) -> _Architecture:
    name = str(file.metadata.get("general.architecture"))
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedError(f"{file.path} is one part of a split GGUF model; merge the parts into one file first")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(f"{file.path}: the GGUF architecture {name!r} can't be read; there are {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[name]


def _common(metadata: _Metadata) -> Config:
    file = metadata.file
    embedding = file.tensors.get("token_embd.weight")
    hidden = metadata.size("embedding_length")
    if embedding is None or embedding.shape[1:] != (hidden,):
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing or does not have rows of {hidden} numbers")
    if metadata.get("expert_count", int, 0):
        raise UnsupportedError(f"{file.path}: a mixture-of-experts model; GGUF files of those can't be read, use safetensors")
    heads = metadata.size("attention.head_count", hidden)
    config = {
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count", len(file.tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads, heads),
        "head_dim": metadata.size("attention.key_length", default=hidden // heads),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float, 1e-6),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return config | token_ids(file)


def token_ids(file: GGUFFile) -> Config:
    """bos_token_id and eos_token_id, as far as the file has them."""
    found = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _rope(metadata: _Metadata, head_dim: int) -> Config:
    config: Config = {"rope_theta": metadata.get("rope.freq_base", float, 10000.0)}
    rotated = metadata.size("rope.dimension_count", head_dim, head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(metadata)
    factors = _table(metadata.file, "rope_freqs.weight")
    if factors and len(factors) != rotated // 2:
        raise CheckpointError(f"{metadata.file.path}: rope_freqs.weight has {len(factors)} numbers, not {rotated // 2}")
    if factors and any(f != 1.0 for f in factors):
        config["rope_parameters"] = {"rope_type": "factors", "factors": factors, "rope_theta": config["rope_theta"]}
    elif scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(metadata: _Metadata) -> Config | None:
    """rope_scaling as in config.json, or None. The factor 0 means that there is none."""
    factor = metadata.get("rope.scaling.factor", float, metadata.get("rope.scale_linear", float, 0.0))
    kind = metadata.get("rope.scaling.type", str, "linear" if metadata.has("rope.scale_linear") else "none")
    if kind in ("none", "longrope") or factor == 0.0:
        return None  # LongRoPE's numbers are tensors: see _extend_phi3
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{metadata.file.path}: rope scaling of the type {kind!r}; there are none, linear, yarn, longrope")
    scaling = {"rope_type": kind, "factor": factor}
    original = metadata.find("rope.scaling.original_context_length", int)
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _table(file: GGUFFile, tensor: str) -> list[float] | None:
    if tensor not in file.tensors:
        return None
    numbers: list[float] = file.weight(tensor, tensor).decode().ravel().tolist()
    return numbers


def _extend_llama(metadata: _Metadata, config: Config) -> None:
    config["rope_interleaved"] = True


def _extend_qwen(metadata: _Metadata, config: Config) -> None:
    config["use_sliding_window"] = False


def _extend_gemma(metadata: _Metadata, config: Config, *, period: int, largest: int) -> None:
    """`period`: each period-th layer attends to everything. `largest`: layers of the 27B model, whose attention is scaled by
    (hidden / heads)**-0.5 instead of head_dim**-0.5 (the format has no key for it)."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scale = metadata.find("attention.scale", float)
    config["norm_offset"] = 0.0
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = config["hidden_size"] / heads if layers == largest else config["head_dim"]
    if scale:
        config["query_pre_attn_scalar"] = scale**-2
    config["sliding_window"] = metadata.get("attention.sliding_window", int, 4096)
    config["layer_types"] = _layer_types(metadata, layers, period)


def _layer_types(metadata: _Metadata, layers: int, period: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    pattern = metadata.file.metadata.get(f"{metadata.file.metadata['general.architecture']}.{key}", period)
    if isinstance(pattern, list) and len(pattern) == layers:
        sliding = [bool(p) for p in pattern]
    else:
        period = metadata.get(key, int, period)
        sliding = [period == 0 or (i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _extend_gemma2(metadata: _Metadata, config: Config) -> None:
    _extend_gemma(metadata, config, period=2, largest=46)
    config["attn_logit_softcapping"] = metadata.get("attn_logit_softcapping", float, 50.0)
    config["final_logit_softcapping"] = metadata.get("final_logit_softcapping", float, 30.0)


def _extend_gemma3(metadata: _Metadata, config: Config) -> None:
    _extend_gemma(metadata, config, period=6, largest=62)
    config["rope_theta"] = metadata.get("rope.freq_base", float, 1e6)
    config["rope_local_base_freq"] = metadata.get("rope.freq_base_swa", float, 10000.0)
    config["final_logit_softcapping"] = metadata.find("final_logit_softcapping", float)


def _extend_phi3(metadata: _Metadata, config: Config) -> None:
    short, long = (_table(metadata.file, f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    original = metadata.find("rope.scaling.original_context_length", int)
    if original is not None:
        config["original_max_position_embeddings"] = original
    if short and long:
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention_factor = metadata.find("rope.scaling.attn_factor", float)
        if attention_factor is not None:
            config["rope_scaling"]["attention_factor"] = attention_factor
    config["sliding_window"] = metadata.find("attention.sliding_window", int) or None


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", "llama", {}, _extend_llama),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", {}, _extend_qwen),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", {}, _extend_qwen),
    "gemma2": _Architecture("Gemma2ForCausalLM", "gemma2", _GEMMA, _extend_gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA, _extend_gemma3),
    "phi3": _Architecture("Phi3ForCausalLM", "phi3", _PHI3, _extend_phi3),
}
