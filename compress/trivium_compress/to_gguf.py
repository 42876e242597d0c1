"""A folder of safetensors as a .gguf file of the same numbers, which is what blocks are written into.

Names, keys and order of rows: the GGUF specification, and llama.cpp's converter where that is silent. What the file says is read
again, and must be the same Program and the same tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import UnsupportedError
from trivium.models import describe
from trivium.text import Tokenizer
from trivium.weights import Checkpoint, open_checkpoint
from trivium.weights.checkpoint import HEAD
from trivium_formats.gguf import OUTER, Config, GGUFModel, Writing, describe_vocabulary

from trivium_compress.convert import SOURCE, check_program, check_words, class_of, converted, flat, writers
from trivium_compress.floats import FLOATS
from trivium_compress.parts import replacing

Array = npt.NDArray[Any]
_NAME = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def to_gguf(folder: Path, path: Path) -> None:
    """Writes the model in `folder` to `path`, one tensor in memory at a time. UnsupportedError for an architecture, rope scaling or
    tokenizer that can't be written, and wherever the file would be read as another model."""
    checkpoint = open_checkpoint(folder)
    name, model = _architecture(checkpoint)
    assert model.writing is not None
    config = flat(checkpoint)
    names = dict(_names(checkpoint, model))
    with replacing(path) as new:
        _write(new, name, checkpoint, config, model.writing, names)
        _check(checkpoint, new.rename(new.with_suffix(".gguf")), model.writing)
        new.with_suffix(".gguf").rename(new)


def _check(checkpoint: Checkpoint, path: Path, how: Writing) -> None:
    """UnsupportedError unless the file is read as the same model."""
    written = open_checkpoint(path)
    check_program(checkpoint.config, {**written.config, **how.alike}, "a .gguf file")
    mine, theirs = (Tokenizer.from_data(c.tokenizer_data()) for c in (checkpoint, written))
    check_words(mine, theirs, "a .gguf file")


def _architecture(checkpoint: Checkpoint) -> tuple[str, GGUFModel]:
    wanted, known = class_of(checkpoint), writers()
    for name, model in known.items():
        if model.writing and wanted in model.writing.classes:
            return name, model
    classes = ", ".join(c for model in known.values() for c in (model.writing.classes if model.writing else ()))
    raise UnsupportedError(f"{wanted} can't be written as a .gguf file; {classes} can", param="output")


def _names(checkpoint: Checkpoint, model: GGUFModel) -> Iterator[tuple[str, str]]:
    """Canonical name and the file's of every tensor."""
    layer, outer = ({new: old for old, new in names.items()} for names in (model.names, OUTER))
    tied = describe(checkpoint.config).tied
    for name in checkpoint.tensors:
        match = _NAME.fullmatch(name)
        stem = (layer if match[1] else outer).get(match[2]) if match else None
        if (name == HEAD and tied) or name.endswith("rotary_emb.inv_freq"):
            continue
        if match is None or stem is None:
            raise UnsupportedError(f"GGUF files have no place for the tensor {name!r} of this architecture", param="output")
        yield name, f"{f'blk.{match[1]}.' if match[1] else ''}{stem}.{match[3]}"


def _write(path: Path, name: str, checkpoint: Checkpoint, config: Config, how: Writing, names: Mapping[str, str]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, name)
    freqs = _rope(writer, name, config)
    for key, value in {**_sizes(checkpoint), **how.keys(config)}.items():
        writer.add_key_value(f"{name}.{key}", value, gguf.GGUFValueType.get_type(value))
    for key, value in {**_words(checkpoint), "general.name": checkpoint.path.name, SOURCE: checkpoint.fingerprint}.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    kinds = {tensor: _kind(checkpoint, tensor) for tensor in names}
    extra = {} if freqs is None else {"rope_freqs.weight": freqs}
    for tensor, array in extra.items():
        writer.add_tensor_info(tensor, array.shape, array.dtype, array.nbytes, gguf.GGMLQuantizationType.F32)
    for tensor, kind in kinds.items():
        shape = checkpoint.tensor(tensor).shape
        dtype = np.dtype(np.float32 if kind == "float32" else np.float16)
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(names[tensor], shape, dtype, size, gguf.GGMLQuantizationType[_KINDS[kind]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in extra.values():
        writer.write_tensor_data(array)
    for tensor, kind in kinds.items():
        writer.write_tensor_data(converted(checkpoint, tensor, kind, config, how.change))
    writer.close()


def _kind(checkpoint: Checkpoint, tensor: str) -> str:
    """Matrices keep their type; vectors are float32, as every reader wants them."""
    weight = checkpoint.tensor(tensor)
    return weight.format if len(weight.shape) > 1 and weight.format in FLOATS else "float32"


def _sizes(checkpoint: Checkpoint) -> Config:
    """The keys that all decoders have."""
    info = describe(checkpoint.config)
    return {
        "context_length": info.max_positions, "embedding_length": info.hidden_size, "block_count": info.layers,
        "feed_forward_length": info.intermediate_size, "attention.head_count": info.heads, "vocab_size": info.vocab_size,
        "attention.head_count_kv": info.kv_heads, "attention.key_length": info.head_dim, "attention.value_length": info.head_dim,
        "attention.layer_norm_rms_epsilon": float(info.norm_eps),
    }  # fmt: skip


def _rope(writer: Any, name: str, config: Config) -> Array | None:
    """Writes the keys of the rotation; returns the divisors of its pairs where a tensor says them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {**found, **(found.get("full_attention") or {})}
    kind, theta = found.get("rope_type") or found.get("type") or "default", found.get("rope_theta") or config.get("rope_theta")
    rotated = int(config["head_dim"] * (found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    writer.add_uint32(f"{name}.rope.dimension_count", rotated)
    writer.add_float32(f"{name}.rope.freq_base", float(theta or 1e4))
    if kind in ("linear", "yarn"):
        writer.add_string(f"{name}.rope.scaling.type", kind)
        writer.add_float32(f"{name}.rope.scaling.factor", float(found["factor"]))
        if original := found.get("original_max_position_embeddings"):
            writer.add_uint32(f"{name}.rope.scaling.original_context_length", int(original))
        return None
    if kind == "default":
        return None
    if kind != "llama3" or name != "llama":
        raise UnsupportedError(f"rope scaling of the type {kind!r} can't be written as a .gguf file", param="output")
    from trivium.ops.rope import rope_from_config

    plain = rope_from_config({**config, "rope_parameters": {"rope_theta": theta}, "rope_scaling": None}, config["head_dim"])
    return np.asarray(plain.inv_freq / rope_from_config(config, config["head_dim"]).inv_freq, np.float32)


def _words(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tokenizer's keys."""
    data = checkpoint.tokenizer_data()
    if data["kind"] != "json":
        raise UnsupportedError("only a tokenizer.json can be written into a .gguf file", param="output")
    known = describe_vocabulary(json.loads(data["tokenizer_json"]), describe(checkpoint.config).vocab_size)
    tokenizer = Tokenizer.from_data(data)
    ids = tokenizer.tokens()
    roles = {f"{role}_token_id": ids[tokenizer.named_tokens[key]] for key, role in _ROLES.items() if key in tokenizer.named_tokens}
    ends = sorted(tokenizer.eos_ids - {roles.get("eos_token_id")})
    turn = {"eot_token_id": ends[0]} if ends else {}
    empty = tokenizer.encode("")
    adds = {"add_bos_token": empty[:1] == [tokenizer.bos_id], "add_eos_token": empty[-1:] == [roles.get("eos_token_id")]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in {**known, **roles, **turn, **adds}.items() if value not in ([], None)}
    return keys | ({"tokenizer.chat_template": data["chat_template"]} if data.get("chat_template") else {})
