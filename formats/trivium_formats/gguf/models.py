"""What a GGUF file's names and metadata mean, in the terms of Hugging Face checkpoints: tensor names and config.json keys.

Source of names and keys: the GGUF specification (ggml docs/gguf.md) and the `gguf` package's constants. A key that a converter
may leave out has the format's own default here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, UnsupportedError
from trivium.extensions import blame, find, installed

from trivium_formats.gguf.file import GGUFFile

Config = dict[str, Any]
Floats = npt.NDArray[np.float32]
Change = Callable[[str, Floats, Config], Floats]
"""(canonical name, numbers float32 of rows that are whole heads, configuration) -> the numbers on the other side."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Tensors that become part of the configuration.
_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class Keys:
    """The metadata of one architecture: `get("block_count", int)` reads "llama.block_count"."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture + "."

    def get(self, key: str, kind: type[Any], default: Any = ...) -> Any:
        """The value as `kind`, or `default`. CheckpointError if there is neither or it is of another type."""
        value, name = self.file.metadata.get(self.prefix + key, default), f"{self.file.path}: the metadata key {self.prefix}{key}"
        if isinstance(value, list):
            if not value or value.count(value[0]) != len(value):
                raise UnsupportedError(f"{name} differs from layer to layer, which no model here does")
            value = value[0]
        wanted = (int, float) if kind is float else kind
        if value is not None and (not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool))):
            raise CheckpointError(f"{name} is {'missing' if value is ... else repr(value)}; it should be a {kind.__name__}")
        return value if value is None else kind(value)

    def size(self, key: str, largest: int = 1 << 30, default: Any = ...) -> int:
        """A whole number from 1 to `largest`."""
        value: int = self.get(key, int, default)
        if not 1 <= value <= largest:
            raise CheckpointError(f"{self.file.path}: the metadata key {self.prefix}{key} is {value}, not in 1..{largest}")
        return value

    def table(self, tensor: str) -> list[float] | None:
        """The numbers of a tensor, if the file has it."""
        return self.file.weight(tensor, tensor).decode().ravel().tolist() if tensor in self.file.tensors else None


def read_config(file: GGUFFile) -> Config:
    """The model's configuration with the keys of config.json; UnsupportedError names an architecture that is not known."""
    architecture = _architecture(file)
    keys = Keys(file, file.metadata["general.architecture"])
    config: Config = {"architectures": [architecture.hf_class], "model_type": architecture.model_type} | architecture.read(keys)
    if architecture.extend:
        architecture.extend(keys, config)
    return config


def map_names(file: GGUFFile) -> dict[str, str]:
    """Canonical name -> name in the file. Tensors that no model of the architecture has give one warning and are left out."""
    layer_names = _architecture(file).names
    mapped: dict[str, str] = {}
    unknown = []
    for tensor in file.tensors:
        match = _NAME.fullmatch(tensor)
        layer, stem, suffix = match.groups() if match else ("", "", "")
        new = layer_names.get(stem) if layer else OUTER.get(stem)
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


def _architecture(file: GGUFFile) -> GGUFModel:
    name = str(file.metadata.get("general.architecture"))
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedError(f"{file.path} is one part of a split GGUF model; merge the parts into one file first")
    found, what = find("gguf_model", name, GGUFModel)
    if found is None:
        known = ", ".join(installed("gguf_model"))
        raise UnsupportedError(f"{file.path}: the GGUF architecture {name!r} can't be read; there are {known}")
    model: GGUFModel = found
    return model._replace(extend=model.extend and blame(what)(model.extend), read=blame(what)(model.read))


def read_decoder(keys: Keys) -> Config:
    """What decoders have in common. UnsupportedError for a mixture of experts."""
    tensors, hidden = keys.file.tensors, keys.size("embedding_length")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[1:] != (hidden,):
        raise CheckpointError(f"{keys.file.path}: token_embd.weight is missing or does not have rows of {hidden} numbers")
    if keys.get("expert_count", int, 0):
        raise UnsupportedError(f"{keys.file.path}: a mixture-of-experts model; GGUF files of those can't be read, use safetensors")
    heads = keys.size("attention.head_count", hidden)
    head_dim = keys.size("attention.key_length", default=hidden // heads)
    return (
        token_ids(keys.file)
        | _rope(keys, head_dim)
        | {
            "hidden_size": hidden,
            "intermediate_size": keys.size("feed_forward_length"),
            "num_hidden_layers": keys.size("block_count", len(tensors)),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.size("attention.head_count_kv", heads, heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": keys.size("context_length"),
            "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 1e-6),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
        }
    )


def token_ids(file: GGUFFile) -> Config:
    """bos_token_id and eos_token_id, as far as the file has them."""
    found = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _rope(keys: Keys, head_dim: int) -> Config:
    config: Config = {"rope_theta": keys.get("rope.freq_base", float, 10000.0)}
    rotated = keys.size("rope.dimension_count", head_dim, head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    factors, scaling = keys.table("rope_freqs.weight"), _rope_scaling(keys)
    if factors and len(factors) != rotated // 2:
        raise CheckpointError(f"{keys.file.path}: rope_freqs.weight has {len(factors)} numbers, not {rotated // 2}")
    if factors and any(f != 1.0 for f in factors):
        config["rope_parameters"] = {"rope_type": "factors", "factors": factors, "rope_theta": config["rope_theta"]}
    elif scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(keys: Keys) -> Config | None:
    """rope_scaling as in config.json. None: there is none (its factor may be 0), or it is LongRoPE, which its family reads."""
    old = keys.get("rope.scale_linear", float, 0.0)
    factor, kind = keys.get("rope.scaling.factor", float, old), keys.get("rope.scaling.type", str, "linear" if old else "none")
    if kind in ("none", "longrope") or factor == 0.0:
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{keys.file.path}: rope scaling of the type {kind!r}; there are none, linear, yarn, longrope")
    original = keys.get("rope.scaling.original_context_length", int, None)
    return {"rope_type": kind, "factor": factor} | ({} if original is None else {"original_max_position_embeddings": original})


class Writing(NamedTuple):
    """How a folder becomes a file of this architecture, and such a file a folder. classes: those of config.json that are written
    so; the first is what a file becomes. keys: metadata beyond what decoders have in common, without the architecture's name, from
    the flattened configuration. change: the numbers of the file; back: those of the folder again. alike: what the configuration of
    the file says otherwise because of `change`, as the folder's has it. config: keys of config.json beyond those that are read, or
    otherwise, from what is read of a file."""

    classes: tuple[str, ...]
    keys: Callable[[Config], Config] = lambda config: {}
    change: Change | None = None
    alike: Mapping[str, Any] = {}
    back: Change | None = None
    config: Callable[[Config], Config] = lambda config: {}


class GGUFModel(NamedTuple):
    """One architecture of GGUF files as config.json calls it. `names`: a layer's tensors, by their names between "blk.N." and
    ".weight". `extend` fills in what only this architecture has; `read` gives all the rest. `writing`: None where files are read
    only."""

    hf_class: str
    model_type: str
    names: Mapping[str, str]
    extend: Callable[[Keys, Config], None] | None = None
    read: Callable[[Keys], Config] = read_decoder
    writing: Writing | None = None
