"""Which layers share a block table."""

from __future__ import annotations

from collections.abc import Sequence

from trivium.ops import Group, KVSpec, StateDecl, StateSpec

MAX_WASTE = 0.1
"""Share of a page's layer slots that may stay empty for the sake of fewer groups (fewer block tables to keep)."""


def plan_groups(states: Sequence[StateDecl], page_size: int, dtype: str) -> KVSpec:
    """Groups a Program's states: layers with equal needs go together, in runs of one length for all kinds, so that any page
    can serve any group. The run length is the one that makes the fewest groups while at most MAX_WASTE of the layer slots stay
    empty; only the last group of a kind may be shorter than the others."""
    kinds: dict[StateSpec, list[int]] = {}
    for index, decl in enumerate(states):
        kinds.setdefault(decl.spec, []).append(index)
    size = _run_length([len(layers) for layers in kinds.values()])
    runs = [(spec, layers[start : start + size]) for spec, layers in kinds.items() for start in range(0, len(layers), size)]
    return KVSpec(page_size, dtype, tuple(Group(spec, tuple(run)) for spec, run in runs))


def _run_length(counts: Sequence[int]) -> int:
    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = range(1, max(counts, default=1) + 1)
    return min((n for n in sizes if groups(n) * n <= sum(counts) * (1 + MAX_WASTE)), key=groups, default=1)
