"""The finished parts as what others open: a folder in the format compressed-tensors, or a .gguf file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from trivium.weights.checkpoint import EMBEDDING, HEAD, read_json

from trivium_compress.grids import Grid
from trivium_compress.layer import Target
from trivium_compress.parts import Parts, flush, replacing
from trivium_compress.recipe import weights_scheme
from trivium_compress.source import COPIED, Source

_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k": 14}
"""general.file_type of a file most of whose tensors are of a kind (the package gguf's LlamaFileType)."""


def finish_folder(source: Source, targets: Mapping[str, Target], parts: Parts, output: Path) -> None:
    """Shards, their index, config.json and what belongs to the model; under its name once all is there."""
    result = parts.folder / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    weight_map, size = dict[str, str](), 0
    for i, name in enumerate(parts.done, 1):
        shard = f"model-{i:05}-of-{len(parts.done):05}.safetensors"
        _link(parts.folder / parts.done[name]["file"], result / shard)
        for tensor, info in parts.tensors(name).tensors.items():
            weight_map[tensor] = shard
            size += info.stop - info.start
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(result / "model.safetensors.index.json", index)
    config = read_json(source.path / "config.json")
    if any(wanted.grid is not None for wanted in targets.values()):
        config["quantization_config"] = quantization_config(source, targets)
    _write_json(result / "config.json", config)
    for file in COPIED:
        if (source.path / file).is_file():
            shutil.copyfile(source.path / file, result / file)
    for path in result.iterdir():
        flush(path)
    result.rename(output)
    flush(output.parent)


def quantization_config(source: Source, targets: Mapping[str, Target]) -> dict[str, Any]:
    """As compressed-tensors has it in config.json: who is rounded how, and which linear modules are not. Most projections go by
    their class, others, and tables, by name."""
    schemes: dict[tuple[Grid, int], list[str]] = {}
    for name, wanted in targets.items():
        if wanted.grid is not None:
            schemes.setdefault((wanted.grid, wanted.width), []).append(source.file_name(name).removesuffix(".weight"))
    tables = {source.file_name(name).removesuffix(".weight") for name in (EMBEDDING, HEAD) if name in targets}
    inner = {scheme: [m for m in modules if m not in tables] for scheme, modules in schemes.items()}
    usual = max(inner, key=lambda scheme: len(inner[scheme])) if any(inner.values()) else None
    named = {s: sorted(modules) if s != usual else ["Linear", *sorted(tables & set(modules))] for s, modules in schemes.items()}
    matrices = (name for name in source.stored if len(source.checkpoint.tensor(name).shape) == 2 and name != EMBEDDING)
    rounded = {module for modules in schemes.values() for module in modules}
    ignored = {source.file_name(name).removesuffix(".weight") for name in matrices} - rounded
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": sorted(ignored | {"lm_head"} - tables),
        "config_groups": {
            f"group_{i}": {
                "targets": found, "weights": weights_scheme(*scheme), "input_activations": None, "output_activations": None,
                "format": "pack-quantized",
            } for i, (scheme, found) in enumerate(sorted(named.items(), key=lambda item: item[0] != usual))
        },
    }  # fmt: skip


def _link(source: Path, target: Path) -> None:
    """A second name for a file; where the file system has none, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def finish_gguf(source: Source, targets: Mapping[str, Target], parts: Parts, output: Path) -> None:
    """One file, by the format's own package: the source's metadata, its tensors in their order."""
    import gguf

    assert source.gguf is not None
    places = {tensor: name for name in parts.done for tensor in parts.done[name]["kinds"]}
    opened = {name: parts.tensors(name) for name in parts.done}
    with replacing(output) as path:
        writer = gguf.GGUFWriter(path, str(source.gguf.metadata["general.architecture"]))
        _copy_metadata(source.gguf.path, writer, targets)
        for tensor in source.gguf.tensors:
            part = places[tensor]
            kind = _ggml_type(parts.done[part]["kinds"][tensor])
            data = opened[part].weight(tensor, tensor).data
            writer.add_tensor(tensor, np.asarray(data), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _copy_metadata(path: Path, writer: Any, targets: Mapping[str, Target]) -> None:
    import gguf

    kinds = [wanted.kind for wanted in targets.values() if wanted.kind]
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.alignment"}
    replaced = {"general.file_type", "general.quantization_version"} if kinds else set()
    for field in gguf.GGUFReader(path).fields.values():
        if field.name not in own | replaced:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    if kinds:
        writer.add_file_type(_FILE_TYPES[max(kinds, key=kinds.count)])
        writer.add_quantization_version(2)


def _ggml_type(format: str) -> Any:
    import gguf

    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
    return gguf.GGMLQuantizationType[names.get(format, format.upper().replace("INT", "I"))]
