"""Chat messages to a prompt, through the model's Jinja template.

Markers of special tokens that a user writes in a message ("<|im_start|>") reach the tokenizer like the template's own, as
with Hugging Face tokenizers; who must tell them apart removes them from untrusted content first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError

from trivium.errors import InvalidRequestError, TemplateError
from trivium.text.sandbox import MAX_TEMPLATE, MAX_TEXT, Environment

_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})


class ChatTemplate:
    """A compiled template. words: its string constants, such as roles; iterates: it takes content as a list of parts; shows: images
    may be among them; only_parts: it takes content as nothing else; joins: it takes a tool call's arguments as JSON text, which it
    puts between other texts, not as an object; offers: it shows tools."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(f"the chat template has more than {MAX_TEMPLATE} characters", param="chat_template")
        environment = Environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2 and the Python compiler raise many kinds for bad source
            raise TemplateError(f"the chat template can't be compiled: {error}", param="chat_template") from error
        self.words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.iterates = _iterates_content(tree)
        self.shows = self.iterates and "image" in self.words
        self.only_parts = self.shows and not any(test.name == "string" for test in tree.find_all(nodes.Test))
        self.offers = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        sums = [side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)]
        self.joins = any(_is_field(side, "arguments", set()) for side in sums)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt for `messages`; TemplateError if the template refuses them or passes its bounds."""
        if variables.get("tools") and not self.offers:
            message = "the chat template does not show tools to the model; leave them out, or pass a chat template that does"
            raise TemplateError(message, param="tools")
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=prepare(messages, self), **variables):
                size += len(piece)
                if size > MAX_TEXT:
                    raise JinjaError(f"it writes more than {MAX_TEXT} characters")
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except JinjaError as error:
            raise TemplateError(f"the chat template refuses the messages: {error.message}", param="messages") from error
        except (Exception, RecursionError, MemoryError) as error:  # the template is a program: it may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise TemplateError(f"the chat template fails on these messages: {reason}", param="messages") from error
        return "".join(pieces)


def plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only, so that a template never sees an object with methods of its own."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise _invalid(f"{where} is a {type(value).__name__}; messages and template arguments hold JSON values only")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def prepare(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as the template takes them; InvalidRequestError, with the place, for what no template could take.

    Fields that are null are left out. Content parts are joined by a newline, unless the template iterates over content.
    A developer message is a system message, unless the template knows the role; neighbours that become two system messages
    so are one, joined by a blank line.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _invalid("messages must be a list of at least one message with role and content")
    prepared: list[dict[str, Any]] = []
    merges = False
    for i, message in enumerate(messages):
        checked = _check(message, f"messages[{i}]", template)
        renamed = checked["role"] == "developer" and "developer" not in template.words
        if renamed:
            checked["role"] = "system"
        before = prepared[-1] if prepared else {}
        if checked["role"] == before.get("role") == "system" and (renamed or merges):
            before["content"] = _joined(before.get("content", ""), checked.get("content", ""))
        else:
            prepared.append(checked)
        merges = renamed
    return prepared


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)]
    return parts[0] + parts[1]


def _check(message: Any, where: str, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} is a {type(message).__name__}; a message is an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not (role in _ROLES or role in template.words):
        raise _invalid(f"{where}.role is {role!r}; possible are {', '.join(sorted(_ROLES))}")
    checked = {key: value for key, value in plain(message, where).items() if value is not None}
    if "content" in checked:
        checked["content"] = _content(checked["content"], f"{where}.content", template)
    elif not checked.get("tool_calls"):
        checked["content"] = ""
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{where}.tool_calls", template.joins)
    return checked


def _tool_calls(calls: Any, where: str, as_text: bool) -> list[dict[str, Any]]:
    """Calls of an earlier answer, their arguments (JSON text or an object) as the template takes them."""
    if not isinstance(calls, list):
        raise _invalid(f"{where} must be a list, not {type(calls).__name__}")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid(f'{where}[{i}] must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}')
        given = function.get("arguments")
        try:
            arguments = json.loads(given or "{}") if isinstance(given, str) else given or {}
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _invalid(f"{where}[{i}].function.arguments must be a JSON object, or one as text, not {given!r:.80}")
        function["arguments"] = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return calls


def _content(content: Any, where: str, template: ChatTemplate) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.only_parts else content
    if not isinstance(content, list):
        raise _invalid(f"{where} must be text, null or a list of parts, not {type(content).__name__}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and template.shows:
            continue
        if kind != "text":
            what = f"has the type {kind!r}" if kind else "has no type"
            raise _invalid(f'{where}[{i}] {what}; this model takes parts of the form {{"type": "text", "text": ...}}')
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{where}[{i}].text must be a string")
    return content if template.iterates else "\n".join(part["text"] for part in content)


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content: over `….content`, or over a name that stands for it."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if _is_field(assign.node, "content", names) and isinstance(assign.target, nodes.Name):
            names.add(assign.target.name)
    return any(_is_field(loop.iter, "content", names) for loop in tree.find_all(nodes.For))


def _is_field(node: nodes.Node | None, field: str, names: set[str]) -> bool:
    """Whether `node` is `….field`, `…["field"]` or one of `names`, filtered or not."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == field
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == field
    return isinstance(node, nodes.Name) and node.name in names
