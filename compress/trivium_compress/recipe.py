"""What is to be done to a model's weights: formats, methods, and what they can't be combined with."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trivium.errors import InvalidRequestError

from trivium_compress.grids import Grid, Symmetric, ZeroPoint
from trivium_compress.prune import Sparsity
from trivium_compress.stored import BLOCKS

METHODS = ("rtn", "awq", "gptq", "awq+gptq")
"""How codes are chosen: rounded to the nearest with the scales of least error; after factors on the inputs; with errors made good
by the columns after; both of the latter."""
FORMATS = ("int8", "int4", *BLOCKS, "none")
"""int8, int4: of compressed-tensors in a folder, of GGML in a .gguf file; the names of blocks: in a .gguf file only."""
PRUNINGS = ("magnitude", "wanda")
SMALLEST_GROUP, LARGEST_GROUP = 16, 128


@dataclass(frozen=True)
class Recipe:
    """format: of the projections within layers. embedding: of the embedding's table and the output projection, rounded to nearest.
    method: None means gptq where the inputs are known, else rtn. group_size: inputs that share a scale (int4: the largest power of
    two up to 128 that divides all; int8: all of a row). symmetric: int4 without zero points. prune, sparsity: what becomes 0.
    modules: (regular expression, format) of projections that get another format, the first that matches counts. keep:
    regular expressions of modules that stay as they are."""

    format: str = "int4"
    embedding: str = "none"
    method: str | None = None
    group_size: int | None = None
    symmetric: bool = False
    prune: str | None = None
    sparsity: str | None = None
    keep: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _one_of("format", self.format, FORMATS)
        _one_of("embedding", self.embedding, FORMATS)
        _one_of("method", self.method, (None, *METHODS))
        _one_of("prune", self.prune, (None, *PRUNINGS))
        size = self.group_size
        if size is not None and not (type(size) is int and size >= SMALLEST_GROUP and size % 8 == 0):
            raise InvalidRequestError(
                f"group_size must be a multiple of 8 from {SMALLEST_GROUP}, not {size!r}", param="group_size"
            )  # fmt: skip
        if (self.prune is None) != (self.sparsity is None):
            raise InvalidRequestError("prune and sparsity go together: say both, or neither", param="sparsity")
        if self.sparsity is not None:
            Sparsity.parse(self.sparsity)
        for _, format in self.modules:
            _one_of("modules", format, FORMATS)
        for name, pattern in (*(("keep", p) for p in self.keep), *(("modules", p) for p, _ in self.modules)):
            try:
                re.compile(pattern)
            except re.error as e:
                raise InvalidRequestError(f"{name}: {pattern!r} is no regular expression: {e}", param=name) from None

    def check_work(self) -> None:
        """InvalidRequestError if nothing changes, unless a folder becomes a file or a file a folder."""
        if self.formats == {"none"} and self.prune is None and self.embedding == "none":
            raise InvalidRequestError("there is nothing to do: give a format, or what to prune", param="format")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def format_of(self, module: str) -> str:
        """That of a projection, by its name."""
        return next((format for pattern, format in self.modules if re.search(pattern, module)), self.format)

    @property
    def formats(self) -> set[str]:
        """All that projections may get."""
        return {self.format, *(format for _, format in self.modules)}

    def needs_inputs(self) -> bool:
        """Whether nothing can be done without a text."""
        return self.method in ("awq", "gptq", "awq+gptq") or self.prune == "wanda"

    def kept(self, module: str) -> bool:
        return any(re.search(pattern, module) for pattern in self.keep)

    def group_for(self, widths: set[int]) -> int:
        """Inputs that share a scale in int4, given how many inputs the projections have."""
        common = math.gcd(*widths) if widths else LARGEST_GROUP
        if self.group_size is not None:
            if common % self.group_size:
                raise InvalidRequestError(
                    f"group_size {self.group_size} does not divide the inputs of all projections ({sorted(widths)}); "
                    f"{common & -common} does", param="group_size",
                )  # fmt: skip
            return self.group_size
        largest = min(common & -common, LARGEST_GROUP)
        if largest < SMALLEST_GROUP:
            message = f"no group of {SMALLEST_GROUP} or more divides the inputs of all projections ({sorted(widths)}); use int8"
            raise InvalidRequestError(message, param="group_size")
        return largest


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(str(k) for k in known if k is not None)
        raise InvalidRequestError(f"{name} {value!r} is not one of {names}", param=name)


def packed_grid(format: str, recipe: Recipe, group: int, dtype: str) -> tuple[Grid, int]:
    """(grid, bits of a code) of int8 or int4 in compressed-tensors, whose scales are of `dtype`."""
    if format == "int8":
        return Symmetric(recipe.group_size or 0, -127, 127, shrinks=6, least=0.97, dtype=dtype), 8
    return (Symmetric if recipe.symmetric else ZeroPoint)(group, -8, 7, dtype=dtype), 4


def block_kind(format: str, columns: int) -> str | None:
    """The GGML block type for rows of `columns`; int4 means Q4_K, or Q4_1 where rows are not whole blocks of that, int8 Q8_0. None:
    rows can't be cut into blocks."""
    wanted = {"int8": ("q8_0",), "int4": ("q4_k", "q4_1"), "q4_k": ("q4_k", "q4_1")}.get(format, (format,))
    return next((kind for kind in wanted if columns % BLOCKS[kind].multiple == 0), None)


def weights_scheme(grid: Grid, width: int) -> Mapping[str, Any]:
    """A module's entry "weights" in config_groups."""
    return {
        "num_bits": width, "type": "int", "symmetric": isinstance(grid, Symmetric),
        "strategy": "group" if grid.group else "channel", "group_size": grid.group or None, "block_structure": None,
        "dynamic": False, "actorder": None, "observer": "mse", "observer_kwargs": {},
    }  # fmt: skip
