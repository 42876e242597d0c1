"""Fusion: the one rewrite between a model's Program and what a backend compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from trivium.ops.patterns import CallGraph, PatternGraph, find, is_closed, trace
from trivium.ops.program import Call, Pattern, Program


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
    return dataclasses.replace(program, calls=tuple(graph.calls))


def _fuse_at(graph: CallGraph, pattern: PatternGraph, anchor: Call, accept: Callable[[Call], bool]) -> None:
    for match in find(pattern, graph, anchor):
        matched = frozenset(match.calls.values())
        if is_closed(pattern, graph, match, matched) and (around := graph.split(matched)) is not None:
            fused = match.fused(pattern)
            if accept(fused):
                graph.replace(matched, fused, *around)
            return
