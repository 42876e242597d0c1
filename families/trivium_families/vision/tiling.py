"""Idefics 3's image processor: an image is enlarged to whole tiles of one size and cut into them, and shown once more as a whole.

Source: Laurençon et al. 2024, "Building and better understanding vision-language models"; keys as in their
preprocessor_config.json. Sizes are pixels, (width, height).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, InvalidRequestError, UnsupportedError
from trivium.models import count, flag, number, table

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

MAX_SIDE = 4096
"""No image is enlarged beyond."""
_LANCZOS = 1
_DEFAULTS = {
    "do_resize": True, "do_image_splitting": True, "do_rescale": True, "do_normalize": True, "resample": _LANCZOS,
    "rescale_factor": 1 / 255, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class Tiles(NamedTuple):
    """uint8[side, side, 3] each: rows * columns tiles line by line, then the whole; (0, 0): the whole alone."""

    rows: int
    columns: int
    pixels: tuple[U8, ...]


@dataclass(frozen=True)
class Tiling:
    """What the configuration says. side: of a tile. size: the longest side that an image is brought to, or its size; None: it
    stays. mean, deviation: float32[3]."""

    side: int
    size: int | Size | None
    splits: bool
    resample: int
    factor: float | None
    mean: F32
    deviation: F32

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Tiling:
        """CheckpointError names the key that makes no sense."""
        config = {**_DEFAULTS, **given}
        mean, deviation = (_three(config, key) for key in ("image_mean", "image_std"))
        plain = not flag(config, "do_normalize", True)
        return cls(
            side=count(table(config, "max_image_size"), "longest_edge", limit=MAX_SIDE),
            size=_size(table(config, "size")) if flag(config, "do_resize", True) else None,
            splits=flag(config, "do_image_splitting", True), resample=_filter(config["resample"]),
            factor=number(config, "rescale_factor") if flag(config, "do_rescale", True) else None,
            mean=np.zeros(3, np.float32) if plain else mean, deviation=np.ones(3, np.float32) if plain else deviation,
        )  # fmt: skip

    def cut(self, image: Image) -> Tiles:
        """The tiles of an RGB image; InvalidRequestError if they would be too many."""
        if self.size is not None:
            image = self._resized(image, longest(image.size, self.size) if isinstance(self.size, int) else self.size)
        if not self.splits:
            return Tiles(0, 0, (np.array(self._resized(image, (self.side, self.side))),))
        image = self._resized(image, whole_tiles(image.size, self.side))
        columns, rows = (n // self.side for n in image.size)
        if rows == columns == 1:
            return Tiles(0, 0, (np.array(image),))
        pixels = np.array(image).reshape(rows, self.side, columns, self.side, 3).swapaxes(1, 2).reshape(-1, self.side, self.side, 3)
        return Tiles(rows, columns, (*pixels, np.array(self._resized(image, (self.side, self.side)))))

    def values(self, pixels: U8) -> F32:
        """pixels[..., 3] as the tower takes them."""
        scaled = pixels.astype(np.float32) if self.factor is None else (pixels.astype(np.float64) * self.factor).astype(np.float32)
        values: F32 = (scaled - self.mean) / self.deviation
        return values

    def _resized(self, image: Image, size: Size) -> Image:
        if size[0] * size[1] > (2 * MAX_SIDE) ** 2:  # a line of pixels fills tiles that are mostly empty
            message = f"an image of {image.size[0]} x {image.size[1]} pixels would be enlarged to {size[0]} x {size[1]}; crop it"
            raise InvalidRequestError(message, param="messages")
        return image.resize(size, resample=self.resample)


def longest(size: Size, side: int) -> Size:
    """The size whose longer side is `side`, or MAX_SIDE if that is shorter; the other one follows, made even."""
    width, height = size
    wide = width >= height
    ratio = width / height
    short = int(side / ratio) if wide else int(side * ratio)
    short = max(short + short % 2, 1)
    if side > MAX_SIDE:
        ratio = side / short if wide else short / side
        side, short = MAX_SIDE, max(int(MAX_SIDE / ratio) if wide else int(MAX_SIDE * ratio), 1)
    return (side, short) if wide else (short, side)


def whole_tiles(size: Size, side: int) -> Size:
    """The next larger size that tiles of `side` fill: first the longer side, then what the shorter one becomes by that."""
    width, height = size
    ratio = width / height

    def whole(n: int) -> int:
        return math.ceil(n / side) * side

    if width >= height:
        width = whole(width)
        return width, whole(int(width / ratio))
    height = whole(height)
    return whole(int(height * ratio)), height


def _size(size: Mapping[str, Any]) -> int | Size:
    if size.get("longest_edge") is not None:
        return count(size, "longest_edge")
    return count(size, "width", limit=MAX_SIDE), count(size, "height", limit=MAX_SIDE)


def _filter(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 5:
        raise UnsupportedError(f"the image processor's 'resample' {value!r} is no filter of Pillow (0 to 5)", param="resample")
    return value


def _three(config: Mapping[str, Any], key: str) -> F32:
    values = config[key]
    found = [values] * 3 if isinstance(values, int | float) else values
    if not isinstance(found, list) or len(found) != 3 or not all(isinstance(v, int | float) and np.isfinite(v) for v in found):
        raise CheckpointError(f"the image processor's {key!r} must be three numbers, not {values!r}", param=key)
    return np.array(found, np.float32)
