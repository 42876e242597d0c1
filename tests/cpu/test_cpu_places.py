"""Memory of the tape: places never overlap while both are in use, and threads meet exactly where they must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trivium_cpu.places import ALIGN, Arena, Barriers, Place


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100), st.integers(0, 30)), max_size=60))
def test_places_in_use_never_overlap(steps):
    arena, used = Arena(), []
    for allocate, width, which in steps:
        if allocate or not used:
            offset = arena.allocate(width)
            assert offset % ALIGN == 0
            assert all(offset >= o + w or offset + max(width, 1) <= o for o, w in used)
            used.append((offset, width))
        else:
            arena.release(*used.pop(which % len(used)))
        assert all(o + w <= arena.size for o, w in used)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.randoms())
def test_all_memory_is_found_again(widths, random):
    arena = Arena()
    places = [(arena.allocate(w), w) for w in widths]
    size = arena.size
    random.shuffle(places)
    for offset, width in places:
        arena.release(offset, width)
    assert arena.allocate(size) == 0
    assert arena.size == size


def place(offset, width=16, space="tokens"):
    return Place(space, offset, width, None)


def test_independent_operations_do_not_meet():
    barriers = Barriers()
    assert not barriers.needed([place(0)], [place(16)])
    assert not barriers.needed([place(0)], [place(32)])
    assert not barriers.needed([place(0), place(0, space="constant")], [place(16, space="rows")])


def test_reading_what_was_written_meets_once():
    barriers = Barriers()
    barriers.needed([place(0)], [place(16)])
    assert barriers.needed([place(24, 8)], [place(32)])
    assert not barriers.needed([place(16)], [place(48)])


def test_writing_what_was_read_or_written_meets():
    barriers = Barriers()
    barriers.needed([place(0)], [place(16)])
    assert barriers.needed([], [place(0)])
    assert barriers.needed([], [place(8, 1)])


def test_after_a_reset_nothing_is_waited_for():
    barriers = Barriers()
    barriers.needed([place(0)], [place(16)])
    barriers.reset()
    assert not barriers.needed([place(16)], [place(0)])
