"""Huge pages under packed weights where the system takes long to give them: small ones first, which become huge between steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_cases import batch_of, embedding_program
from trivium.ops import Weight
from trivium_cpu.plugin import CpuBackend

HUGE = 2 << 20
SHAPE = (4096, 512)  # 8 MB of float32


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.fixture
def session() -> Iterator[Any]:
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": 2})
    yield session
    session.close()


def load(session: Any, table: np.ndarray) -> Any:
    return session.load(Weight("table", SHAPE, "float32", table, lambda d: d), "float32")


def huge_bytes(array: np.ndarray) -> int:
    """Bytes of huge pages in the mappings that hold an array."""
    first, found, inside = array.__array_interface__["data"][0], 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin < first + array.nbytes and first < end
        elif inside and name == "AnonHugePages:":
            found += 1024 * int(rest[0])
    return found


def gives_huge_pages() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text() and tuple(map(int, _release())) >= (6, 1)


def _release() -> list[str]:
    return Path("/proc/sys/kernel/osrelease").read_text().split("-")[0].split(".")[:2]


def test_weights_in_small_pages_become_huge_and_keep_their_numbers(session: Any, table: np.ndarray) -> None:
    session._runtime.assume_slow_pages()
    resident = load(session, table)
    session._finish_loading()
    runtime, packed = session._runtime, resident.matrix.packed
    assert table.nbytes <= runtime.small_bytes <= table.nbytes + 2 * HUGE
    assert huge_bytes(packed) == 0
    before = runtime.small_bytes
    assert runtime.enlarge_pages(0.0)  # one at least
    assert runtime.small_bytes == before - HUGE
    assert not runtime.enlarge_pages(60.0)
    assert runtime.small_bytes == 0
    np.testing.assert_array_equal(session.read_weight(resident), table)
    if gives_huge_pages():
        assert huge_bytes(packed) >= table.nbytes // HUGE * HUGE


def test_matrices_that_are_packed_one_after_the_other_leave_no_page_out(session: Any) -> None:
    if not gives_huge_pages():
        pytest.skip("this system has no huge pages, or can't make them afterwards")
    session._runtime.assume_slow_pages()
    tables = [np.full((1040, 520), i, np.float32) for i in range(6)]  # 2.2 MB: every border lies within a huge page
    loaded = [session.load(Weight(f"t{i}", t.shape, "float32", t, lambda d: d), "float32") for i, t in enumerate(tables)]
    session._runtime.enlarge_pages(60.0)
    assert huge_bytes(loaded[0].matrix.packed) >= sum(t.nbytes for t in tables) // HUGE * HUGE
    for resident, table in zip(loaded, tables):
        np.testing.assert_array_equal(session.read_weight(resident), table)


def test_pages_become_huge_between_steps_but_not_before_the_first(session: Any, table: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.setattr("trivium_cpu.executable._ENLARGING", 0.0)
    monkeypatch.setattr("trivium_cpu.executable._ENLARGING_SHARE", 1e9)
    session._runtime.assume_slow_pages()
    executable = session.compile(embedding_program(*SHAPE), {"table": load(session, table)})
    left = []
    for _ in range(10):
        logits = executable.run(batch_of([1, 4095])).output("logits")
        left.append(session._runtime.small_bytes)
        np.testing.assert_array_equal(logits, table[[1, 4095]])
    assert left[0] >= table.nbytes
    assert left[1] == left[0] - HUGE
    assert left[-1] == 0


def test_a_closed_session_lets_go_of_memory_that_was_still_small(session: Any, table: np.ndarray) -> None:
    session._runtime.assume_slow_pages()
    load(session, table)
    session.close()
    assert session._runtime.small_bytes == 0
