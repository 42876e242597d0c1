"""How each family writes tool calls and reasoning: what its published chat template or documentation says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trivium.errors import InvalidRequestError
from trivium.extensions import find, installed

ARGUMENTS = ("arguments", "parameters")
"""Keys under which a call in JSON holds its arguments."""
MAX_NAME = 128
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""
Convert = Callable[[str, Schemas], Iterable[tuple[str, dict[str, Any]]]]
"""The body of one or more calls to names and arguments; raises ValueError, SyntaxError and their kin for what is none."""


def is_name(name: object) -> bool:
    """Whether a tool may be called so: 1 to MAX_NAME letters, digits and characters of "_.:/-"."""
    return isinstance(name, str) and len(name) <= MAX_NAME and re.fullmatch(r"[\w.:/-]+", name) is not None


class CallForm(NamedTuple):
    """One way to write calls. open: the marker before them; bare: there is none, a call begins with `open` itself, at the start of
    an answer. Then JSON objects with name and arguments, in a list or not; or, with `head` (a pattern whose group 1 is the name),
    a name and bare arguments in JSON; or, with `convert`, something else, which begins with `begin` and ends at closes[0] (bare: at
    its closing bracket). closes: markers that may follow, in this order."""

    open: str
    closes: tuple[str, ...] = ()
    head: str = ""
    convert: Convert | None = None
    begin: str = ""
    bare: bool = False


class ToolSyntax(NamedTuple):
    """A family's calls. signs: what in a chat template or architecture's name shows the family. drops: markers without meaning for
    the reader. tokens: further special tokens that `head` and `convert` must see."""

    signs: tuple[str, ...]
    forms: tuple[CallForm, ...]
    drops: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def markers(self) -> list[str]:
        """All texts whose special tokens must not be hidden from the parser."""
        return [*self.drops, *self.tokens, *(text for form in self.forms for text in (form.open, *form.closes))]


class ReasoningSyntax(NamedTuple):
    """A family's reasoning. anywhere: it may begin again behind content."""

    signs: tuple[str, ...]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    anywhere: bool = False
    drops: tuple[str, ...] = ()

    def markers(self) -> list[str]:
        """As ToolSyntax.markers."""
        return [*self.opens, *self.closes, *self.drops]

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends with an opening marker, so that the answer begins inside reasoning."""
        return prompt.rstrip().endswith(tuple(open_.rstrip() for open_ in self.opens))


def _pythonic(body: str, schemas: Schemas) -> Iterator[tuple[str, dict[str, Any]]]:
    """Python calls with keyword arguments and literal values, in a list or one a line; true, false and null count as literals."""
    for statement in ast.parse(body.strip()).body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        for call in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                raise ValueError("not a call with keyword arguments")
            yield ast.unparse(call.func), {str(w.arg): ast.literal_eval(_Literals().visit(w.value)) for w in call.keywords}


class _Literals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _tagged(
    body: str, schemas: Schemas, *, opens: str = "<parameter=", middle: str = ">", closes: str = "</parameter>"
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """A name and tagged values: <function=NAME><parameter=KEY>VALUE</parameter>…</function> (Qwen3-Coder), or with other tags.
    `middle` is a pattern. The line breaks on either side of a value are not part of it."""
    head, *parts = body.strip().removesuffix("</function>").split(opens)
    name, arguments = head.strip().removeprefix("<function=").removesuffix(">").strip(), {}
    for part in parts:
        key, text = re.split(middle, part, maxsplit=1)
        value, found, _ = text.rpartition(closes)
        if not found:
            raise ValueError(f"{closes} is missing")
        arguments[key.strip()] = _typed(value.removeprefix("\n").removesuffix("\n"), schemas, name, key.strip())
    yield name, arguments


_keyed = partial(_tagged, opens="<arg_key>", middle=r"</arg_key>\s*<arg_value>", closes="</arg_value>")


def _typed(value: str, schemas: Schemas, name: str, key: str) -> Any:
    """A value as its schema's type wants it; text where that may be a string, is not known, or does not fit."""
    schema = schemas.get(name, {}).get("properties", {}).get(key)
    types = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if "string" in types:
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value


def _quoted(body: str, schemas: Schemas, *, quote: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """call:NAME{KEY:VALUE,…}: JSON with bare keys, whose strings stand between two `quote` tokens (FunctionGemma, Gemma 4)."""
    name, brace, rest = body.removeprefix("call:").partition("{")
    parts = (brace + rest).split(quote)
    plain = [re.sub(r"([{,]\s*)([^\s{},:\"]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    texts = [*map(json.dumps, parts[1::2]), ""]
    yield name.strip(), json.loads("".join(part for pair in zip(plain, texts, strict=True) for part in pair))


def _between(opens: str, closes: str, quote: str) -> ToolSyntax:
    form = CallForm(opens, (closes,), convert=partial(_quoted, quote=quote), begin="call:")
    return ToolSyntax((opens,), (form,), tokens=(quote,))


_HARMONY = ("<|channel|>", "<|start|>assistant<|channel|>")
_HARMONY_DROPS = (*(f"{a}{b}<|message|>" for a in _HARMONY for b in ("final", "commentary")), "<|end|>", "<|return|>")
_MISTRAL_HEAD = r"\s*([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"
_DEEPSEEK_HEAD = r"(?:function<｜tool▁sep｜>)?\s*([\w.:/-]+)\s*(?:<｜tool▁sep｜>|```json)?\s*"
_JSON = CallForm("{", bare=True)
_LIST = CallForm("[", convert=_pythonic, bare=True)
TOOLS: Mapping[str, ToolSyntax] = {
    "harmony": ToolSyntax(
        ("<|channel|>", "GptOss"),
        tuple(
            CallForm(f"{start} to=functions.", ("<|call|>", "<|end|>"), r"([^\s<]+)[^{]*<\|message\|>\s*")
            for start in (*(f"{prefix}commentary" for prefix in _HARMONY), "<|start|>assistant")
        ),
        _HARMONY_DROPS, ("<|constrain|>", "<|message|>"),
    ),
    "qwen3_coder": ToolSyntax(("<function=",), (CallForm("<tool_call>", ("</tool_call>",), convert=_tagged, begin="<function="),)),
    "glm": ToolSyntax(("<arg_key>",), (CallForm("<tool_call>", ("</tool_call>",), convert=_keyed),), tokens=("<arg_key>",)),
    "hermes": ToolSyntax(("<tool_call>",), (CallForm("<tool_call>", ("</tool_call>",)),)),
    "mistral": ToolSyntax(("[TOOL_CALLS]",), (CallForm("[TOOL_CALLS]", head=_MISTRAL_HEAD),), tokens=("[CALL_ID]", "[ARGS]")),
    "deepseek": ToolSyntax(
        ("<｜tool▁call▁begin｜>",), (CallForm("<｜tool▁call▁begin｜>", ("```", "<｜tool▁call▁end｜>"), _DEEPSEEK_HEAD),),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁sep｜>",),
    ),
    "functiongemma": _between("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _between("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": ToolSyntax(("<|tool_call|>", "<|tool|>"), (CallForm("<|tool_call|>", ("<|/tool_call|>",)),)),
    "pythonic": ToolSyntax(("<|python_start|>",), (CallForm("<|python_start|>", ("<|python_end|>",), convert=_pythonic), _LIST)),
    "llama3": ToolSyntax(("<|python_tag|>",), (CallForm("<|python_tag|>"), _JSON)),
    "gemma": ToolSyntax(("Gemma2For", "Gemma3For"), (CallForm("```tool_code", ("```",), convert=_pythonic), _LIST, _JSON)),
    "json": ToolSyntax((), (_JSON, CallForm("[", bare=True))),
}  # fmt: skip
"""By name, the surest sign first. "json": calls as bare JSON, for models whose template says nothing of calls."""
_THINK = ReasoningSyntax(("<think>",), ("<think>",), ("</think>",))
REASONING: Mapping[str, ReasoningSyntax] = {
    "harmony": ReasoningSyntax(
        ("<|channel|>", "GptOss"), tuple(f"{prefix}analysis<|message|>" for prefix in _HARMONY), ("<|end|>",), True, _HARMONY_DROPS,
    ),
    "granite": ReasoningSyntax(
        ("Here is my thought process", "<response>"), ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"), drops=("<response>", "</response>"),
    ),
    "gemma4": ReasoningSyntax(("<|channel>",), ("<|channel>thought",), ("<channel|>",), True),
    "mistral": ReasoningSyntax(("[THINK]",), ("[THINK]",), ("[/THINK]",)),
    "seed_oss": ReasoningSyntax(("<seed:think>",), ("<seed:think>",), ("</seed:think>",)),
    "think": _THINK,
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
}  # fmt: skip
"""By name, the surest sign first."""
_Syntax = TypeVar("_Syntax", ToolSyntax, ReasoningSyntax)


def recognized(table: Mapping[str, _Syntax], name: str | None, source: str) -> str | None:
    """`name`; for "auto" that of the table's first syntax which shows a sign in `source`."""
    return name if name != "auto" else next((n for n, s in table.items() if any(sign in source for sign in s.signs)), None)


def choose(table: Mapping[str, _Syntax], name: str | None, source: str, param: str) -> _Syntax | None:
    """The syntax of that name, the table's or a plugin's; for "auto" the table's first that shows a sign in `source` (chat template
    and architecture); None for None. InvalidRequestError, with the known names, for another name. `param`: "tool_parser" or
    "reasoning_parser"."""
    name = recognized(table, name, source)
    if name is None or name in table:
        return table[name] if name else None
    syntax: _Syntax | None = find(param, name, type(next(iter(table.values()))))[0]
    if syntax is None:
        known = ", ".join([*table, *installed(param)])
        raise InvalidRequestError(f"{param} {name!r} is not known; possible are auto, None, {known}", param=param)
    return syntax
