"""The neutral page format: bytes that say what they mean, so that pages can move between devices, files, processes and backends.

A record is MAGIC, the header's length (8 bytes, little-endian), a BLAKE2b-256 checksum of all that follows, the header (JSON:
"arrays" lists name, dtype and shape of each array; the rest is the writer's), then the arrays' bytes, little-endian, without holes.
Numbers are stored in the KV dtype itself where that is a plain float, else as float32. Nothing is executed or unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import PageFormatError
from trivium.ops import KVSpec, Program

MAGIC = b"TRIVIUM1"
MAX_HEADER = 16 << 20
MAX_DIMS = 8
_START = len(MAGIC) + 8 + 32
TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "uint8": "|u1"}

Array = npt.NDArray[Any]
Arrays = Mapping[str, tuple[str, Array]]
"""By name: a dtype of TYPES and the array in its stored form (see encode)."""


def encode(array: Array, dtype: str) -> Array:
    """Numbers that `dtype` holds exactly, in its stored form; bfloat16 as its 16 bits."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.ascontiguousarray(array, TYPES[dtype])


def decode(stored: Array, dtype: str) -> Array:
    """The reverse of encode(), as float32 (int32 stays)."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored if dtype == "int32" else stored.astype(np.float32)


def pack(meta: Mapping[str, Any], arrays: Arrays) -> bytes:
    """One record."""
    listed = [[name, dtype, list(array.shape)] for name, (dtype, array) in arrays.items()]
    header = json.dumps({**meta, "arrays": listed}).encode()
    if len(header) > MAX_HEADER:
        raise PageFormatError(f"a header of {len(header)} bytes; at most {MAX_HEADER} can be read again")
    body = b"".join([header, *(array.tobytes() for _, array in arrays.values())])
    return b"".join([MAGIC, len(header).to_bytes(8, "little"), blake2b(body, digest_size=32).digest(), body])


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, Array]]]:
    """Header and arrays (read-only views) of a record from a stranger. Raises PageFormatError unless every byte is as it says."""
    if data[: len(MAGIC)] != MAGIC:
        raise PageFormatError("this is no record of pages: it does not begin with the mark of the format")
    body = memoryview(data)[_START:]
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
    if length > min(MAX_HEADER, len(body)):
        raise PageFormatError(f"a header of {length} bytes in a record of {len(data)}; at most {MAX_HEADER} are read; cut short?")
    if blake2b(body, digest_size=32).digest() != data[_START - 32 : _START]:
        raise PageFormatError("the checksum does not match: the record is damaged or cut short")
    try:
        header = json.loads(bytes(body[:length]))
    except (ValueError, RecursionError) as e:
        raise PageFormatError(f"the header is not valid JSON ({e})") from None
    if not isinstance(header, dict) or not isinstance(header.get("arrays"), list):
        raise PageFormatError("the header is no JSON object with a list of arrays")
    return header, _arrays(header["arrays"], body[length:])


def _arrays(listed: list[Any], data: memoryview) -> dict[str, tuple[str, Array]]:
    at, found = 0, dict[str, tuple[str, Array]]()
    for entry in listed:
        name, dtype, shape = entry if isinstance(entry, list) and len(entry) == 3 else ("", "", None)
        named = isinstance(name, str) and name not in found and isinstance(dtype, str) and dtype in TYPES
        if not named or not isinstance(shape, list) or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise PageFormatError(f"the header's entry {entry!s:.80} is no array that can be read")
        end = at + math.prod(shape) * np.dtype(TYPES[dtype]).itemsize
        if end > len(data) or math.prod(n or 1 for n in shape) > 1 << 40:
            raise PageFormatError(f"the array {name!r} ends at byte {end} of {len(data)}")
        found[name] = dtype, np.frombuffer(data[at:end], TYPES[dtype]).reshape(shape)
        at = end
    if at != len(data):
        raise PageFormatError(f"the header describes {at} bytes of arrays, the record has {len(data)}")
    return found


def rotations(program: Program) -> tuple[str, ...]:
    """How the keys that each state of a (not yet fused) Program stores were rotated, in words; "" if they were not."""
    made = {value: call for call in program.calls for value in call.results}
    tables = {c.value: c.array for c in program.constants if c.array is not None}

    def describe(state: Any) -> str:
        writer = next(call for call in program.calls if state in call.args)
        turns = [made[v] for v in writer.args if v is not None and v in made and made[v].name == "rope"]
        return "; ".join(_rope(tables[turn.args[2]], **turn.attrs) for turn in turns if turn.args[2] is not None)

    return tuple(describe(decl.value) for decl in program.states)


def _rope(inv_freq: Array, *, interleaved: bool, scale: float) -> str:
    digest = blake2b(inv_freq.astype("<f4").tobytes(), digest_size=16).hexdigest()
    return f"rope of {len(inv_freq)} {'interleaved' if interleaved else 'split'} pairs, scale {scale!r}, inv_freq blake2b {digest}"


def stored_dtype(spec: KVSpec, group: int) -> str:
    """The dtype in which the arrays of a group are stored."""
    return spec.dtype if spec.groups[group].spec.paged and spec.dtype in TYPES else "float32"


class Layout(NamedTuple):
    """What the pages of one engine mean. fingerprint: of the model. producer: whatever else the numbers depend on (backend, its
    version, resident formats). rotations: see rotations(); empty where the model does not say."""

    fingerprint: str
    producer: str
    spec: KVSpec
    rotations: tuple[str, ...] = ()

    def meaning(self, group: int) -> dict[str, Any]:
        """What must agree for the numbers of a group to mean the same; as read back from JSON."""
        spec, states = self.spec.groups[group].spec, self.spec.groups[group].states
        sizes = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(spec).items()}
        keys = [self.rotations[s] for s in states] if self.rotations else []
        kind = {"group": group, "states": list(states), "kind": type(spec).__name__}
        return {"fingerprint": self.fingerprint, **kind, **sizes, "keys": keys}

    def describe(self, group: int) -> dict[str, Any]:
        """Everything that the bytes of a group's pages mean; as read back from JSON."""
        quantised: dict[str, None] = {"scales": None, "zero_points": None}
        own = {"producer": self.producer, "page_size": self.spec.page_size, "kv_dtype": self.spec.dtype}
        return {**self.meaning(group), **own, **quantised}

    def shapes(self, group: int, page_size: int) -> dict[str, tuple[int, ...]]:
        """Neutral shape of one page, or of `page_size` tokens, of each array of a group, by name: "STATE.PART"."""
        which = self.spec.groups[group]
        return {f"{s}.{i}": shape for s in which.states for i, shape in enumerate(which.spec.page_shapes(page_size))}

    @property
    def digest(self) -> str:
        """A name for the layout: equal if and only if pages can be exchanged as they are."""
        text = json.dumps([self.describe(g) for g in range(len(self.spec.groups))], sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()
