"""Rows: the keys and values of the running sequences, one after the other by position, as GroupQueryAttention wants them.

onnxruntime's CPU provider has no attention over pages. The pages stay where keys and values live; a row is a copy of one
sequence's pages, made when the sequence first runs and kept while it runs: the operator appends a step's keys and values to it
in place, and they are then stored in the pages too. A row knows of each of its blocks which page, in which version, it equals; a
page that has been written since by anyone else, or a block of another page, is copied again before the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.ops import PagedKV
from trivium_onnxruntime.pages import F32, Pool, numbers_of, stored

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
_STRIDE = 256
"""Rows grow by so many positions at a time."""
_NOTHING = -2
"""A block that equals no page."""


class GroupRows:
    """The rows of one group. data: float32[layers, 2, rows, kv_heads, positions, head_dim]; pages, versions: int64[rows, blocks],
    what each block equals."""

    def __init__(self, pool: Pool, group: int, rows: int, positions: int) -> None:
        spec = pool.spec.groups[group].spec
        assert isinstance(spec, PagedKV)
        layers, size = len(pool.spec.groups[group].states), pool.spec.page_size
        self._pool, self._group, self._size = pool, group, size
        self.data: F32 = np.zeros((layers, 2, rows, spec.kv_heads, positions, spec.head_dim), np.float32)
        self.pages = np.full((rows, positions // size), _NOTHING, np.int64)
        self.versions = np.full_like(self.pages, -1)

    def _stale(self, base: int, tables: I32, blocks: I64) -> npt.NDArray[np.bool_]:
        """bool[seqs, blocks]: which blocks of rows base.. don't equal the pages of `tables`; only the first blocks[i] count, and
        of these no page that a window has left behind."""
        own = slice(base, base + len(tables))
        width = tables.shape[1]
        same = (self.pages[own, :width] == tables) & (self.versions[own, :width] == self._pool.versions[tables])
        return np.asarray(~same & (tables >= 0) & (np.arange(width) < blocks[:, None]))

    def order(self, base: int, tables: I32, blocks: I64) -> I64 | None:
        """An order of the sequences in which more of them find their row; None if they all do as they are."""
        if not self._stale(base, tables, blocks).any():
            return None
        last = [int(t[n - 1]) if n else _NOTHING - 1 for t, n in zip(tables, blocks.tolist())]
        where = {int(page): row for row, page in enumerate(self._last(base, blocks))}
        rows = [where.pop(page, -1) for page in last]
        free = iter(sorted(set(range(len(rows))) - set(rows)))
        return np.argsort([row if row >= 0 else next(free) for row in rows])

    def _last(self, base: int, blocks: I64) -> list[int]:
        """The page that the last known block of each row equals."""
        own = self.pages[base : base + len(blocks)]
        known = (own >= 0).cumsum(axis=1).argmax(axis=1)
        return own[np.arange(len(own)), known].tolist()  # type: ignore[no-any-return]

    def fill(self, base: int, tables: I32, blocks: I64) -> None:
        """Copies what the rows lack of the first blocks[i] pages of each sequence."""
        row, block = np.nonzero(self._stale(base, tables, blocks))
        if not len(row):
            return
        ids, row = tables[row, block].astype(np.int64), row + base
        held = self._pool.keys_and_values(self._group)
        for layer, pages in zip(self._by_block(), _flat(held)):
            layer[row, :, block] = numbers_of(pages[ids])
        self.pages[row, block], self.versions[row, block] = ids, self._pool.versions[ids]

    def keep(self, row: I64, position: I64, slots: I64) -> None:
        """Stores positions of rows (one entry a token) in the slots of the pages; slot -1: nowhere."""
        real = slots >= 0
        if not real.all():
            self.pages[row[~real], position[~real] // self._size] = _NOTHING
            row, position, slots = row[real], position[real], slots[real]
        page, offset = np.divmod(slots, self._size)
        held, dtype = self._pool.keys_and_values(self._group), self._pool.spec.dtype
        if len(row) < len(held):
            made = self.data[:, :, row, :, position]
            held[:, :, page, :, offset] = made if dtype == "float32" else stored(made, dtype)
        else:
            for rows, pages in zip(_flat(self.data), _flat(held)):
                pages[page, :, offset] = stored(rows[row, :, position], dtype)
        self._pool.written(page)
        self.pages[row, position // self._size] = page
        self.versions[row, position // self._size] = self._pool.versions[page]

    def newest(self, state: int, row: I64, position: I64) -> tuple[F32, F32]:
        """Keys and values of positions of rows, [tokens, kv_heads * head_dim] each."""
        made = self.data[state][:, row, :, position]
        return made[:, 0].reshape(len(row), -1), made[:, 1].reshape(len(row), -1)

    def _by_block(self) -> list[Any]:
        """Of each layer's keys or values a view [rows, kv_heads, blocks, page_size, head_dim]."""
        shape = self.data.shape
        return list(self.data.reshape(-1, *shape[2:4], self.pages.shape[1], self._size, shape[-1]))


def _flat(held: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Views of each layer's keys and of its values."""
    return [part for layer in held for part in layer]


class Rows:
    """The rows of all groups of PagedKV, as many and as long as the largest step so far needed, within `budget` bytes (but always
    one row). `generation` changes with the memory that they lie in."""

    def __init__(self, pool: Pool, budget: int) -> None:
        self._pool, self._budget = pool, budget
        self.groups: dict[int, GroupRows] = {}
        self.rows, self.positions, self.generation = 0, 0, 0

    @property
    def nbytes(self) -> int:
        return sum(g.data.nbytes for g in self.groups.values())

    @property
    def budgeted(self) -> bool:
        """Whether there is any group that needs rows."""
        return bool(self._paged())

    def at_most(self, positions: int) -> int:
        """How many rows of so many positions the budget allows."""
        each = sum(self._bytes(g) for g in self._paged()) * self._rounded(positions)
        return max(1, self._budget // max(each, 1))

    def reserve(self, rows: int, positions: int) -> None:
        """Room for so many rows of so many positions; what was there is copied again from the pages when it grows."""
        if rows <= self.rows and positions <= self.positions:
            return
        self.positions = max(self.positions, self._rounded(positions))
        self.rows = min(max(self.rows, rows), self.at_most(self.positions))
        self.rows = max(self.rows, rows)
        self.groups.clear()
        self.groups.update((g, GroupRows(self._pool, g, self.rows, self.positions)) for g in self._paged())
        self.generation += 1

    def _rounded(self, positions: int) -> int:
        stride = int(np.lcm(_STRIDE, self._pool.spec.page_size))
        return -(-positions // stride) * stride

    def _paged(self) -> list[int]:
        return [g for g, group in enumerate(self._pool.spec.groups) if isinstance(group.spec, PagedKV)]

    def _bytes(self, group: int) -> int:
        which = self._pool.spec.groups[group]
        assert isinstance(which.spec, PagedKV)
        return 8 * len(which.states) * which.spec.kv_heads * which.spec.head_dim
