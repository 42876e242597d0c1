"""Rows are gathered as early as possible: of the last layer's feed-forward block a prompt needs the sampled rows alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from trivium.ops import Call, Operator, Pattern, Program, Value
from trivium.ops.patterns import trace


def gather_early(program: Program) -> Program:
    """The Program with each gather_rows before the calls that make its rows one by one, where only gathered rows of theirs are
    read. Each gather_rows of the same rows has calls of its own then: a row that two of them name is made twice."""
    readers: dict[Value, list[Call]] = defaultdict(list)
    for call in program.calls:
        for value in {v for v in call.args if v is not None}:
            readers[value].append(call)
    outputs, moved = set(program.outputs.values()), set[Call]()
    for call in reversed(program.calls):
        later = [reader in moved or _gathers(reader, v) for v in call.results for reader in readers[v]]
        if later and all(later) and outputs.isdisjoint(call.results) and _makes_single_rows(call):
            moved.add(call)
    return _Moving(program, moved).program() if moved else program


def _gathers(call: Call, x: Value) -> bool:
    return call.name == "gather_rows" and call.args[0] is x


def _makes_single_rows(call: Call) -> bool:
    """Whether a row of each result follows from the same row of the arguments, and from constants."""
    inner = trace(call.op).calls if isinstance(call.op, Pattern) else (call,)
    rows = [v for v in (*call.args, *call.results) if v is not None and v.kind != "constant"]
    return all(v.kind == "call" and len(v.shape) == 2 for v in rows) and all(map(_by_rows, inner))


def _by_rows(call: Call) -> bool:
    """Whether the operator leaves all dimensions but the last as they are, by its signature."""
    return isinstance(call.op, Operator) and all(r.dims is not None and r.dims[:1] == ("...",) for r in call.op.signature.results)


class _Moving:
    """Puts a Program together in which the calls `moved` come after the gather_rows that need them."""

    def __init__(self, program: Program, moved: set[Call]) -> None:
        self._program, self._moved = program, moved
        self._makers = {v: c for c in moved for v in c.results}
        self._gathered: dict[tuple[Value, Value], Value] = {}  # by what is gathered and the rows
        self._replaced: dict[Value, Value] = {}  # results of gather_rows that are another call's now
        self._calls: list[Call] = []

    def program(self) -> Program:
        for call in self._program.calls:
            if call in self._moved:
                continue
            if call.name == "gather_rows" and (x := call.args[0]) in self._makers:
                self._replaced[call.results[0]] = self._gather(x, call)
            else:
                args = tuple(v and self._replaced.get(v, v) for v in call.args)
                self._calls.append(call if args == call.args else replace(call, args=args))
        outputs = {name: self._replaced.get(v, v) for name, v in self._program.outputs.items()}
        return replace(self._program, calls=tuple(self._calls), outputs=outputs)

    def _gather(self, x: Value, like: Call) -> Value:
        """The rows of x that the gather_rows `like` names."""
        rows = like.args[1]
        assert rows is not None
        if (x, rows) not in self._gathered:
            maker = self._makers.get(x)
            if maker is None:
                made = replace(like, args=(x, rows), results=(self._rows_of(x, rows),))
                self._gathered[x, rows] = made.results[0]
            else:
                args = tuple(self._gather(v, like) if v is not None and v.kind == "call" else v for v in maker.args)
                made = replace(maker, args=args, results=tuple(self._rows_of(v, rows) for v in maker.results))
                self._gathered.update(((v, rows), new) for v, new in zip(maker.results, made.results, strict=True))
            self._calls.append(made)
        return self._gathered[x, rows]

    @staticmethod
    def _rows_of(x: Value, rows: Value) -> Value:
        return replace(x, name=f"{x.name}.{rows.name}", shape=(*rows.shape, *x.shape[1:]))
