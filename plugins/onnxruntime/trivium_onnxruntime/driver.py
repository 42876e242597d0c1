"""What CUDA's own driver library says of its devices, for onnxruntime doesn't: how many there are and their memory.

The functions and their types are those of the CUDA Driver API's reference. Nothing here was run on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from trivium.errors import BackendUnavailableError

LIBRARY = "libcuda.so.1"


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as e:
        raise BackendUnavailableError(f"CUDA's driver library can't be loaded: {e}", param="backend") from e


def _call(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code:
        raise BackendUnavailableError(f"CUDA's driver answers {name} with error {code}", param="backend")


def count() -> int:
    """How many devices the process may use. BackendUnavailableError where there is no driver, or it fails."""
    found = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", ctypes.byref(found))
    return found.value


def total_bytes(index: int) -> int:
    """Memory of a device; opens nothing on it."""
    found = ctypes.c_size_t()
    _call("cuInit", 0)
    _call("cuDeviceTotalMem_v2", ctypes.byref(found), _device(index))
    return found.value


def free_bytes(index: int) -> int:
    """What is free now, asked in the device's primary context, which onnxruntime's sessions use as well."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _context(index):
        _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


@contextlib.contextmanager
def _context(index: int) -> Iterator[None]:
    _call("cuInit", 0)
    device, context, popped = _device(index), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(popped))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", device)
