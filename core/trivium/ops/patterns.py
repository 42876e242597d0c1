"""Fusion: tracing a pattern to a small graph, finding it in a Program, putting one call in its place, and what that call means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trivium.errors import ProgramError
from trivium.ops.builder import OPERATORS, Recorder
from trivium.ops.program import Call, Pattern, Program, Value
from trivium.ops.schema import Operator

COMMUTATIVE = frozenset({"add", "mul"})
"""Operators whose two arguments may be exchanged to make a pattern match."""

NEAREST = 8
"""How many readers of one value are tried: what every layer reads (positions) must not make the search quadratic."""


class Captured(NamedTuple):
    """Stands for an attribute of the fused call while a pattern is traced."""

    name: str


class PatternGraph(NamedTuple):
    """A traced pattern. `params` are its arguments, `calls` what it does in SSA order (attributes may be Captured), `outputs`
    what it returns. `order` lists the calls so that each but the first shares a value with an earlier one."""

    pattern: Pattern
    params: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]
    order: tuple[Call, ...]


class _Tracer(Recorder):
    """What a pattern's function gets in place of a Builder: its calls have no shapes."""

    def _results(self, op: Operator, args: Sequence[Value | None], attrs: Mapping[str, Any]) -> tuple[Value, ...]:
        made = [(f"{r.name}{len(self.calls)}", r) for r in op.signature.results]
        return tuple(Value(name, (), r.dtype, "state" if r.is_state else "call") for name, r in made)


def trace(pattern: Pattern) -> PatternGraph:
    """The graph of a pattern; ProgramError if it leaves a parameter unused or falls into parts that share no value."""
    declared = inspect.signature(pattern.fn).parameters
    attrs = [p.name for p in declared.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    params = tuple(Value(name, (), "", "param") for name in list(declared)[1:] if name not in attrs)
    tracer = _Tracer(OPERATORS)
    returned = pattern.fn(tracer, *params, **{name: Captured(name) for name in attrs})
    calls, outputs = tuple(tracer.calls), returned if isinstance(returned, tuple) else (returned,)
    read = {v for c in calls for v in c.args}
    captured = {v.name for c in calls for v in c.attrs.values() if isinstance(v, Captured)}
    if unused := [p.name for p in params if p not in read] + [name for name in attrs if name not in captured]:
        raise ProgramError(f"pattern {pattern.name}: nothing inside uses {', '.join(unused)}")
    return PatternGraph(pattern, params, tuple(calls), outputs, _connected(pattern.name, calls))


def _connected(name: str, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls, each next to an earlier one; neighbours by an inner value before those by a mere parameter, which many share."""
    placed, rest = [calls[0]], list(calls[1:])
    while rest:
        made, read = {v for c in placed for v in c.results}, {v for c in placed for v in c.args if v is not None}
        inner = (c for c in rest if made & set(c.args) or read & set(c.results))
        shared = (c for c in rest if read & set(c.args))
        found = next(inner, None) or next(shared, None)
        if found is None:
            raise ProgramError(f"pattern {name}: {rest[0].name} shares no value with the calls before it")
        placed.append(found)
        rest.remove(found)
    return tuple(placed)


class Match(NamedTuple):
    """Where a pattern lies in a Program: the matched call of each pattern call, program value (or None) of each pattern value,
    and the captured attributes."""

    calls: Mapping[Call, Call]
    values: Mapping[Value, Value | None]
    attrs: Mapping[str, Any]

    def fused(self, graph: PatternGraph) -> Call:
        """The one call that stands for the match."""
        args, results = (tuple(self.values[v] for v in values) for values in (graph.params, graph.outputs))
        return Call(graph.pattern, args, dict(self.attrs), results)  # type: ignore[arg-type]


class CallGraph:
    """The calls of a Program in a valid order, with who makes and who reads each value; `replace` keeps all of it up to date."""

    def __init__(self, program: Program) -> None:
        self.calls = list(program.calls)
        self.outputs = frozenset(program.outputs.values())
        self.maker = {v: c for c in self.calls for v in c.results}
        self.readers: dict[Value, list[Call]] = {}
        self.position = {c: i for i, c in enumerate(self.calls)}
        for call in self.calls:
            self._read(call)

    def _read(self, call: Call) -> None:
        for value in {v for v in call.args if v is not None}:
            self.readers.setdefault(value, []).append(call)

    def before(self, call: Call) -> Iterator[Call]:
        """Calls that must run before `call`: makers of its arguments, and readers of a state version that it replaces."""
        writes = any(r.kind == "state" for r in call.results)
        for value in call.args:
            if value is not None and value in self.maker:
                yield self.maker[value]
            if writes and value is not None and value.kind == "state":
                yield from (c for c in self.readers[value] if c is not call)

    def split(self, matched: frozenset[Call]) -> tuple[list[Call], list[Call]] | None:
        """The other calls between the first and the last matched one: those that may run before all of `matched`, and those
        that must run after some of it. None if one of `matched` needs one of the latter: they can't become one call."""
        at = [self.position[c] for c in matched]
        early: list[Call] = []
        late: dict[Call, None] = {}
        for call in self.calls[min(at) : max(at) + 1]:
            waits = any(c in late or (c in matched and call not in matched) for c in self.before(call))
            if call in matched and waits:
                return None
            if waits:
                late[call] = None
            elif call not in matched:
                early.append(call)
        return early, list(late)

    def replace(self, matched: frozenset[Call], fused: Call, early: list[Call], late: list[Call]) -> None:
        """Puts `fused` in the place of `matched`; `early` and `late` come from split()."""
        start = min(self.position[c] for c in matched)
        window = [*early, fused, *late]
        self.calls[start : start + len(window) + len(matched) - 1] = window
        for call in matched:
            del self.position[call]
            for value in {v for v in call.args if v is not None}:
                self.readers[value].remove(call)
        self._read(fused)
        self.maker.update((v, fused) for v in fused.results)
        self.position.update(zip(self.calls[start:], range(start, len(self.calls))))


def find(graph: PatternGraph, program: CallGraph, anchor: Call, match: Match | None = None) -> Iterator[Match]:
    """Every way in which the pattern lies in the Program with its first call on `anchor`; nearest calls first,
    at most NEAREST readers of a value. `match`: what is bound already."""
    match = match or Match({}, {}, {})
    if len(match.calls) == len(graph.order):
        yield match
        return
    want = graph.order[len(match.calls)]
    taken = set(match.calls.values())
    for call in _candidates(want, program, match) if taken else [anchor]:
        if call.op is want.op and call not in taken:
            for args in (call.args, call.args[::-1]) if call.name in COMMUTATIVE else (call.args,):
                if (more := _bind(graph, want, call, args, match)) is not None:
                    yield from find(graph, program, anchor, more)


def _candidates(want: Call, program: CallGraph, match: Match) -> list[Call]:
    """The calls that could be `want`, given what is bound already."""
    for value in want.results:
        made = match.values.get(value)
        if made is not None:
            return [program.maker[made]] if made in program.maker else []
    bound = [v for v in (match.values.get(a) for a in want.args if a is not None) if v is not None]
    readers = min((program.readers.get(v, []) for v in bound), key=len, default=[])
    start = program.position[next(iter(match.calls.values()))]
    return sorted(readers, key=lambda c: (abs(program.position[c] - start), program.position[c]))[:NEAREST]


def _bind(graph: PatternGraph, want: Call, call: Call, args: Sequence[Value | None], match: Match) -> Match | None:
    """The match extended by want = call, or None where a value or an attribute contradicts it."""
    values, attrs = dict(match.values), dict(match.attrs)
    for mine, theirs in zip((*want.args, *want.results), (*args, *call.results), strict=True):
        if mine is None and theirs is None:
            continue
        if mine is None or (theirs is None and not (mine.name in graph.pattern.optional and mine in graph.params)):
            return None
        if values.setdefault(mine, theirs) is not theirs:
            return None
    for name, wanted in want.attrs.items():
        expected = attrs.setdefault(wanted.name, call.attrs[name]) if isinstance(wanted, Captured) else wanted
        if expected != call.attrs[name]:
            return None
    return Match({**match.calls, want: call}, values, attrs)


def is_closed(graph: PatternGraph, program: CallGraph, match: Match, matched: frozenset[Call]) -> bool:
    """Whether nobody outside reads what the pattern keeps to itself, and nothing it takes is made by itself."""
    if any(program.maker.get(v) in matched for p in graph.params if (v := match.values[p]) is not None):
        return False
    pairs = [pair for want, call in match.calls.items() for pair in zip(want.results, call.results, strict=True)]
    inner = [value for mine, value in pairs if mine not in graph.outputs]
    return not any(v in program.outputs or any(c not in matched for c in program.readers.get(v, ())) for v in inner)


def rewrite(program: Program, patterns: Sequence[Pattern], accept: Callable[[Call], bool] = lambda call: True) -> Program:
    """The Program with every occurrence of the patterns replaced by one call each.

    Larger patterns (more calls) go first, then those given earlier; within a pattern the first occurrence in the Program goes
    first, made of the calls nearest to each other. `accept` has the last word on a fused call. The same arguments always give the
    same Program, in valid SSA order.
    """
    graph = CallGraph(program)
    for pattern in sorted(map(trace, patterns), key=lambda g: -len(g.calls)):
        for anchor in [c for c in graph.calls if c.op is pattern.order[0].op]:
            if anchor in graph.position:  # an earlier occurrence may have taken it
                _fuse_at(graph, pattern, anchor, accept)
    return replace(program, calls=tuple(graph.calls))


def _fuse_at(graph: CallGraph, pattern: PatternGraph, anchor: Call, accept: Callable[[Call], bool]) -> None:
    for match in find(pattern, graph, anchor):
        matched = frozenset(match.calls.values())
        if is_closed(pattern, graph, match, matched) and (around := graph.split(matched)) is not None:
            fused = match.fused(pattern)
            if accept(fused):
                graph.replace(matched, fused, *around)
            return


def run_pattern(pattern: Pattern, args: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a fused call means: its pattern run by the references. `args` as for an operator's reference."""
    graph = trace(pattern)
    env: dict[Value, Any] = dict(zip(graph.params, args, strict=True))
    run_calls(graph.calls, env, attrs)
    return tuple(env[v] for v in graph.outputs)


def run_calls(calls: Sequence[Call], env: dict[Value, Any], captured: Mapping[str, Any]) -> None:
    """Runs calls by the references. env: the value of every argument, to which the results are added; captured: attributes of a
    fused call that its pattern's calls refer to."""
    for call in calls:
        attrs = {k: captured[v.name] if isinstance(v, Captured) else v for k, v in call.attrs.items()}
        results = evaluate(call.op, [None if a is None else env[a] for a in call.args], attrs)
        env.update(zip(call.results, results, strict=True))


def evaluate(op: Operator | Pattern, args: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of one call by the references, always as a tuple."""
    if isinstance(op, Pattern):
        return run_pattern(op, args, attrs)
    result = op(*args, **attrs)
    return tuple(result) if len(op.signature.results) > 1 else (result,)
