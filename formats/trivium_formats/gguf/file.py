"""GGUF files (versions 2 and 3, little-endian): metadata and memory-mapped tensors. Layout: ggml's docs/gguf.md.

A file may come from anyone, so every count and length is checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights.formats import Bytes, TensorFile, TensorInfo, map_file, stored_bytes

MAX_ITEMS = 1 << 24
MAX_DIMS = 4
MAX_NESTING = 3
_SHORT = 32  # bytes of a string and its length that are looked at for each one of a list
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type id -> struct code.
_SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

GGML_TYPES: Mapping[int, str] = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k",
    13: "q5_k", 14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s",
    23: "iq4_xs", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 29: "iq1_m", 30: "bfloat16", 34: "tq1_0",
    35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip
"""Tensor type id -> storage format. Ids that are missing (activation formats, withdrawn types) have no decoder."""


class _Reader:
    """Reads values off the front of `data` (uint8[bytes of the file]) and never past its end."""

    def __init__(self, data: Bytes, path: Path) -> None:
        self._data, self.path, self.size, self.at = data.data, path, data.size, 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; the file is damaged or an incomplete download")

    def take(self, size: int, what: str) -> memoryview:
        if size > self.size - self.at:
            raise self.fail(f"the file ends within {what}")
        self.at += size
        return self._data[self.at - size : self.at]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, code: str, what: str, item_bytes: int) -> int:
        """A count of items that take at least `item_bytes` each in what follows."""
        n: int = self.scalar(code, what)
        if n > (self.size - self.at) // item_bytes or n > MAX_ITEMS:
            raise self.fail(f"{what} says {n}, more than the file can hold")
        return n

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def _short_strings(self, n: int) -> list[str] | None:
        """`n` strings at once, if they are as short as most: wherever seven zero bytes stand, a length below 256 stands before
        them. None, with nothing read, where following those lengths does not lead from one such place to the next."""
        data = np.frombuffer(self._data[self.at : self.at + _SHORT * n], np.uint8)
        if not n or data.size < 8:
            return None
        zero = data == 0
        for step in (1, 2, 3):  # of runs of 1, 2, 4 and 7
            zero = zero[:-step] & zero[step:]
        places = np.flatnonzero(zero[1:])[:n]
        ends = places + 8 + data[places]
        if len(places) < n or places[0] or np.any(ends[:-1] != places[1:]) or ends[-1] > data.size:
            return None
        text = data[: ends[-1]].copy()
        text[places] = 0
        kept = text != 0
        kept[places] = True  # of each length one byte stays and parts the strings
        if np.count_nonzero(kept) != text.size - 7 * n:  # a string holds zeros
            return None
        try:
            found: list[str] = text[kept].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return None
        self.at += int(ends[-1])
        return found

    def value(self, kind: int, what: str, nesting: int = 0) -> Any:
        """A value of the type `kind`; arrays of numbers at once."""
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind != _ARRAY or nesting >= MAX_NESTING:
            raise self.fail(f"{what} has the unknown value type {kind}")
        kind = self.scalar("I", what)
        if kind not in _SCALARS:
            n = self.count("Q", f"the length of {what}", 8)
            short = self._short_strings(n) if kind == _STRING else None
            return short or [self.value(kind, what, nesting + 1) for _ in range(n)]
        dtype = np.dtype("<" + _SCALARS[kind])
        n = self.count("Q", f"the length of {what}", dtype.itemsize)
        items = np.frombuffer(self.take(n * dtype.itemsize, what), np.uint8 if kind == _BOOL else dtype)
        return list((items != 0 if kind == _BOOL else items).tolist())


class GGUFFile(TensorFile):
    """An opened GGUF file. metadata: every key with its value as plain Python.

    Raises CheckpointError where the file is damaged and UnsupportedError where it is of another kind than trivium reads.
    """

    def __init__(self, path: Path) -> None:
        data = map_file(path)
        reader = _Reader(data, path)
        tensors, keys = _read_header(reader)
        self.metadata: dict[str, Any] = {}
        for i in range(keys):
            key = reader.string(f"the name of metadata key {i}")
            if key in self.metadata:
                raise reader.fail(f"the metadata key {key!r} is there twice")
            self.metadata[key] = reader.value(reader.scalar("I", f"the type of {key!r}"), f"the value of {key!r}")
        infos = [_read_info(reader) for _ in range(tensors)]
        super().__init__(path, data, reader.at, _place(reader, infos, self.metadata.get("general.alignment", 32)))


def _place(reader: _Reader, infos: list[tuple[str, TensorInfo]], alignment: Any) -> dict[str, TensorInfo]:
    """Turns offsets within the data section into bytes of the file; refuses what overlaps or lies outside."""
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
        raise reader.fail(f"general.alignment is {alignment}, not a multiple of 8")
    base = math.ceil(reader.at / alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    end, before = base, "the header"
    for name, (shape, format, start, stop) in sorted(infos, key=lambda item: item[1].start):
        if name in placed:
            raise reader.fail(f"the tensor {name!r} is listed twice")
        if start % alignment or base + start < end:
            raise reader.fail(f"the tensor {name!r} overlaps {before!r} or is not aligned to {alignment} bytes")
        end, before = base + stop, name
        if end > reader.size:
            raise reader.fail(f"the tensor {name!r} ends at byte {end} of a file of {reader.size} bytes")
        placed[name] = TensorInfo(shape, format, base + start, end)
    return placed


def _read_header(reader: _Reader) -> tuple[int, int]:
    """(number of tensors, number of metadata keys)"""
    if reader.take(4, "the magic").tobytes() != b"GGUF":
        raise reader.fail("not a GGUF file (it doesn't start with GGUF)")
    version = reader.scalar("I", "the version")
    if not version & 0xFFFF:
        raise UnsupportedError(f"{reader.path}: a big-endian GGUF file; only little-endian ones can be read, convert it first")
    if version not in (2, 3):
        raise UnsupportedError(f"{reader.path}: GGUF version {version}; versions 2 and 3 can be read, convert the model again")
    return reader.count("Q", "the number of tensors", 24), reader.count("Q", "the number of metadata keys", 13)


def _read_info(reader: _Reader) -> tuple[str, TensorInfo]:
    """One tensor's name, shape, format, and bytes within the data section."""
    name = reader.string("a tensor's name")
    dims = reader.scalar("I", f"the dimensions of {name!r}")
    if dims > MAX_DIMS:
        raise reader.fail(f"the tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([reader.scalar("Q", f"the shape of {name!r}") for _ in range(dims)]))
    kind, start = reader.scalar("I", f"the type of {name!r}"), reader.scalar("Q", f"the offset of {name!r}")
    if 0 in shape:
        raise reader.fail(f"the tensor {name!r} has the shape {list(shape)}")
    if kind not in GGML_TYPES:
        message = f"{reader.path}: the tensor {name!r} has the type id {kind}, which can't be decoded"
        raise UnsupportedError(f"{message}; convert the model to another type")
    try:
        return name, TensorInfo(shape, GGML_TYPES[kind], start, start + stored_bytes(shape, GGML_TYPES[kind]))
    except CheckpointError as e:
        raise reader.fail(f"the tensor {name!r}: {e}") from None
