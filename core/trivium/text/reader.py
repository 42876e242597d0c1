"""What a chat request says of tools, checked; and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trivium.errors import InvalidRequestError
from trivium.text.parser import OutputParser
from trivium.text.syntaxes import MAX_NAME, REASONING, TOOLS, ReasoningSyntax, Schemas, ToolSyntax, choose, is_name, recognized

if TYPE_CHECKING:
    from trivium.text.tokenizer import Tokenizer

_TAIL = 32
"""Last tokens of a prompt in which a marker that opens reasoning is looked for."""


class ToolUse(NamedTuple):
    """Tools of a request. offered: what the chat template is given. schemas: their parameters by name. forced: the JSON schema of
    an answer that must be one call, {"name": …, "arguments": {…}}; None where the model may choose."""

    offered: list[Mapping[str, Any]] | None
    schemas: Schemas
    forced: dict[str, Any] | None

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None = None) -> ToolUse:
        """Checks tools ([{"type": "function", "function": {"name", "parameters", …}}]) and tool_choice: "auto" (also None), "none"
        (the model does not see the tools), "required" (some call), or {"type": "function", "function": {"name"}} (that call).
        Raises InvalidRequestError."""
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence | None):
            raise _bad(f"tools must be a list, not {type(tools).__name__}")
        schemas: dict[str, Mapping[str, Any]] = {}
        for i, tool in enumerate(tools or ()):
            name, schema = _check(tool, f"tools[{i}]")
            if name in schemas:
                raise _bad(f"tools[{i}].function.name {name!r} is taken by a tool before it; names must differ")
            schemas[name] = schema
        names = _chosen(choice, schemas)
        if choice == "none" or not schemas:
            return cls(None, {}, None)
        return cls(list(tools or ()), schemas, _call_schema({name: schemas[name] for name in names}) if names else None)


def _bad(message: str, param: str = "tools") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _check(tool: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise _bad(f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, not {tool!r:.80}')
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not is_name(name):
        raise _bad(f'{where}.function.name must be 1 to {MAX_NAME} letters, digits or any of "_.:/-", not {name!r:.80}')
    if not isinstance(schema, Mapping | None) or (schema and schema.get("type", "object") != "object"):
        raise _bad(f"{where}.function.parameters must be a JSON schema of an object, not {schema!r:.80}")
    properties = (schema or {}).get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(p, Mapping | bool) for p in properties.values()):
        raise _bad(f"{where}.function.parameters.properties must be a mapping of names to JSON schemas")
    return name, schema or {}


def _chosen(choice: Any, schemas: Schemas) -> list[str]:
    """The tools of which one must be called; none: the model is free."""
    if choice in (None, "none", "auto"):
        return []
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    names: list[Any] = list(schemas) if choice == "required" else [named.get("name")] if isinstance(named, Mapping) else []
    if not names or not all(isinstance(name, str) and name in schemas for name in names):
        forms = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        known = ", ".join(schemas) or "there are none"
        raise _bad(f"tool_choice must be {forms} with one of the tools ({known}), not {choice!r:.80}", "tool_choice")
    return names


def _call_schema(schemas: Schemas) -> dict[str, Any]:
    """Of {"name", "arguments"} for one of the tools."""
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        arguments = {"type": "object", **_moved(schema, f"#/anyOf/{i}/properties/arguments")}
        properties = {"name": {"const": name}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    return {"anyOf": calls}


def _moved(schema: Any, root: str) -> Any:
    """A schema that becomes part of another, at `root`: its references to itself follow."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        local = str(schema.get("$ref")).startswith("#")
        return moved | {"$ref": root + schema["$ref"][1:]} if local else moved
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


class Reader(NamedTuple):
    """How the answers of one chat are read. names: of the syntaxes. shown: special tokens that the text must show, as the parser
    needs them."""

    names: tuple[str | None, str | None]
    tools: ToolSyntax | None
    reasoning: ReasoningSyntax | None
    inside: bool
    schemas: Schemas
    shown: frozenset[int]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], use: ToolUse, source: str, tool_parser: str | None,
        reasoning: str | None,
    ) -> Reader:  # fmt: skip
        """For a prompt that the template in `source` made. Tool calls are looked for only where tools were offered; a forced call
        is read as bare JSON and has no reasoning before it. `tool_parser`, `reasoning`: as `syntaxes.choose`."""
        calls = "json" if use.forced else None
        if use.schemas and tool_parser and not calls:
            calls = recognized(TOOLS, tool_parser, source) or "json"
        thoughts = None if use.forced else recognized(REASONING, reasoning, source)
        tail = tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False)
        return cls._made(tokenizer, calls, thoughts, tail, use.schemas)

    @classmethod
    def _made(cls, tokenizer: Tokenizer, calls: str | None, thoughts: str | None, tail: str | bool, schemas: Schemas) -> Reader:
        """tail: the end of the prompt, or whether it opens reasoning."""
        tools, reasoning = choose(TOOLS, calls, "", "tool_parser"), choose(REASONING, thoughts, "", "reasoning_parser")
        markers = [*(tools.markers() if tools else ()), *(reasoning.markers() if reasoning else ())]
        inside = tail if isinstance(tail, bool) else reasoning is not None and reasoning.opened_by(tail)
        return cls((calls, thoughts), tools, reasoning, inside, schemas, tokenizer.special_ids_in(markers))

    def to_json(self) -> dict[str, Any]:
        """JSON data of which from_json() makes this reader."""
        return {"tools": self.names[0], "reasoning": self.names[1], "inside": self.inside, "schemas": self.schemas}

    @classmethod
    def from_json(cls, said: Mapping[str, Any], tokenizer: Tokenizer) -> Reader:
        """Raises InvalidRequestError, or what a stranger's data trips over."""
        tools = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in said["schemas"].items()]
        return cls._made(tokenizer, said["tools"], said["reasoning"], said["inside"] is True, ToolUse.of(tools).schemas)

    def parser(self) -> OutputParser:
        """A parser for one output."""
        return OutputParser(self.tools, self.reasoning, inside=self.inside, schemas=self.schemas)
