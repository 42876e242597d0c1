"""Loaded weights and how they stand in an OpenVINO graph: small, with what makes them large again left to the device's kernels."""

from __future__ import annotations

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
        whole, scale = self.packed.whole.size * self.packed.bits // 8, self.packed.scale.nbytes
        return whole + (scale if self.packed.minimum is None else 2 * scale)

    @property
    def kind(self) -> Any:
        """Equal for weights that join() can put together; None for those that it can't."""
        if self.changes or len(self.shape) != 2:
            return None
        packed = self.packed
        return self.format, self.shape[1], packed and (packed.bits, packed.whole.shape[1:], packed.minimum is None)

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
    columns = zip(*(p.packed[1:] for p in parts if p.packed is not None), strict=True)
    whole, scale, minimum = (None if c[0] is None else np.concatenate(c) for c in columns)
    return Resident(shape, parts[0].format, packed=Packed(parts[0].packed.bits, whole, scale, minimum))


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
    whole, dims = packed.whole, list(packed.whole.shape)
    if packed.bits == 4:
        raw = whole.view(np.uint8).reshape(-1) & 15
        raw = np.ascontiguousarray(raw[0::2] | raw[1::2] << 4)
        tensor = ov.Tensor(raw, dims, ov.Type.i4 if packed.minimum is None else ov.Type.u4)
        constant = Constant(tensor, shared_memory=False)
    else:
        constant = ops.constant(whole, shared_memory=True)
    node = ops.convert(constant, np.float32)
    if packed.minimum is not None:
        scale = np.where(packed.scale == 0, np.maximum(np.abs(packed.minimum), _TINY) * _TINY, packed.scale)
        node = ops.subtract(node, ops.constant(-packed.minimum / scale))
        node = ops.multiply(node, ops.constant(scale))
    else:
        node = ops.multiply(node, ops.constant(packed.scale))
    return ops.reshape(node, ops.constant(np.array(shape, np.int64)), special_zero=False)
