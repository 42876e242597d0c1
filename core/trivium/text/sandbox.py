"""Chat templates are programs from strangers: a Jinja environment that bounds what they read, make and spend."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

MAX_TEMPLATE = 1_000_000  # characters of source
MAX_TEXT = 16_000_000  # characters of any text that is made, and elements of any list
MAX_STEPS = 2_000_000  # of one rendering: loop turns and operators one each, calls ten
MAX_SECONDS = 10.0
_MAX_WIDTH = 10_000  # for arguments that pad or repeat
_PADDING = frozenset({"center", "indent", "ljust", "rjust", "zfill", "expandtabs", "wordwrap", "batch", "slice", "truncate"})
_PRINTING = frozenset({"string", "join", "pprint", "urlencode", "urlize", "xmlattr", "format", "format_map", "replace", "escape"})
_WIDE_FORMAT = re.compile(r"\d{5,}|%[-+ #0-9.]*\*|\{[^{}]*\{")  # a wide field, or a width taken from the arguments
_TEXT = (str, bytes)


class _Budget(Context):
    """What one rendering has spent; Jinja makes one context a rendering, and derives macros' scopes inside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps or {MAX_SECONDS:.0f} seconds")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what training learns from; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (trim_blocks, lstrip_blocks, break and continue, unescaped `tojson`), within bounds.

    A bound that is passed raises jinja2's SecurityError, from the rendering or already from the compilation.
    """

    context_class = _Budget
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_printable)
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"bounded_loop": _bounded_loop, "bounded_text": _concatenate}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's parser, then every loop and every `~` goes through a filter that bounds it; no private name is stored."""
        tree = super()._parse(source, name, filename)
        stored = [*(ref.attr for ref in tree.find_all(nodes.NSRef)), *(word.key for word in tree.find_all(nodes.Keyword))]
        if private := [key for key in stored if key.startswith("_")]:
            raise SecurityError(f"a template may not store the attribute {private[0]!r}")
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
        for text in tree.find_all(nodes.Concat):
            parts = nodes.List(text.nodes, lineno=text.lineno)
            text.nodes = [nodes.Filter(parts, "bounded_text", [], [], None, None, lineno=text.lineno)]
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from the template: costs a step; what may make a large text is checked first, its result always."""
        assert isinstance(__context, _Budget)
        __context.spend(10)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps str.format
        if isinstance(owner, int) or (isinstance(owner, _TEXT) and __obj.__name__ in ("translate", "maketrans")):
            raise SecurityError(f"a template may not call {__obj.__name__}")
        if isinstance(owner, _TEXT):
            args = _check_arguments(__obj.__name__, (owner, *args), kwargs)[1:]
        return _check_size(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """An attribute that a template may not see: refused at once, not only when it is used."""
        raise SecurityError(f"a template may not read {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large, checked before it is computed."""
        assert isinstance(context, _Budget)
        context.spend(1)
        if operator == "**" and not (abs(left) < 1e6 and abs(right) < 64):
            raise SecurityError("the template raises a number to too high a power")
        if operator == "*":
            _check_length(max(_length(left) * _count(right), _length(right) * _count(left)))
        if operator == "%" and isinstance(left, str):
            _check_arguments("format", (left, right), {})
        return _check_size(super().call_binop(context, operator, left, right))


def _raise(message: str) -> None:
    raise JinjaError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 100:
        raise SecurityError("the template's date format is too long")
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if options.keys() - {"separators", "sort_keys"} or (isinstance(indent, int) and indent > 16):
        raise SecurityError("the template indents JSON too far, or asks tojson for what it does not do")
    return json.dumps(_printable(value), ensure_ascii=ensure_ascii, indent=indent, **options)


@pass_context
def _bounded_loop(context: _Budget, items: Any) -> Any:
    """What a loop runs over, paid in advance; an iterator is read up to the bound."""
    items = items if hasattr(items, "__len__") else list(islice(items, MAX_STEPS + 1))
    context.spend(len(items))
    return items


@pass_context
def _concatenate(context: _Budget, parts: list[Any]) -> str:
    """The operator `~`."""
    context.spend(1)
    texts = [str(_printable(part)) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments checked where they may make a large text, and its result always."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return _check_size(function(*_check_arguments(name, args, kwargs), **kwargs))

    return checked


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or of a text's method (the text first), iterators made lists, if they are within bounds."""
    if name in _PADDING and any(_count(value) > _MAX_WIDTH for value in (*args, *kwargs.values())):
        raise SecurityError(f"the template asks {name} for more than {_MAX_WIDTH}")
    if name not in _PRINTING:
        return args
    args = tuple(list(islice(value, MAX_STEPS)) if isinstance(value, Iterator) else value for value in args)
    values = [_printable(value) for value in (*args, *kwargs.values())]
    texts = [value for value in values if isinstance(value, str)]
    if name.startswith("format") and any(_WIDE_FORMAT.search(text) for text in texts[:1]):
        raise SecurityError("the template's format string asks for wide fields")
    if name == "replace" and len(texts) == 3:
        _check_length(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    if name == "join":
        _check_length(sum(len(value) for value in values if isinstance(value, (list, tuple))) * max(map(len, texts), default=0))
    return args


def _printable(value: Any) -> Any:
    """`value`, if writing it out stays within bounds: lists that hold one list many times print larger than they are."""
    todo, size = [value], 0
    while todo:
        item = todo.pop()
        size += len(item) if isinstance(item, _TEXT) else 32
        _check_length(size)
        if isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise SecurityError(f"the template makes a text or list of more than {MAX_TEXT} elements")


def _check_size(value: Any) -> Any:
    _check_length(_length(value))
    if isinstance(value, int) and value.bit_length() > 4096:
        raise SecurityError("the template computes too large a number")
    return value
