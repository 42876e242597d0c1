"""Images in messages: what a client sent as text becomes bytes, which the model's own reader judges. No address is followed."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium_server.faults import bad

if TYPE_CHECKING:
    from trivium_server.models import Served

_KINDS = ("image", "image_url", "input_image")
MAX_IMAGES = 64
"""Of one prompt. Readers of models may take fewer."""


def pictured(served: Served, messages: Any) -> Any:
    """The messages with each image as {"type": "image", "image": bytes}. Refusal for an image that did not come as base64, for more
    images or pixels than a prompt can have, and for any image where the model takes none. What is no list of messages is left for
    others to judge."""
    if not isinstance(messages, Sequence) or not any(_has_image(message) for message in messages):
        return messages
    if not served.llm.takes_images:
        raise bad(f"{served.name} can't be shown images; it takes text only", "messages")
    found = [_message(message, f"messages[{i}]") if _has_image(message) else message for i, message in enumerate(messages)]
    _check_size(
        [part["image"] for message in found if _has_image(message) for part in message["content"] if _is_image(part)], served
    )
    return found


def _check_size(images: Sequence[bytes], served: Served) -> None:
    """Refusal for too many images, or pixels of all of them together, before any is unpacked."""
    if len(images) > MAX_IMAGES:
        raise bad(f"messages: {len(images)} images are more than the {MAX_IMAGES} that a prompt can have", "messages")
    pixels = sum(_pixels(images))
    if pixels > served.max_pixels:
        message = f"messages: the images have {pixels} pixels together, and those of a prompt can have {served.max_pixels} here"
        raise bad(f"{message}; make them smaller, or send fewer", "messages")


def _pixels(images: Iterable[bytes]) -> Iterable[int]:
    """Of each, as its first bytes say; of what is no image, which its reader refuses, none."""
    try:
        from PIL import Image
    except ImportError:  # then nothing is unpacked, either
        return
    for data in images:
        try:
            width, height = Image.open(io.BytesIO(data)).size
        except Exception:  # decoders of many formats raise many kinds for bad data; the reader says what is wrong with it
            continue
        yield width * height


def data_url(media_type: Any, data: Any) -> str:
    """An image that came as base64 without an address, as a data URL."""
    return f"data:{media_type};base64,{data}"


def _has_image(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(map(_is_image, content))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    return {**message, "content": [_part(part, f"{where}.content[{i}]") for i, part in enumerate(message["content"])]}


def _part(part: Any, where: str) -> Any:
    if not _is_image(part):
        return part
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    head, comma, text = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        form = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
        raise bad(f"{where} must be {form} with the image itself; this server fetches nothing and opens no path", "messages")
    try:
        return {"type": "image", "image": base64.b64decode(text, validate=True)}
    except (binascii.Error, ValueError):
        raise bad(f"{where} is no valid base64", "messages") from None
