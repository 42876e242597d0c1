"""The tensors of one module (weights, scales, zero points) found by name, checked, and joined into one weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import InputScale, Weight
from trivium.plugin import hookimpl

from trivium_formats.lazy import Array, Floats

Make = Callable[[], Weight]
Tensors = Mapping[str, Make]
Config = Mapping[str, Any]
Reader = Callable[[Config, Tensors], Tensors]


class Hook:
    """One entry point: the hook gives `reader`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @hookimpl
    def trivium_weight_format(self) -> Reader:
        return self._reader


@dataclass(frozen=True)
class Module:
    """Tensors whose names start with `stem` and a dot, by the rest of the name."""

    stem: str
    parts: Tensors

    def find(self, part: str, shape: tuple[int, ...] | None = None, formats: Sequence[str] = ()) -> Weight | None:
        """A tensor, or None. Raises CheckpointError where it has another shape, or a format that isn't among `formats`."""
        if part not in self.parts:
            return None
        weight = self.parts[part]()
        if formats and weight.format not in formats:
            raise CheckpointError(f"{self.stem}.{part} is {weight.format}; it must be {' or '.join(formats)}")
        if shape is not None and weight.shape != shape:
            raise CheckpointError(f"{self.stem}.{part} has the shape {list(weight.shape)}; it must have {list(shape)}")
        return weight

    def need(self, part: str, shape: tuple[int, ...] | None = None, formats: Sequence[str] = ()) -> Weight:
        """A tensor that must be there: else CheckpointError."""
        weight = self.find(part, shape, formats)
        if weight is None:
            raise CheckpointError(f"the checkpoint lacks {self.stem}.{part}")
        return weight

    def matrix(self, part: str, formats: Sequence[str]) -> Weight:
        """A tensor of two dimensions, none of them 0."""
        weight = self.need(part, None, formats)
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise CheckpointError(f"{self.stem}.{part} has the shape {list(weight.shape)}; it must be a matrix")
        return weight


def join(tensors: Tensors, anchor: str, others: Sequence[str], make: Callable[[Module], Weight]) -> dict[str, Make]:
    """`tensors`, where for each STEM.`anchor` there is STEM.weight = make(what is called STEM.`anchor` or STEM and one of `others`)
    in place of these."""
    stems = [name.removesuffix(f".{anchor}") for name in tensors if name.endswith(f".{anchor}")]
    joined = dict(tensors)
    for stem in stems:
        names = {part: f"{stem}.{part}" for part in (anchor, *others)}
        module = Module(stem, {part: joined.pop(name) for part, name in names.items() if name in tensors})
        joined[f"{stem}.weight"] = _Later(make, module)
    return joined


@dataclass(frozen=True)
class _Later:
    make: Callable[[Module], Weight]
    module: Module

    def __call__(self) -> Weight:
        return self.make(self.module)


def choice(config: Config, key: str, known: Sequence[Any], default: Any = None) -> Any:
    """One of `known` from a quantization_config: UnsupportedError if it has something else."""
    value = config.get(key, default)
    if value not in known:
        method, names = config.get("quant_method"), ", ".join(str(k) for k in known)
        raise UnsupportedError(f"{method} checkpoints with {key} {value!r} can't be read; with {names} they can")
    return value


def input_scale(module: Module, offset: str) -> InputScale:
    """STEM.input_scale and STEM.`offset`, which may lack where it is 0. CheckpointError if they are no scale and whole offset."""
    scale, zero = _number(module, "input_scale"), _number(module, offset) if offset in module.parts else 0.0
    if not (math.isfinite(scale) and scale > 0 and zero in range(-128, 128)):
        raise CheckpointError(f"{module.stem}: inputs can't be rounded by the scale {scale} and the offset {zero}")
    return InputScale(scale, int(zero))


def _number(module: Module, part: str) -> float:
    weight = module.need(part, None, ("float16", "bfloat16", "float32", "int8", "int32"))
    if math.prod(weight.shape) != 1:
        raise CheckpointError(f"{module.stem}.{part} has the shape {list(weight.shape)}; it must be one number")
    return float(weight.decode().reshape(()))


def check_groups(stem: str, of: Array, groups: int) -> Array:
    """`of`, the group of each input; CheckpointError if one is not among the `groups` that there are."""
    if of.min() < 0 or of.max() >= groups:
        raise CheckpointError(f"{stem}: inputs are of groups {of.min()} to {of.max()}, but there are {groups}")
    return of


def unpack(words: Array, bits: int) -> Array:
    """int32[..., n] -> uint8[..., n * 32 / bits]: each word's fields, the lowest bits first. `bits`: 2, 4 or 8."""
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    return (fields & np.uint32((1 << bits) - 1)).astype(np.uint8).reshape(*words.shape[:-1], -1)


def unpack_columns(words: Array, bits: int, start: int, stop: int) -> Array:
    """Columns start..stop of unpack(words): uint8[..., stop - start]."""
    per = 32 // bits
    first = start // per
    return unpack(words[..., first : -(-stop // per)], bits)[..., start - first * per : stop - first * per]


def numbers(weight: Weight, start: int, stop: int) -> Floats:
    """Rows start..stop of a stored tensor as float32."""
    return weight.decoder(weight.data[start:stop])
