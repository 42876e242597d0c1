"""Layers into groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivium.kv import plan_groups
from trivium.ops import PagedKV, Recurrent, StateDecl, StateSpec, Value

FULL, WINDOW, STATE = PagedKV(2, 8), PagedKV(2, 8, 16), Recurrent((4, 4))


def declare(specs: list[StateSpec]) -> list[StateDecl]:
    return [StateDecl(Value(f"l{i}", (), "PagedKV", "state"), spec) for i, spec in enumerate(specs)]


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ([FULL] * 30, [30]),
        ([WINDOW, FULL] * 13, [13, 13]),
        (([WINDOW] * 5 + [FULL]) * 3, [3] * 6),
        ([STATE, STATE, STATE, FULL] * 12, [12] * 4),
        ((([WINDOW] * 5 + [FULL]) * 5)[:26], [4] * 5 + [2, 4]),
        ([], []),
    ],
)
def test_known_models(pattern: list[StateSpec], sizes: list[int]) -> None:
    assert sorted(len(g.states) for g in plan_groups(declare(pattern), 16, "float32").groups) == sorted(sizes)


@given(st.lists(st.sampled_from([FULL, WINDOW, STATE, PagedKV(1, 8)]), max_size=40))
def test_every_layer_has_one_place_and_few_slots_are_wasted(specs: list[StateSpec]) -> None:
    spec = plan_groups(declare(specs), 16, "bfloat16")
    assert sorted(i for g in spec.groups for i in g.states) == list(range(len(specs)))
    assert all(specs[i] == g.spec for g in spec.groups for i in g.states)
    layer_slots = max((len(g.states) for g in spec.groups), default=0)
    assert layer_slots * len(spec.groups) <= 1.1 * len(specs)
    assert (spec.page_size, spec.dtype) == (16, "bfloat16")
    for i in range(len(specs)):
        group, slot = spec.group_of(i)
        assert spec.groups[group].states[slot] == i
