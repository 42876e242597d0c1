"""A Program as text, one call a line."""

from __future__ import annotations

from trivium.ops.program import Call, Pattern, Program, Value


def format_program(program: Program) -> str:
    """The Program in SSA form: %value, @constant, $state; attributes that differ from their default; fused calls in brackets."""
    lines = ["inputs " + ", ".join(f"%{v.name}{_shape(v)}: {v.dtype}" for v in program.inputs)]
    lines.append(f"constants {len(program.constants)}")
    lines += [f"state ${s.value.name}: {s.spec}" for s in program.states]
    for call in program.calls:
        made = [_used(v) if v.kind == "state" else _used(v) + _shape(v) for v in call.results]
        lines.append(f"{', '.join(made)} = {format_call(call)}")
    return "\n".join([*lines, *(f"output {name} = {_used(value)}" for name, value in program.outputs.items())])


def format_call(call: Call) -> str:
    """The right-hand side of one line."""
    name, defaults = (f"[{call.name}]", {}) if isinstance(call.op, Pattern) else (call.name, call.op.attrs)
    attrs = [f"{k}={v!r}" for k, v in call.attrs.items() if k not in defaults or defaults[k] != v]
    return f"{name}({', '.join([*map(_used, call.args), *attrs])})"


def _shape(value: Value) -> str:
    return f"[{', '.join(map(str, value.shape))}]"


def _used(value: Value | None) -> str:
    if value is None:
        return "none"
    if value.kind == "constant":
        return f"@{value.name}{_shape(value)}"
    return ("$" if value.kind == "state" else "%") + value.name
