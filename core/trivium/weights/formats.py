"""Storage formats: what bytes a tensor takes in a file and what numbers they stand for; memory-mapped files of tensors."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import Weight

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_SAMPLES, _SAMPLE_BYTES = 64, 1024
Decoder = Callable[[Array], npt.NDArray[np.float32]]


class Format(NamedTuple):
    """`block_elements` consecutive numbers of a row are stored in `block_bytes` bytes."""

    block_elements: int
    block_bytes: int


# One number an element: safetensors dtype, format, and numpy's dtype, little-endian; what numpy lacks is held as the unsigned
# integers of the bit patterns.
_PLAIN = (
    ("F64", "float64", "<f8"), ("F32", "float32", "<f4"), ("F16", "float16", "<f2"), ("BF16", "bfloat16", "<u2"),
    ("F8_E4M3", "float8_e4m3", "u1"), ("F8_E5M2", "float8_e5m2", "u1"), ("F8_E8M0", "float8_e8m0", "u1"), ("I64", "int64", "<i8"),
    ("I32", "int32", "<i4"), ("I16", "int16", "<i2"), ("I8", "int8", "i1"), ("U64", "uint64", "<u8"), ("U32", "uint32", "<u4"),
    ("U16", "uint16", "<u2"), ("U8", "uint8", "u1"), ("BOOL", "bool", "u1"),
)  # fmt: skip
_DTYPES: Mapping[str, str] = {format: dtype for _, format, dtype in _PLAIN}

# The block formats of GGML: format, elements and bytes of a block.
_BLOCKS = (
    ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24), ("q8_0", 32, 34), ("q2_k", 256, 84),
    ("q3_k", 256, 110), ("q4_k", 256, 144), ("q5_k", 256, 176), ("q6_k", 256, 210), ("iq2_xxs", 256, 66), ("iq2_xs", 256, 74),
    ("iq3_xxs", 256, 98), ("iq1_s", 256, 50), ("iq4_nl", 32, 18), ("iq3_s", 256, 110), ("iq2_s", 256, 82), ("iq4_xs", 256, 136),
    ("iq1_m", 256, 56), ("tq1_0", 256, 54), ("tq2_0", 256, 66), ("mxfp4", 32, 17), ("nvfp4", 64, 36),
)  # fmt: skip

FORMATS: Mapping[str, Format] = {
    **{format: Format(1, np.dtype(dtype).itemsize) for format, dtype in _DTYPES.items()},
    **{format: Format(elements, size) for format, elements, size in _BLOCKS},
}
"""Every storage format that can be decoded, by the name that Weight.format carries."""

SAFETENSORS_TYPES: Mapping[str, str] = {name: format for name, format, _ in _PLAIN}
"""safetensors dtype -> format."""


def stored_bytes(shape: tuple[int, ...], format: str) -> int:
    """Bytes of a tensor in a file; CheckpointError if its rows are not whole blocks."""
    elements, size = FORMATS[format]
    if elements > 1 and (not shape or shape[-1] % elements):
        raise CheckpointError(f"rows of {shape[-1] if shape else 1} numbers can't be {format}, which has blocks of {elements}")
    return math.prod(shape) // elements * size


class Unaligned(Weight):
    """A weight whose bytes begin where no number may: its data is copied each time it is asked for and kept by nobody here, so that
    a model is not in memory twice while it is loaded."""

    _stored: Array

    @property
    def data(self) -> Array:
        copied = np.require(self._stored, requirements="A")
        _give_back(self._stored)
        return copied

    @property
    def nbytes(self) -> int:
        return int(self._stored.nbytes)

    @staticmethod
    def over(stored: Array, **fields: Any) -> Unaligned:
        """The weight with these fields and the unaligned array `stored` for its data."""
        weight = object.__new__(Unaligned)
        vars(weight).update(fields, _stored=stored)
        return weight

    def slice_rows(self, start: int, stop: int) -> Weight:
        """Rows start..stop of the first dimension; only they are copied."""
        shape, origin = (stop - start, *self.shape[1:]), f"{self.origin}[{start}:{stop}]"
        return self.over(self._stored[start:stop], **{**vars(self), "shape": shape, "origin": origin})


def _give_back(view: Array) -> None:
    """Tells the system that it may drop the pages of a mapped file that `view` lies on; whoever reads them again finds them."""
    base: Any = view
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    if isinstance(base, np.memmap) and view.size and hasattr(mmap, "MADV_DONTNEED"):
        start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        base._mmap.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)  # type: ignore[attr-defined]


def make_weight(name: str, shape: tuple[int, ...], format: str, raw: Bytes, origin: str = "") -> Weight:
    """A Weight over the tensor's bytes `raw` (uint8[stored_bytes]). Where they are not aligned they are copied, at once if nobody
    knows their origin (backends then tell weights apart by where their data lies), else when the data is asked for."""
    if format in _DTYPES:
        data: Array = raw.view(_DTYPES[format]).reshape(shape)
    else:
        elements, size = FORMATS[format]
        data = raw.reshape(*shape[:-1], shape[-1] // elements * size)
    fields: dict[str, Any] = {"name": name, "shape": shape, "format": format, "decoder": decoder(format), "origin": origin}
    if origin and not data.flags.aligned:
        return Unaligned.over(data, **fields)
    return Weight(data=np.require(data, requirements="A"), **fields)


class TensorInfo(NamedTuple):
    """One tensor of a file: its shape (slowest dimension first), storage format, and bytes start..stop of the file."""

    shape: tuple[int, ...]
    format: str
    start: int
    stop: int


class TensorFile:
    """A memory-mapped file whose header has been checked. tensors: by the names in the file. fingerprint: SHA-256 over size, header
    and samples of the data, so it is cheap, and differs between models of the same shape too."""

    def __init__(self, path: Path, data: Bytes, header_bytes: int, tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.tensors, self._data = path, tensors, data
        self._written = path.stat().st_mtime_ns, path.stat().st_ino
        starts = np.linspace(header_bytes, max(header_bytes, data.size - _SAMPLE_BYTES), _SAMPLES, dtype=np.int64)
        parts = [data[:header_bytes], *(data[start : start + _SAMPLE_BYTES] for start in starts)]
        self.fingerprint = hashlib.sha256(np.concatenate(parts).tobytes() + str(data.size).encode()).hexdigest()

    def weight(self, tensor: str, name: str) -> Weight:
        """The tensor called `tensor` in the file, as a Weight called `name`."""
        shape, format, start, stop = self.tensors[tensor]
        origin = f"{self.fingerprint} {self._written} {start}:{stop}"
        return make_weight(name, shape, format, self._data[start:stop], origin)


def map_file(path: Path) -> Bytes:
    """The bytes of a file, read only when they are used; CheckpointError if there are none, or they can't be read."""
    if not path.is_file() or not path.stat().st_size:
        raise CheckpointError(f"{path} is {'empty' if path.is_file() else 'missing'}; an incomplete download?")
    try:
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as e:
        raise CheckpointError(f"{path} can't be read: {e.strerror or e}") from e


def decoder(format: str) -> Decoder:
    """The function from stored data to float32. Exact, except that float64 and wide integers round to the nearest float32."""
    return partial(_decode, format) if format in _DTYPES else partial(_decode_blocks, format)


def _decode(format: str, data: Array) -> npt.NDArray[np.float32]:
    """float8_e4m3 and e8m0 are those of the OCP specifications: bias 7, no infinities; 2**(e - 127), a scale."""
    if format == "bfloat16":  # the upper half of a float32
        return np.left_shift(data, 16, dtype=np.uint32).view(np.float32)
    if format == "float8_e5m2":  # the upper half of a float16
        data = np.left_shift(data, 8, dtype=np.uint16).view(np.float16)
    elif format.startswith("float8"):
        data = (_e4m3() if format == "float8_e4m3" else _e8m0())[data]
    return np.asarray(data, np.float32)


def _e4m3() -> Array:
    exponent, mantissa = np.arange(128) >> 3, np.arange(128) & 7
    size = np.where(exponent, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[127] = np.nan
    return np.concatenate([size, -size])


def _e8m0() -> Array:
    return np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)


def _decode_blocks(format: str, data: Array) -> npt.NDArray[np.float32]:
    """GGML blocks, by the format's own package. data: uint8[..., row bytes] -> float32[..., row]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = getattr(GGMLQuantizationType, format.upper(), None)
    if kind is None:
        raise UnsupportedError(f"the installed package gguf can't decode {format}; upgrade it (pip install -U gguf)")
    elements, size = FORMATS[format]
    if not data.size:
        return np.zeros((*data.shape[:-1], data.shape[-1] // size * elements), np.float32)
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(np.ascontiguousarray(data), kind), np.float32)
