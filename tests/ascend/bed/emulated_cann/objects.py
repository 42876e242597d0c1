"""The arguments of an operator call as Python values: tensors become CPU views of the device memory, without a copy."""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Callable
from typing import Any

import torch

# aclDataType (acl_base.h of the wheel's include/) -> torch
DTYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    10: torch.int64, 11: torch.float64, 12: torch.bool, 27: torch.bfloat16,
    35: torch.float8_e5m2, 36: torch.float8_e4m3fn,
}  # fmt: skip
KINDS = {1: "tensor", 2: "scalar", 3: "ints", 4: "floats", 5: "bools", 6: "tensors", 7: "scalars"}
MAX_RANK = 8


class AclTensor(c.Structure):
    _fields_ = [
        *((n, c.c_int32) for n in ("kind", "dtype", "format", "rank", "storage_rank")),
        *((n, c.c_int64 * MAX_RANK) for n in ("shape", "strides", "storage_shape")),
        ("offset", c.c_int64),
        ("data", c.c_void_p),
    ]


class AclScalar(c.Structure):
    _fields_ = [("kind", c.c_int32), ("dtype", c.c_int32), ("real", c.c_double), ("integer", c.c_int64)]


class AclArray(c.Structure):
    _fields_ = [("kind", c.c_int32), ("count", c.c_uint64), ("items", c.c_void_p)]


def at(address: int, kind: str, layout: type[Any]) -> Any:
    """The object at an address; a TypeError if it is of another kind, i.e. if an operator's signature is declared wrongly."""
    found = KINDS.get(c.c_int32.from_address(address).value, "nothing known")
    if found != kind:
        raise TypeError(f"the declared signature expects a {kind} where torch-npu passes {found}")
    return layout.from_address(address)


def tensor(address: int | None) -> torch.Tensor | None:
    """A CPU view of an aclTensor's memory. Its format is the attribute `acl_format`, its memory in that format `raw_storage`; for
    formats other than plain ones the view itself has the right shape and strides but not the right numbers (formats.plain has)."""
    if not address:
        return None
    t = at(address, "tensor", AclTensor)
    if t.dtype not in DTYPES:
        raise TypeError(f"emulated CANN knows no aclDataType {t.dtype}")
    dtype, shape, strides = DTYPES[t.dtype], t.shape[: t.rank], t.strides[: t.rank]
    storage = t.storage_shape[: t.storage_rank]
    elements = math.prod(storage)
    if elements == 0 or not t.data:
        view = raw = torch.empty(shape, dtype=dtype)
    else:
        memory = (c.c_char * (elements * dtype.itemsize)).from_address(t.data)
        raw = torch.frombuffer(memory, dtype=dtype)
        view, raw = raw.as_strided(shape, strides, t.offset), raw.view(storage)
    view.acl_format, view.raw_storage = t.format, raw  # type: ignore[attr-defined]
    return view


def scalar(address: int | None) -> float | int | bool | None:
    if not address:
        return None
    s = at(address, "scalar", AclScalar)
    return float(s.real) if s.dtype in (0, 11) else bool(s.integer) if s.dtype == 12 else int(s.integer)


def ints(address: int | None) -> list[int] | None:
    if not address:
        return None
    a = at(address, "ints", AclArray)
    return list((c.c_int64 * a.count).from_address(a.items)) if a.count else []


def tensors(address: int | None) -> list[torch.Tensor | None] | None:
    if not address:
        return None
    a = at(address, "tensors", AclArray)
    return [tensor(p) for p in (c.c_void_p * a.count).from_address(a.items)] if a.count else []


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


# letter of a declared signature -> (C type, conversion)
ARGUMENTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "T": (c.c_void_p, tensor),
    "S": (c.c_void_p, scalar),
    "A": (c.c_void_p, ints),
    "L": (c.c_void_p, tensors),
    "i": (c.c_int64, int),
    "I": (c.c_int32, int),
    "b": (c.c_bool, bool),
    "d": (c.c_double, float),
    "f": (c.c_float, float),
    "s": (c.c_char_p, text),
    "p": (c.c_void_p, lambda address: address),
}


def raw_memory(t: torch.Tensor) -> torch.Tensor:
    """The whole memory of an npu tensor's storage as numbers of its dtype, in whatever format they lie, without a copy."""
    storage = t.untyped_storage()
    return torch.frombuffer((c.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=t.dtype)


def host(t: torch.Tensor) -> torch.Tensor:
    """A CPU view of an npu tensor's memory (any shape, strides, dtype), without a copy; other tensors unchanged."""
    if t.device.type != "npu":
        return t
    if t.untyped_storage().nbytes() == 0 or t.numel() == 0:
        return torch.empty(t.shape, dtype=t.dtype)
    return raw_memory(t).as_strided(t.shape, t.stride(), t.storage_offset())
