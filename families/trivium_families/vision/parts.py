"""Images in chat messages: found, decoded within bounds, and left as {"type": "image"} for the chat template.

A part that came with a request can bring an image only as its own bytes: nothing in it is ever taken for an address or a path. A
caller in Python may also give a path or an image of Pillow, which no JSON text can be.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.ops import Span, Tile

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 24 << 20
"""Of one image as it is stored."""
MAX_PIXELS = 50_000_000
"""Of one image, whatever its file's size: a few kilobytes can say that they are a hundred megapixels."""
MAX_IMAGES = 64
"""In one prompt."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
KINDS = ("image", "image_url", "input_image")
_ORIENTATION = 0x0112
"""EXIF's tag; 1: as stored."""

T = TypeVar("T")


def take(messages: Sequence[Any], cut: Callable[[Image], T]) -> tuple[list[Any], list[T]]:
    """The messages with every image part as {"type": "image"}, and what `cut` makes of the images (RGB), in their order. One image
    at a time is in memory as a whole, for one of a few kilobytes may unpack to 150 MB. What is no image part is left for others to
    judge. InvalidRequestError for an image that can't be read or is too large, UnsupportedError without Pillow."""
    images: list[T] = []
    return [_message(message, f"messages[{i}]", images, cut) for i, message in enumerate(messages)], images


def _message(message: Any, where: str, images: list[T], cut: Callable[[Image], T]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(_is_image(part) for part in content):
        return message
    return {**message, "content": [_part(part, f"{where}.content[{i}]", images, cut) for i, part in enumerate(content)]}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _part(part: Any, where: str, images: list[T], cut: Callable[[Image], T]) -> Any:
    if not _is_image(part):
        return part
    if len(images) == MAX_IMAGES:
        raise _bad(f"{where}: a prompt can have {MAX_IMAGES} images at most")
    images.append(cut(_image(part, where)))
    return {"type": "image"}


def _image(part: Mapping[str, Any], where: str) -> Image:
    if part["type"] == "image":
        return read(part.get("image"), f"{where}.image")
    url = part.get("image_url")
    return read(data_url(url.get("url") if isinstance(url, Mapping) else url, f"{where}.image_url"), f"{where}.image_url")


def spans(ids: Sequence[int], placeholder: int, tiles: Sequence[Tile], each: int) -> list[Span]:
    """The runs of placeholders in a prompt, each within one tile of `each` tokens. InvalidRequestError unless there are as many as
    the tiles have tokens."""
    found: list[Span] = []
    places = [i for i, token in enumerate(ids) if token == placeholder] if tiles else []
    if len(places) != len(tiles) * each:
        raise _bad(f"the chat has {len(places)} placeholders for {len(tiles)} tiles of {each} tokens; do texts contain some?")
    for number, at in enumerate(places):
        row = number % each
        if row and found[-1].stop == at:
            found[-1] = found[-1]._replace(stop=at + 1)
        else:
            found.append(Span(at, at + 1, tiles[number // each], row))
    return found


def data_url(url: Any, where: str) -> bytes:
    """The bytes that a data URL (RFC 2397) in base64 holds; InvalidRequestError for any other address: nothing is fetched."""
    head, comma, text = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise _bad(f"{where} must be data:image/...;base64,... with the image itself: nothing is fetched or read from a path")
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise _bad(f"{where} is larger than the {MAX_BYTES} bytes that an image can have")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(f"{where} is no valid base64") from None


def read(source: Any, where: str = "the image") -> Image:
    """An image of Pillow, the bytes of a file, or a path, as RGB and the right way up (EXIF); what is transparent lies on white."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        message = "this model's images are read by Pillow, which is not installed; install trivium[vision]"
        raise UnsupportedError(message, param="messages") from None
    data = None if isinstance(source, Image.Image) else _bytes(source, where)
    try:
        return _rgb(_upright(_small(source if data is None else Image.open(io.BytesIO(data), formats=FORMATS), where)))
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:  # its message shows an object of ours
        raise _bad(f"{where} is no image that is {', '.join(FORMATS)}") from None
    except Exception as e:  # decoders of many formats raise many kinds for bad data
        raise _bad(f"{where} can't be read: {e}") from None


def _bytes(source: Any, where: str) -> bytes:
    if isinstance(source, os.PathLike):
        path = Path(source)
        try:
            if not path.is_file():
                raise _bad(f"{where}: there is no file {path}")
            size = path.stat().st_size
            source = path.read_bytes() if size <= MAX_BYTES else bytes(0)
        except OSError as e:
            raise _bad(f"{where}: {path} can't be read: {e.strerror}") from None
    elif not isinstance(source, bytes | bytearray | memoryview):
        raise _bad(f"{where} must be the bytes of an image, a pathlib.Path or an image of Pillow, not {type(source).__name__}")
    else:
        size = len(source)
    if size > MAX_BYTES:
        raise _bad(f"{where} has {size} bytes; an image can have {MAX_BYTES}")
    return bytes(source)


def _small(image: Image, where: str) -> Image:
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise _bad(f"{where} has {width} x {height} pixels; an image can have {MAX_PIXELS}")
    return image


def _upright(image: Image) -> Image:
    """As a camera that was held so meant it."""
    from PIL import ImageOps

    return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would make everything white but the darkest of 256 shades
        return image.convert("I").point(lambda shade: shade / 256).convert("L").convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
