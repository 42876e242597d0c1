"""One layer's projections: factors on inputs, what becomes 0, steps, codes, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import UnsupportedError
from trivium.models import arrange
from trivium.ops import Constant, Value, Weight

from trivium_compress.awq import factors, output_error
from trivium_compress.floats import FLOATS, bits, check_finite, is_finite, rounded
from trivium_compress.gptq import Order, gptq, ordered
from trivium_compress.grids import Grid, Steps, Symmetric, ZeroPoint, meant, nearest
from trivium_compress.prune import Sparsity, kept
from trivium_compress.recipe import Recipe, block_kind, packed_grid
from trivium_compress.source import Source, float_kind
from trivium_compress.stored import BLOCKS, Stored, block_tensor, packed_tensors
from trivium_compress.structure import Projection, Scaling
from trivium_compress.walk import Inputs

Array = npt.NDArray[Any]
ROWS = 4096
"""Rows of a table that are rounded at a time."""


@dataclass(frozen=True)
class Target:
    """How one matrix is rounded. kind: a GGML block type, or None: packed words of `width` bits. grid None: it is only pruned."""

    name: str
    grid: Grid | None
    kind: str | None = None
    width: int = 0

    def tensors(self, codes: Array, steps: Steps) -> dict[str, Stored]:
        """By the part of the name after the module's."""
        if self.kind is not None:
            return {"weight": block_tensor(codes, steps, self.kind)}
        assert isinstance(self.grid, Symmetric | ZeroPoint)
        return packed_tensors(codes, steps, self.grid, self.width)


def target(source: Source, name: str, format: str, recipe: Recipe, group: int) -> Target | None:
    """How a matrix is rounded to a format; None: it can't be (rows that are no whole blocks), or needn't."""
    if format == "none":
        return Target(name, None) if recipe.prune else None
    columns = source.checkpoint.tensor(name).shape[1]
    if source.gguf is not None:
        kind = block_kind(format, columns)
        return None if kind is None else Target(name, BLOCKS[kind].grid, kind)
    grid, width = packed_grid(format, recipe, group, source.dtype)
    return None if columns % grid.size(columns) else Target(name, grid, None, width)


@dataclass
class Layer:
    """A layer at work. targets: what is rounded or pruned, by canonical name; inputs: what is known of what they read. numbers:
    what has changed, float32, by canonical name; tensors: what is to be written, by canonical name with its last part."""

    source: Source
    recipe: Recipe
    targets: Mapping[str, Target]
    projections: Mapping[str, Projection]
    inputs: dict[Value, Inputs]
    numbers: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _last: tuple[Inputs, Order] | None = None

    def weight(self, name: str) -> Array:
        """The numbers as they are now. CheckpointError if they are none."""
        if name not in self.numbers:
            self.numbers[name] = np.array(self.source.checkpoint.tensor(name).decode())
            check_finite(name, self.numbers[name])
        return self.numbers[name]

    def load(self, constant: Constant) -> Any:
        """As Source.load, with what has changed."""
        numbers = self.numbers.get(constant.source)
        if constant.source in self.source.made and self.numbers:
            return self._rearranged(constant)
        if numbers is None or constant.source in self.source.made:
            return self.source.load(constant)
        return numbers if constant.rows is None else numbers[slice(*constant.rows)]

    def _rearranged(self, constant: Constant) -> Any:
        """What the family cuts otherwise than the file: made again, with what has changed."""
        checkpoint = self.source.checkpoint
        changed = {name: _as_weight(name, numbers) for name, numbers in self.numbers.items()}
        arranged = arrange(checkpoint.config, {**checkpoint.tensors, **changed})
        weight = arranged[constant.source]()
        return (weight if constant.rows is None else weight.slice_rows(*constant.rows)).decode()

    def scale(self, scaling: Scaling) -> None:
        """Finds the factors of projections that read one value, and applies them on both sides."""
        grid = self.targets[scaling.sources[0]].grid
        inputs = self.inputs[scaling.input]
        if grid is None:
            return
        factor = factors([self.weight(name) for name in scaling.sources], grid, inputs)
        if scaling.norm is not None:
            factor = self._into_norm(scaling.norm.source, scaling.offset, factor)
        if scaling.rows is not None:
            rows = slice(*scaling.rows.rows) if scaling.rows.rows else slice(None)
            self.weight(scaling.rows.source)[rows] /= factor[:, None]
        if scaling.bias is not None:
            self.weight(scaling.bias.source)[slice(*scaling.bias.rows) if scaling.bias.rows else slice(None)] /= factor
            self._write_floats(scaling.bias.source)
        for name in scaling.sources:
            self.weight(name)[...] *= factor
        self.inputs[scaling.input] = Inputs(
            inputs.moments / (np.outer(factor, factor) if inputs.moments.ndim == 2 else factor**2), inputs.size / factor,
            inputs.count,
        )  # fmt: skip

    def _into_norm(self, name: str, offset: float, factor: Array) -> Array:
        """Divides what the norm multiplies with, as far as its float type can say it; the factors that this makes."""
        whole = self.weight(name) + np.float32(offset)
        kind = float_kind(self.source.checkpoint.tensor(name))
        new = rounded(whole / factor - np.float32(offset), kind)
        divided = new + np.float32(offset)
        usable = (whole != 0) & (divided != 0)
        self.numbers[name] = np.where(usable, new, self.weight(name))
        self._write_floats(name)
        return np.where(usable, whole / np.where(usable, divided, 1), 1).astype(np.float32)

    def _write_floats(self, name: str) -> None:
        stored = self.source.checkpoint.tensor(name)
        kind = float_kind(stored)
        self.tensors[name] = Stored(bits(self.numbers[name], kind), self._kind(kind))

    def _kind(self, format: str) -> str:
        return format if self.source.gguf is not None else FLOATS[format]

    def round(self, name: str) -> None:
        """Rounds, prunes or both; keeps what a reader will see, and what is written."""
        wanted, w = self.targets[name], self.weight(name)
        known = self.projections.get(name)
        inputs = self.inputs.get(known.input) if known is not None else None
        mask = self._mask(w, inputs)
        if wanted.grid is None:
            numbers = self._pruned(w, mask, inputs)
            kind = self.source.checkpoint.tensor(name).format
            self.tensors[name] = Stored(bits(numbers, kind), self._kind(kind))
            self._finish(name, w, rounded(numbers, kind), inputs)
            return
        codes, steps = self._codes(w, mask, wanted.grid, inputs)
        stem = name.removesuffix("weight")
        self.tensors |= {stem + part: stored for part, stored in wanted.tensors(codes, steps).items()}
        self._finish(name, w, meant(wanted.grid, codes, steps), inputs)

    def _mask(self, w: Array, inputs: Inputs | None) -> Array | None:
        if self.recipe.prune is None or self.recipe.sparsity is None:
            return None
        squares = inputs.squares if inputs is not None and self.recipe.prune == "wanda" else None
        return kept(w, Sparsity.parse(self.recipe.sparsity), squares)

    def _by_hessian(self, inputs: Inputs | None) -> bool:
        return inputs is not None and inputs.moments.ndim == 2 and self.recipe.method in (None, "gptq", "awq+gptq")

    def _order(self, inputs: Inputs) -> Order:
        """Projections that read one value, and come one after another, share it."""
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, ordered(inputs.moments)
        return self._last[1]

    def _pruned(self, w: Array, mask: Array | None, inputs: Inputs | None) -> Array:
        assert mask is not None
        if inputs is not None and self._by_hessian(inputs):
            return gptq(w, self._order(inputs), None, None, mask=mask)[1]
        return np.where(mask, w, np.float32(0))

    def _codes(self, w: Array, mask: Array | None, grid: Grid, inputs: Inputs | None) -> tuple[Array, Steps]:
        importance = None if inputs is None else (inputs.squares / max(inputs.count, 1)).astype(np.float32)
        seen = w if mask is None else np.where(mask, w, np.float32(0))
        steps = grid.fit(seen, importance)
        if inputs is not None and self._by_hessian(inputs):
            codes, _ = gptq(w, self._order(inputs), grid, steps, mask=mask)
            return (codes if mask is None else np.where(mask, codes, nearest(grid, np.zeros_like(w), steps))), steps
        return nearest(grid, seen, steps), steps

    def forget_inputs(self) -> None:
        """Once all is rounded, nobody asks for them."""
        self.inputs.clear()
        self._last = None

    def _finish(self, name: str, w: Array, numbers: Array, inputs: Inputs | None) -> None:
        """Notes the error, of the outputs where inputs are known, else of the weights, relative to the whole; and the zeros."""
        stored = self.targets[name].kind or (f"int{self.targets[name].width}" if self.targets[name].width else "float")
        if not is_finite(numbers):
            raise UnsupportedError(f"{name} has values too large for the scales of {stored}; keep it as it is", param="keep")
        moments = np.ones(w.shape[1], np.float32) if inputs is None else inputs.moments.astype(np.float32)
        whole = output_error(w, moments)
        error = output_error(numbers - w, moments) / whole if whole > 0 else 0.0
        self.facts[name] = {"format": stored, "error": error**0.5, "zeros": int((numbers == 0).sum()), "numbers": w.size}
        self.numbers[name] = numbers


def _as_weight(name: str, numbers: Array) -> Callable[[], Weight]:
    return lambda: Weight(name, numbers.shape, "float32", numbers, lambda data: data)


def round_table(weight: Weight, wanted: Target) -> dict[str, Stored]:
    """A table that is too large to be decoded at once, rounded to nearest by blocks of rows."""
    assert wanted.grid is not None
    pieces: list[dict[str, Stored]] = []
    for start in range(0, weight.shape[0], ROWS):
        w = weight.slice_rows(start, min(start + ROWS, weight.shape[0])).decode()
        check_finite(weight.name, w)
        steps = wanted.grid.fit(w)
        pieces.append(wanted.tensors(nearest(wanted.grid, w, steps), steps))
    joined = {
        part: Stored(np.concatenate([piece[part].array for piece in pieces]), stored.kind) for part, stored in pieces[0].items()
    }
    if "weight_shape" in joined:
        joined["weight_shape"] = Stored(np.array(weight.shape, np.int64), "I64")
    return joined


def check_zeros(recipe: Recipe, targets: Mapping[str, Target]) -> None:
    """UnsupportedError where what is pruned would not stay 0."""
    if recipe.prune is None:
        return
    blurred = sorted({t.kind or "" for t in targets.values() if t.grid is not None and not t.grid.holds_zero})
    if blurred:
        raise UnsupportedError(
            f"zeros don't stay zeros in {' and '.join(blurred)}, whose blocks have an offset; prune with q4_0 or q8_0",
            param="prune",
        )  # fmt: skip
