"""Tool calls as each family's published template or documentation writes them: from names and arguments to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def wrapped(calls: Calls, key: str = "arguments") -> list[str]:
    return [text_of({"name": name, key: arguments}) for name, arguments in calls]


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else text_of(value)


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in wrapped(calls))


def llama3(calls: Calls) -> str:
    return "; ".join(wrapped(calls, "parameters"))


def llama3_tag(calls: Calls) -> str:
    return "<|python_tag|>" + llama3(calls)


def mistral_list(calls: Calls) -> str:
    return f"[TOOL_CALLS][{', '.join(wrapped(calls))}]"


def mistral_names(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text_of(arguments)}" for name, arguments in calls)


def mistral_ids(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{text_of(arguments)}" for name, arguments in calls)


def deepseek_v3(calls: Calls) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text_of(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    each = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text_of(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def qwen3_coder(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{_typed(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_typed(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return text_of(value)


def functiongemma(calls: Calls) -> str:
    return "".join(f"<start_function_call>call:{n}{_gemma(a, '<escape>')}<end_function_call>" for n, a in calls)


def gemma4(calls: Calls) -> str:
    return "".join(f"<|tool_call>call:{n}{_gemma(a, chr(60) + '|' + chr(34) + '|>')}<tool_call|>" for n, a in calls)


def _python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]


def pythonic(calls: Calls) -> str:
    return f"[{', '.join(_python(calls))}]"


def pythonic_tag(calls: Calls) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def tool_code(calls: Calls) -> str:
    return "```tool_code\n" + "\n".join(_python(calls)) + "\n```"


def granite(calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(wrapped(calls))}]"


def phi4(calls: Calls) -> str:
    return granite(calls) + "<|/tool_call|>"


def json_list(calls: Calls) -> str:
    return f"[{', '.join(wrapped(calls))}]"


def harmony(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text_of(arguments)}<|call|>"
        for name, arguments in calls
    )


Writer = Callable[[Calls], str]
MARKED: list[tuple[str, Writer]] = [
    ("hermes", hermes), ("llama3", llama3_tag), ("mistral", mistral_list), ("mistral", mistral_names), ("mistral", mistral_ids),
    ("deepseek", deepseek_v3), ("deepseek", deepseek_v31), ("granite", granite), ("granite", phi4), ("harmony", harmony),
]  # fmt: skip
"""Parser and writer of families whose arguments are JSON behind a marker."""
BARE: list[tuple[str, Writer]] = [("llama3", llama3), ("json", json_list), ("gemma", llama3)]
"""JSON without a marker: only at the start of an answer, for tools that were offered."""
CONVERTED: list[tuple[str, Writer]] = [
    ("qwen3_coder", qwen3_coder), ("glm", glm), ("functiongemma", functiongemma), ("gemma4", gemma4), ("pythonic", pythonic),
    ("pythonic", pythonic_tag), ("gemma", tool_code), ("gemma", pythonic),
]  # fmt: skip
"""Arguments that are not written as JSON."""
