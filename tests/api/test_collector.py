"""The garbage collector while something large is built that stays."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from trivium.collector import paused


@pytest.fixture(autouse=True)
def running_collector():
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.fixture
def collections():
    """Grows with every collection."""
    seen = []
    note = lambda *what: seen.append(what)
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def build():
    """More containers than a collection waits for."""
    return [[] for _ in range(20 * gc.get_threshold()[0])]


def test_nothing_is_collected_inside_and_what_was_made_there_counts_as_old(collections):
    with paused():
        collections.clear()
        made = build()
        assert not collections and not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & set(map(id, made))
    kept = build()
    assert collections and len(kept) == len(made), "it runs again"


def test_an_exception_inside_leaves_the_collector_on():
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_what_the_process_has_frozen_stays_frozen():
    code = "import gc; from trivium.collector import paused; gc.freeze(); before = gc.get_freeze_count()"
    code += "\nwith paused():\n    assert gc.isenabled()\nprint(0 < gc.get_freeze_count() == before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_the_first_use_of_the_package_imports_without_collections_and_leaves_the_collector_on():
    code = "import gc, trivium, trivium.collector\nseen = []; gc.collect(); gc.callbacks.append(lambda *what: seen.append(what))"
    code += "\ntrivium.LLM; print(len(seen), gc.isenabled(), gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "0"]
