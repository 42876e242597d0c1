"""How a model is shared out: what each rank runs, loads and stores, by heads and channels or by layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trivium.ops import Group, KVSpec, PagedKV, Program
from trivium_torch.ranks import stages
from trivium_torch.ranks.data import Array
from trivium_torch.ranks.shard import Part, local_spec, shard


class Share(NamedTuple):
    """A rank's: its Program, the part of a weight that each of its constants is, what it stores, and for each group the layer slots
    of the whole group that are its own."""

    program: Program
    parts: Mapping[str, Part]
    spec: KVSpec
    slots: tuple[tuple[int, ...], ...]


class Division(NamedTuple):
    """All ranks' shares. speaker: the rank whose tokens count. cut: groups of whose keys and values each rank has some heads."""

    shares: tuple[Share, ...]
    speaker: int
    cut: frozenset[int]

    def joined(self, group: int, answers: Sequence[Sequence[Array]]) -> list[Array]:
        """A group's pages as one device would have them, layer slot by layer slot, from those of each rank."""
        by_slot: dict[int, list[Sequence[Array]]] = {}
        for share, arrays in zip(self.shares, answers, strict=True):
            for slot, layer in zip(share.slots[group], _layers(arrays, len(share.slots[group])), strict=True):
                by_slot.setdefault(slot, []).append(layer)
        if group in self.cut:
            return [np.concatenate(heads, axis=2) for slot in sorted(by_slot) for heads in zip(*by_slot[slot], strict=True)]
        return [array for slot in sorted(by_slot) for array in by_slot[slot][0]]

    def divided(self, group: int, arrays: Sequence[Array], slots: int) -> Iterator[list[Array]]:
        """Each rank's part of a group's pages; `slots`: layers of the whole group."""
        layers = _layers(arrays, slots)
        for rank, share in enumerate(self.shares):
            own = [array for slot in share.slots[group] for array in layers[slot]]
            yield [np.split(a, len(self.shares), axis=2)[rank] for a in own] if group in self.cut else own


def _layers(arrays: Sequence[Array], slots: int) -> list[Sequence[Array]]:
    each = len(arrays) // slots if slots else 0
    return [arrays[i * each : (i + 1) * each] for i in range(slots)]


def by_heads(program: Program, spec: KVSpec, ranks: int) -> Division:
    """Tensor parallelism."""
    made = [shard(program, spec.groups, ranks, rank) for rank in range(ranks)]
    local, slots = local_spec(spec, made[0].cut_states, ranks), tuple(tuple(range(len(g.states))) for g in spec.groups)
    cut = frozenset(i for i, (a, b) in enumerate(zip(spec.groups, local.groups, strict=True)) if _heads(a) != _heads(b))
    return Division(tuple(Share(m.program, m.parts, local, slots) for m in made), 0, cut)


def by_layers(program: Program, spec: KVSpec, ranks: int) -> Division:
    """Pipeline parallelism."""
    shares = []
    for stage in stages.cut(program, ranks):
        slots = tuple(tuple(i for i, s in enumerate(g.states) if s in stage.states) for g in spec.groups)
        shares.append(Share(stage.program, stage.parts, stages.stage_spec(spec, stage.states), slots))
    return Division(tuple(shares), ranks - 1, frozenset())


def _heads(group: Group) -> int:
    return group.spec.kv_heads if isinstance(group.spec, PagedKV) else 0


def loads(division: Division, weights: Mapping[str, Any]) -> Iterator[tuple[Any, int | None, list[list[str]]]]:
    """(weight, the dimension that it is cut along, each rank's names for its part): every part once."""
    found: dict[tuple[int, int | None], tuple[Any, list[list[str]]]] = {}
    for rank, share in enumerate(division.shares):
        for constant in share.program.constants:
            part = share.parts.get(constant.value.name)
            if part is not None:  # else the Program brings it itself
                weight = weights[part.name]
                _, names = found.setdefault((id(weight), part.dim), (weight, [[] for _ in division.shares]))
                names[rank].append(constant.value.name)
    for (_, dim), (weight, names) in found.items():
        yield weight, dim, names
