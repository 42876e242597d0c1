"""Answers in JSON, bounded so that they come to their end: a model left alone may write blanks, or digits, for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium import StructuredOutputs

_BLANKS = r"[ \n]?[ ]{0,8}"
_LARGEST = 2**53 - 1
"""Integers up to this are the same to every reader of JSON (RFC 7493, section 2.2)."""
_LITERAL = frozenset({"enum", "const", "default", "examples"})


def json_object() -> StructuredOutputs:
    """Any JSON object."""
    return StructuredOutputs(json_object=True, whitespace_pattern=_BLANKS)


def json_schema(schema: Mapping[str, Any] | bool) -> StructuredOutputs:
    """What satisfies a schema. Integers to which it sets no bound get one."""
    return StructuredOutputs(json=bounded(schema), whitespace_pattern=_BLANKS)


def bounded(schema: Any) -> Any:
    """The same schema, its integers bounded."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: part if key in _LITERAL else bounded(part) for key, part in schema.items()}
    kind = schema.get("type")
    if kind == "integer" or (isinstance(kind, list) and "integer" in kind):
        if not {"minimum", "exclusiveMinimum"} & found.keys():
            found["minimum"] = -_LARGEST
        if not {"maximum", "exclusiveMaximum"} & found.keys():
            found["maximum"] = _LARGEST
    return found
