"""Images in messages: what a client sent as text becomes bytes, which the model's own reader judges. No address is followed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium_server.faults import bad

if TYPE_CHECKING:
    from trivium_server.models import Served

_KINDS = ("image", "image_url", "input_image")


def pictured(served: Served, messages: Any) -> Any:
    """The messages with each image as {"type": "image", "image": bytes}. Refusal for an image that did not come as base64, and for
    any where the model takes none. What is no list of messages is left for others to judge."""
    if not isinstance(messages, Sequence) or not any(_has_image(message) for message in messages):
        return messages
    if not served.llm.takes_images:
        raise bad(f"{served.name} can't be shown images; it takes text only", "messages")
    return [_message(message, f"messages[{i}]") if _has_image(message) else message for i, message in enumerate(messages)]


def data_url(media_type: Any, data: Any) -> str:
    """An image that came as base64 without an address, as a data URL."""
    return f"data:{media_type};base64,{data}"


def _has_image(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(isinstance(part, Mapping) and part.get("type") in _KINDS for part in content)


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    return {**message, "content": [_part(part, f"{where}.content[{i}]") for i, part in enumerate(message["content"])]}


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
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
