"""Pages: export, import and copy keep every bit, and touch nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.conformance.lab import Lab
from trivium.conformance.numbers import EXACT, Array, round_to
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.errors import CapacityError
from trivium.ops import Group, KVSpec, LatentKV, PagedKV, Recurrent, StateSpec
from trivium.plugin import Pages, Session

POOL = 9
_GROUPS: dict[str, tuple[StateSpec, ...]] = {
    "one group": (PagedKV(2, 16),),
    "window and full groups": (PagedKV(3, 8, window=16), PagedKV(3, 8)),
    "latent": (LatentKV(32, 8),),
    "recurrent": (Recurrent((2, 4, 8)),),
}


def checks(lab: Lab) -> Iterator[Check]:
    """For each kind of state and each KV dtype; then what a pool must say about its size."""
    for name, specs in _GROUPS.items():
        for dtype in lab.capabilities.kv_dtypes if specs[0].paged else lab.capabilities.kv_dtypes[:1]:
            yield Check("pages", f"{name}, {dtype}", lambda s=specs, d=dtype: judge_moves(lab, s, d))  # type: ignore[misc]
    yield Check("pages", "sizes", lambda: judge_sizes(lab))


def _spec(lab: Lab, specs: tuple[StateSpec, ...], dtype: str) -> KVSpec:
    """Two layers a group."""
    groups = tuple(Group(spec, (2 * i, 2 * i + 1)) for i, spec in enumerate(specs))
    return KVSpec(lab.page_size, dtype, groups)


def random_pages(rng: np.random.Generator, spec: KVSpec, group: int, count: int) -> Pages:
    """`count` pages of numbers that the KV dtype holds exactly, where that is a plain float or int8."""
    which = spec.groups[group]
    shapes = which.spec.page_shapes(spec.page_size)

    def numbers(shape: tuple[int, ...]) -> Array:
        return round_to(rng.standard_normal((count, *shape), dtype=np.float32), spec.dtype)

    layers = tuple(tuple(numbers(shape) for shape in shapes) for _ in which.states)
    return Pages(which, spec.page_size, spec.dtype, layers)


def _flat(pages: Pages) -> list[Array]:
    return [np.asarray(t, np.float32).reshape(len(t), -1) for layer in pages.tensors for t in layer]


def _expect_equal(what: str, got: Pages, want: Pages) -> None:
    for a, b in zip(_flat(got), _flat(want), strict=True):
        if a.shape != b.shape or not np.array_equal(a, b):
            raise Mismatch(f"{what}: pages differ from what they should hold")


def judge_moves(lab: Lab, specs: tuple[StateSpec, ...], dtype: str) -> Verdict:
    """Pages of every group go in, are copied and come out again, into the same and into a second session."""
    spec = _spec(lab, specs, dtype)
    rng = np.random.default_rng(1)
    with lab.session() as first, lab.session() as second:
        first.kv_store(spec, POOL)
        second.kv_store(spec, POOL)
        for group in range(len(specs)):
            _judge_group(first, second, spec, group, random_pages(rng, spec, group, 4))
    return Verdict("export, import, copy and move between sessions keep every bit")


def _judge_group(first: Session, second: Session, spec: KVSpec, group: int, pages: Pages) -> None:
    ids = [7, 0, 3, 5]
    first.import_pages(group, ids, pages)
    held = first.export_pages(group, ids)
    if spec.dtype in EXACT:
        _expect_equal("import, export", held, pages)
    if (held.page_size, held.dtype) != (spec.page_size, spec.dtype) or held.group != spec.groups[group]:
        raise Mismatch(f"exported pages call themselves {held.group}, {held.page_size} tokens of {held.dtype}")
    first.import_pages(group, ids, held)
    _expect_equal("export, import, export", first.export_pages(group, ids), held)
    first.copy_pages([7, 3], [1, 2])
    _expect_equal("copy", first.export_pages(group, [1, 0, 2, 5]), held)
    _expect_equal("copy leaves its source", first.export_pages(group, ids), held)
    second.import_pages(group, [8, 6, 4, 2], held)
    _expect_equal("another session", second.export_pages(group, [8, 6, 4, 2]), held)


def judge_sizes(lab: Lab) -> Verdict:
    """page_bytes and memory() agree, and a pool that can't fit is a CapacityError that names bytes."""
    spec = _spec(lab, _GROUPS["one group"], lab.kv_dtype)
    with lab.session() as session:
        size = session.page_bytes(spec)
        session.kv_store(spec, POOL)
        held = session.memory().kv
        if size <= 0 or not POOL * size <= held <= 2 * POOL * size + (1 << 20):
            raise Mismatch(f"{POOL} pages of {size} bytes, but memory().kv says {held}")
    with lab.session() as session:
        pages = (1 << 56) // size
        try:
            session.kv_store(spec, pages)
        except CapacityError as e:
            return Verdict(f"{size} bytes a page; too large a pool: {e}")
        raise Mismatch(f"{pages} pages of {size} bytes were accepted")
