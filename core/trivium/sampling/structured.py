"""StructuredOutputs: what a request's text must look like, checked as far as that needs no tokenizer. Names are vLLM's."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from trivium.errors import InvalidRequestError

MAX_LENGTH = 2**17
"""Characters of a schema, grammar, regular expression or of all choices together."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _refuse(want: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {want}, not {value!r:.80}", param="structured_outputs")


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these is given; every field is checked on construction (InvalidRequestError).

    json: the text is JSON that satisfies this schema (a mapping, its JSON text, True for any JSON, or an object with
    model_json_schema(), such as a pydantic model). json_object: any JSON object. regex: the whole text matches, in the syntax of
    the Rust crate regex with \\d as 0-9. choice: the text is one of these strings. grammar: the text is in this language, written
    in Lark's notation (as llguidance reads it) or as GBNF.
    disable_any_whitespace: JSON has no blanks; whitespace_pattern: a regular expression for those it may have.
    """

    json: str | bool | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        values = [(name, getattr(self, name)) for name in _KINDS]
        given = [name for name, value in values if value is not None and (value is not False or name == "json")]
        if len(given) != 1:
            raise _refuse(f"give exactly one of {', '.join(_KINDS)}", " and ".join(given) or "none")
        for name, kind in (("json_object", bool), ("regex", str), ("grammar", str), ("whitespace_pattern", str)):
            if not isinstance(getattr(self, name), kind | None):
                raise _refuse(f"{name} must be of type {kind.__name__}", getattr(self, name))
        if not isinstance(self.disable_any_whitespace, bool):
            raise _refuse("disable_any_whitespace must be True or False", self.disable_any_whitespace)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _dumped(_schema(self.json)))
        text = self.spec[1]
        if not text or len(text) > MAX_LENGTH:
            raise _refuse(f"the text must have 1 to {MAX_LENGTH} characters", f"{len(text)}")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _refuse("the text must be valid Unicode", ascii(text))

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """As it is, or made of a mapping of fields."""
        if isinstance(value, StructuredOutputs):
            return value
        names = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise _refuse(f"must be StructuredOutputs or a mapping with fields of {', '.join(names)}", value)
        return cls(**value)

    @cached_property
    def spec(self) -> tuple[str, str]:
        """(kind, text): kind json with a schema, choice with a JSON list, regex or grammar with their own text."""
        if self.choice is not None:
            return "choice", _dumped(self.choice)
        if self.regex is not None or self.grammar is not None:
            return ("regex", self.regex) if self.regex is not None else ("grammar", self.grammar or "")
        schema = {"type": "object"} if self.json_object else _json.loads(str(self.json))
        blanks = {"whitespace_flexible": False} if self.disable_any_whitespace else {"whitespace_pattern": self.whitespace_pattern}
        if schema is not False and blanks != {"whitespace_pattern": None}:
            schema = {**({} if schema is True else schema), "x-guidance": blanks}
        return "json", _dumped(schema)


def _choices(value: Any) -> tuple[str, ...]:
    items = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    if not items or not all(isinstance(item, str) and item for item in items):
        raise _refuse("choice must be a list of one or more non-empty strings", value)
    return items


def _schema(value: Any) -> Any:
    describe = getattr(value, "model_json_schema", None)
    try:
        schema = _json.loads(value) if isinstance(value, str) else describe() if callable(describe) else value
    except (ValueError, RecursionError) as error:
        raise _refuse(f"json must be a JSON schema ({error})", value) from error
    if not isinstance(schema, Mapping | bool):
        raise _refuse("json must be a JSON schema: an object, True or False", value)
    return schema


def _dumped(value: Any) -> str:
    try:
        return _json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refuse(f"json must be a JSON schema ({error})", "this") from error
