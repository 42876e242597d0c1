"""Between the plain format and FRACTAL_NZ: npu_format_cast."""

from __future__ import annotations

import ctypes as c

import torch
from emulated_cann.device import BAD_ARGUMENT, DEVICE, guarded
from emulated_cann.formats import ND, NZ, c0_of, from_nz, nz_shape, to_nz
from emulated_cann.objects import DTYPES, tensor
from emulated_cann.registry import INT, POINTER, Arguments, function, need, operator

libc = c.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = c.c_void_p, [c.c_size_t]


@function(POINTER, INT, INT, POINTER, POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclnnNpuFormatCastCalculateSizeAndFormat(source: int, wanted: int, dtype: int, shape: int, rank: int, format_: int) -> None:
    """The storage shape of a cast; the caller frees it with delete[], which is free() for numbers."""
    src = tensor(source)
    assert src is not None
    need(wanted in (ND, NZ), f"npu_format_cast goes to 2 (ND) or 29 (FRACTAL_NZ), not {wanted}")
    need(src.dtype != torch.float32, "float32 has no FRACTAL_NZ")
    need(src.dim() >= 2, "FRACTAL_NZ takes 2 dimensions or more")
    result = tuple(src.shape) if wanted == ND else nz_shape(tuple(src.shape), c0_of(DTYPES[dtype]))
    memory = libc.malloc(8 * len(result))
    (c.c_int64 * len(result)).from_address(memory)[:] = result
    c.c_void_p.from_address(shape).value = memory
    c.c_uint64.from_address(rank).value = len(result)
    c.c_int.from_address(format_).value = wanted
    DEVICE.fractals = True


@operator("aclnnNpuFormatCast", "source target", any_format=("source", "target"))
def format_cast(a: Arguments) -> None:
    if a.target.acl_format == NZ:
        a.target.raw_storage.copy_(to_nz(a.source, a.target.raw_storage.shape[-1]))
    else:
        a.target.copy_(from_nz(a.source.raw_storage, *a.source.shape[-2:]))
