"""Weight: one checkpoint tensor on its way to a backend, in its storage format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Weight:
    """A tensor as a checkpoint stores it.

    shape: logical, e.g. (out, in). format: "float32", "float16", "bfloat16" or a block format's name in lower case
    ("q4_1", "q6_k", ...). data: for the float formats an array of `shape` (bfloat16 as uint16 bit patterns); for block formats
    uint8[rows, bytes per row]. It may be a memory map: don't write to it. `decoder(data)` gives float32[shape], exactly.
    origin: where the data comes from, equal only for equal data; "" where nobody knows.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: npt.NDArray[Any]
    decoder: Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
    origin: str = ""

    def decode(self) -> npt.NDArray[np.float32]:
        """The exact numbers, float32[shape]."""
        return self.decoder(self.data).reshape(self.shape)

    def slice_rows(self, start: int, stop: int) -> Weight:
        """Rows start..stop of the first dimension, without a copy."""
        origin = self.origin and f"{self.origin}[{start}:{stop}]"
        return replace(self, shape=(stop - start, *self.shape[1:]), data=self.data[start:stop], origin=origin)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)
