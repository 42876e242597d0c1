"""How a model is shared out: what each rank runs, loads and stores, by heads and channels, by layers, or by both."""

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
    of the whole group that are its own. cut: groups of whose keys and values it has some heads. piece: (which, of how many) equal
    pieces its parts of weights and heads are."""

    program: Program
    parts: Mapping[str, Part]
    spec: KVSpec
    slots: tuple[tuple[int, ...], ...]
    cut: frozenset[int]
    piece: tuple[int, int]


class Division(NamedTuple):
    """All ranks' shares. speaker: the rank whose tokens count."""

    shares: tuple[Share, ...]
    speaker: int

    def joined(self, group: int, answers: Sequence[Sequence[Array]]) -> list[Array]:
        """A group's pages as one device would have them, layer slot by layer slot, from those of each rank."""
        by_slot: dict[int, list[Sequence[Array]]] = {}
        for share, arrays in zip(self.shares, answers, strict=True):
            for slot, layer in zip(share.slots[group], _layers(arrays, len(share.slots[group])), strict=True):
                if group in share.cut or slot not in by_slot:  # else another rank has all of it, too
                    by_slot.setdefault(slot, []).append(layer)
        return [np.concatenate(heads, axis=2) if len(heads) > 1 else heads[0]
                for slot in sorted(by_slot) for heads in zip(*by_slot[slot], strict=True)]  # fmt: skip

    def divided(self, group: int, arrays: Sequence[Array], slots: int) -> Iterator[list[Array]]:
        """Each rank's part of a group's pages; `slots`: layers of the whole group."""
        layers = _layers(arrays, slots)
        for share in self.shares:
            own, (which, count) = [array for slot in share.slots[group] for array in layers[slot]], share.piece
            yield [np.split(a, count, axis=2)[which] for a in own] if group in share.cut else own


def _layers(arrays: Sequence[Array], slots: int) -> list[Sequence[Array]]:
    each = len(arrays) // slots if slots else 0
    return [arrays[i * each : (i + 1) * each] for i in range(slots)]


class Ways(NamedTuple):
    """Over how many ranks heads and channels are shared out, and over how many layers are. With both, the ranks of a stage follow
    each other."""

    tensor: int
    pipeline: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        asked = {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline}
        return " times ".join(f"{by} {ranks}" for by, ranks in asked.items() if ranks > 1)


def divide(program: Program, spec: KVSpec, ways: Ways) -> Division:
    """Every rank's share. Raises UnsupportedError where a model has no such cuts."""
    cut = stages.cut(program, ways.pipeline) if ways.pipeline > 1 else [stages.all_of(program)]
    shares = tuple(share for stage in cut for share in _shares(stage, spec, ways.tensor))
    return Division(shares, ways.ranks - ways.tensor)


def _shares(stage: stages.Stage, spec: KVSpec, ranks: int) -> Iterator[Share]:
    """Those of the ranks of a stage."""
    stored = stages.stage_spec(spec, stage.states)
    slots = tuple(tuple(i for i, s in enumerate(g.states) if s in stage.states) for g in spec.groups)
    if ranks == 1:
        yield Share(stage.program, stage.parts, stored, slots, frozenset(), (0, 1))
        return
    for rank in range(ranks):
        made = shard(stage.program, stored.groups, ranks, rank)
        local = local_spec(stored, made.cut_states, ranks)
        cut = frozenset(i for i, (a, b) in enumerate(zip(stored.groups, local.groups, strict=True)) if _heads(a) != _heads(b))
        parts = {name: part for name, part in made.parts.items() if part.name in stage.parts}  # a stage brings numbers of its own
        yield Share(made.program, parts, local, slots, cut, (rank, ranks))


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
