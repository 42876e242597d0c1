"""Weights whose data is made when a backend asks for it, and not kept: between opening and loading, a model takes no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from trivium.ops import Weight

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
FLOATS = ("float16", "bfloat16", "float32")
Parts = Mapping[str, Any]
"""What numbers are stored as, for backends that keep it so: "codes", and "scales" as float32[out, ...].

Whole numbers of 4 bits (formats "awq", "gptq_4", "w4a16"): codes uint8[out, in] below 16, scales float32[out, groups], zeros
uint8[out, groups]; order int32[in] or None: input i of the codes is input order[i] of the matrix. weight = scale * (code - zero),
and groups of equal size follow one another.

Numbers of 8 bits: codes int8[out, in] (formats "w8a16", "w8a8") or uint8[out, in], the bits of float8_e4m3 (formats "fp8",
"w8a8_fp8"); scales float32[blocks down, blocks across]; block: the (rows, columns) that a scale is for: all, one row, or of floats
a rectangle. The names with a8 say that activations are meant to be rounded to 8 bits, too."""
_STEP = 1 << 20
"""Numbers that are decoded at a time: what a decoder needs beside its result stays small."""


class Lazy(Weight):
    """A weight whose data is made each time it is asked for; only if nobody knows its origin is it kept, since backends then tell
    weights apart by where they lie."""

    def __init__(
        self, name: str, shape: tuple[int, ...], format: str, make: Callable[[], Array],
        decoder: Callable[[Array], npt.NDArray[np.float32]], origin: str, nbytes: int,
    ) -> None:  # fmt: skip
        fields = {"name": name, "shape": shape, "format": format, "decoder": decoder, "origin": origin}
        for field, value in {**fields, "_make": make, "_nbytes": nbytes}.items():
            object.__setattr__(self, field, value)

    _make: Callable[[], Array]
    _nbytes: int
    _parts: Callable[[int, int], Parts] | None = None

    @property
    def in_parts(self) -> bool:
        """Whether there are parts(), without reading them."""
        return self._parts is not None

    def parts(self) -> Parts | None:
        """See Parts; None where the data is all there is. Several matrices in one weight are the first dimension of each."""
        return None if self._parts is None else self._parts(0, self.shape[0])

    def _slice_parts(self, start: int) -> Callable[[int, int], Parts] | None:
        parts = self._parts
        return None if parts is None else lambda first, last: parts(start + first, start + last)

    _kept: Array | None = None

    @property
    def data(self) -> Array:
        if self.origin:
            return self._make()
        if self._kept is None:
            object.__setattr__(self, "_kept", self._make())
        return cast(Array, self._kept)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def slice_rows(self, start: int, stop: int) -> Weight:
        origin = self.origin and f"{self.origin}[{start}:{stop}]"
        nbytes = self._nbytes * (stop - start) // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        piece = Lazy(self.name, shape, self.format, lambda: self.data[start:stop], self.decoder, origin, nbytes)
        vars(piece).update(_parts=self._slice_parts(start), inputs=self.inputs)
        return piece


class Decoded(Lazy):
    """A matrix that is stored as several tensors. `rows(start, stop)`: float32[stop - start, columns], which is what its `data` is;
    `stored`: the tensors, for origin and bytes; `how`: what beside them the numbers depend on; `parts`: Parts of rows
    start..stop."""

    def __init__(
        self, shape: tuple[int, int], format: str, rows: Callable[[int, int], Array], stored: tuple[Weight, ...], how: str,
        parts: Callable[[int, int], Parts] | None = None,
    ) -> None:  # fmt: skip
        origins = [w.origin for w in stored]
        origin = f"{how} of {' and '.join(origins)}" if all(origins) else ""
        super().__init__("", shape, format, self._all, _same, origin, sum(w.nbytes for w in stored))
        vars(self).update(_rows=rows, _parts=parts)

    _rows: Callable[[int, int], Array]

    def _all(self) -> Floats:
        return _in_steps(self._rows, self.shape)

    def slice_rows(self, start: int, stop: int) -> Weight:
        origin = self.origin and f"{self.origin}[{start}:{stop}]"
        shape, nbytes = (stop - start, *self.shape[1:]), self.nbytes * (stop - start) // self.shape[0]

        def make() -> Floats:
            return _in_steps(lambda first, last: self._rows(start + first, start + last), shape)

        piece = Lazy(self.name, shape, self.format, make, self.decoder, origin, nbytes)
        vars(piece).update(_parts=self._slice_parts(start), inputs=self.inputs)
        return piece


def _in_steps(rows: Callable[[int, int], Array], shape: tuple[int, ...]) -> Floats:
    step = max(_STEP // max(math.prod(shape[1:]), 1), 1)
    data = np.empty(shape, np.float32)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        data[start:stop] = rows(start, stop)
    return data


def _same(data: Array) -> Floats:
    return data
