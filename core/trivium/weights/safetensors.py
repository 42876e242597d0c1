"""safetensors files and folders of them, memory-mapped. Layout: the safetensors format description.

A file is 8 bytes header length (little-endian), that many bytes of JSON (name -> dtype, shape, data_offsets), then the tensors'
bytes without holes. Everything is checked before any tensor is read, so a missing or short shard never becomes zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights.formats import SAFETENSORS_TYPES, TensorFile, TensorInfo, map_file, stored_bytes

MAX_HEADER = 32 << 20
MAX_DIMS = 8
_INCOMPLETE = "; an incomplete download?"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def parse_json(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object from a stranger: CheckpointError for all else, nested too deeply, or with a key twice in one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise CheckpointError(f"{what}: the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{what} is not valid JSON ({e}){_INCOMPLETE}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return value


class SafetensorsFile(TensorFile):
    """One file. Raises CheckpointError unless the whole file is as its header says."""

    def __init__(self, path: Path) -> None:
        data = map_file(path)
        length = int.from_bytes(data[:8].tobytes(), "little")
        if not 2 <= length <= data.size - 8:
            raise CheckpointError(f"{path}: a header of {length} bytes in a file of {data.size}{_INCOMPLETE}")
        if length > MAX_HEADER:
            raise CheckpointError(f"{path}: a header of {length} bytes; at most {MAX_HEADER} are read")
        entries = parse_json(data[8 : 8 + length].tobytes(), f"{path}: the header")
        infos = {name: _info(path, name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
        _check_extent(path, infos, 8 + length, data.size)
        super().__init__(path, data, 8 + length, infos)


def _check_extent(path: Path, infos: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """The tensors must fill the file from `start` on, one after another."""
    end, before = start, "the header"
    for name, info in sorted(infos.items(), key=lambda item: item[1][2:]):
        if info.start != end:
            raise CheckpointError(f"{path}: the tensor {name!r} overlaps {before} or leaves a hole after it")
        end, before = info.stop, repr(name)
    if end != size:
        raise CheckpointError(f"{path}: the header describes {end} bytes, the file has {size}{_INCOMPLETE}")


def _info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    entry = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets")), entry.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or math.prod(n for n in shape if n) >= 1 << 62:
        raise CheckpointError(f"{path}: the header's entry for {name!r} makes no sense")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise UnsupportedError(f"{path}: {name!r} is {dtype!r}; there are {', '.join(SAFETENSORS_TYPES)}")
    size = stored_bytes(shape, SAFETENSORS_TYPES[dtype])
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{path}: {name!r} is {dtype}{list(shape)}, {size} bytes, but has the bytes {offsets}")
    return TensorInfo(shape, SAFETENSORS_TYPES[dtype], start + offsets[0], start + offsets[1])


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A short list of whole numbers from 0 as a tuple; None if `value` is anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMS or not all(type(v) is int and v >= 0 for v in value):
        return None
    return tuple(value)


def find_tensors(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the opened and checked file of `folder` that holds it.

    Taken are, in this order: model.safetensors; the files of a *.safetensors.index.json; every .safetensors file.
    """
    single = folder / "model.safetensors"
    if not single.exists() and (indexes := sorted(folder.glob("*.safetensors.index.json"))):
        return _from_index(folder, indexes[0])
    found: dict[str, SafetensorsFile] = {}
    for file in map(SafetensorsFile, [single] if single.exists() else _shards(folder)):
        for name in file.tensors:
            if name in found:
                raise CheckpointError(f"{folder}: the tensor {name!r} is in {found[name].path.name} and in {file.path.name}")
            found[name] = file
    return found


def _shards(folder: Path) -> list[Path]:
    """Every .safetensors file; of files numbered 00001-of-N all N must be there."""
    paths = sorted(folder.glob("*.safetensors"))
    for stem, _, count in {m.groups() for p in paths if (m := _SHARD.fullmatch(p.name))}:
        for i in range(1, min(int(count), len(paths) + 1) + 1):
            if not (shard := folder / f"{stem}-{i:05}-of-{count}.safetensors").exists():
                raise CheckpointError(f"{shard} is missing{_INCOMPLETE}")
    return paths


def _from_index(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = parse_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: there is no weight_map from tensors to files in it")
    files = {}
    for file in sorted(set(weight_map.values())):
        if file in ("", ".", "..") or re.search(r"[/\\:\0]", file):
            raise CheckpointError(f"{index}: {file!r} is not the name of a file in the same folder")
        files[file] = SafetensorsFile(folder / file)
    for name, file in weight_map.items():
        if name not in files[file].tensors:
            raise CheckpointError(f"{folder / file}: the tensor {name!r}, which {index.name} promises, is not in it{_INCOMPLETE}")
    return {name: files[file] for name, file in weight_map.items()}
