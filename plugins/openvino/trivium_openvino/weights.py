"""Loaded weights and how they stand in an OpenVINO graph: small, with what makes them large again left to the device's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset15 as ops
from openvino.op import Constant

from trivium.ops import Weight
from trivium_openvino.formats import Packed, is_packed, pack
from trivium_openvino.pages import decode, encode

F32 = npt.NDArray[np.float32]
_TINY = np.float32(2**-30)
"""In place of a scale of 0, relative to the group's minimum: whatever the integers are, they vanish beside the zero point."""
_TYPES = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}


@dataclass
class Resident:
    """A loaded constant: `packed` integers, or an `array` of the float type `format` (bfloat16 as its bits). changes: it may be
    assigned to, and is an input of the model instead of a part of it."""

    shape: tuple[int, ...]
    format: str
    array: npt.NDArray[Any] | None = None
    packed: Packed | None = None
    changes: bool = False

    @property
    def nbytes(self) -> int:
        if self.packed is None:
            assert self.array is not None
            return int(self.array.nbytes)
        scales = self.packed.scale.nbytes
        return int(self.packed.raw.nbytes) + (scales if self.packed.minimum is None else 2 * scales)

    @property
    def kind(self) -> Any:
        """Equal for weights that join() can put together; None for those that it can't."""
        if self.changes or len(self.shape) != 2:
            return None
        if (packed := self.packed) is None:
            return self.format, self.shape[1]
        in_bytes = math.prod(packed.dims) * packed.bits % 8 == 0
        return (self.format, packed.dims[1:], packed.bits, packed.minimum is None) if in_bytes else None

    def numbers(self) -> F32:
        """The plain numbers in the checkpoint's shape."""
        if self.packed is not None:
            return self.packed.numbers().reshape(self.shape)
        assert self.array is not None
        return decode(self.array, self.format)

    def node(self, fix: Callable[..., Any]) -> Any:
        """A new node of the graph that stands for the weight, float32[shape]."""
        if self.packed is not None:
            return _unpacked(self.packed, self.shape)
        assert self.array is not None
        if self.changes:
            return fix(self.array)
        if self.format == "float32":
            return ops.constant(self.array, shared_memory=self.array.size > 0)
        tensor = ov.Tensor(self.array, list(self.shape), _TYPES[self.format])
        return ops.convert(Constant(tensor, shared_memory=True), np.float32)


def join(parts: Sequence[Resident]) -> Resident:
    """Matrices of one kind, one below the other."""
    shape = (sum(p.shape[0] for p in parts), parts[0].shape[1])
    if parts[0].packed is None:
        return Resident(shape, parts[0].format, np.concatenate([p.array for p in parts if p.array is not None]))
    whole = [p.packed for p in parts if p.packed is not None]
    columns = ([p.raw for p in whole], [p.scale for p in whole], [p.minimum for p in whole])
    raw, scale, minimum = (None if c[0] is None else np.concatenate(c) for c in columns)  # type: ignore[arg-type]
    first = whole[0]
    return Resident(shape, parts[0].format, packed=Packed(first.bits, (shape[0], *first.dims[1:]), raw, scale, minimum))  # type: ignore[arg-type]


def load(weight: Weight, format: str) -> Resident:
    """Makes a weight resident."""
    if is_packed(format):
        return Resident(weight.shape, format, packed=pack(weight, format))
    if weight.format == format:
        dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[format]
        array = np.array(weight.data, dtype, order="C").reshape(weight.shape)
    else:
        array = np.ascontiguousarray(encode(weight.decode(), format))
    return Resident(weight.shape, format, array=array)


def _unpacked(packed: Packed, shape: tuple[int, ...]) -> Any:
    """Constant -> Convert [-> Subtract] -> Multiply -> Reshape: what OpenVINO keeps as integers up to its matrix kernels."""
    kind = ov.Type.i8 if packed.bits == 8 else ov.Type.i4 if packed.minimum is None else ov.Type.u4
    constant = Constant(ov.Tensor(packed.raw, list(packed.dims), kind), shared_memory=True)
    node = ops.convert(constant, np.float32)
    if packed.minimum is not None:
        scale = np.where(packed.scale == 0, np.maximum(np.abs(packed.minimum), _TINY) * _TINY, packed.scale)
        node = ops.subtract(node, ops.constant(-packed.minimum / scale))
        node = ops.multiply(node, ops.constant(scale))
    else:
        node = ops.multiply(node, ops.constant(packed.scale))
    return ops.reshape(node, ops.constant(np.array(shape, np.int64)), special_zero=False)
