"""What a body may hold: how deep it nests, how much text there is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from trivium_server.faults import bad

DEPTH = 100
"""Lists and objects inside one another. Whatever walks through a body takes a few frames a level, of the 1,000 there are."""

MAX_PIXELS = 64_000_000
"""Of all images of a prompt together, unless the operator decides otherwise."""


def check_depth(body: Any) -> None:
    """Raises Refusal for a decoded body that nests deeper than DEPTH."""
    for depth, _ in enumerate(_levels(body)):
        if depth > DEPTH:
            raise bad(f"the body nests deeper than {DEPTH} levels")


def characters(value: Any) -> int:
    """Of all texts in a decoded body or a part of it; names are not counted."""
    return sum(len(part) for parts in _levels(value) for part in parts if isinstance(part, str))


def _levels(value: Any) -> Iterator[list[Any]]:
    """The value, its parts, their parts, and so on; no recursion, so that any depth is walked."""
    level = [value]
    while level:
        yield level
        level = [part for one in level if isinstance(one, (list, dict, msgspec.Struct)) for part in _parts(one)]


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    return [*value.values()] if isinstance(value, dict) else msgspec.structs.astuple(value)
