"""The page pool in host memory, and pages in and out of the neutral format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError
from trivium.ops import Group, KVSpec, LatentKV, PagedKV, Recurrent, StateSpec
from trivium.plugin import Pages
from trivium.plugin.hostinfo import total_memory

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
KV_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def stored(numbers: F32, dtype: str) -> Array:
    """float32 numbers as a KV format holds them, rounded to nearest, ties to even; bfloat16 as bit patterns."""
    if dtype != "bfloat16":
        return numbers.astype(KV_DTYPES[dtype])
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def numbers_of(held: Array) -> F32:
    """The reverse of stored()."""
    return (held.astype(np.uint32) << np.uint32(16)).view(np.float32) if held.dtype == np.uint16 else held.astype(np.float32)


def geometry(spec: StateSpec) -> StateSpec:
    """Groups whose layers differ only in their window share the pool's arrays."""
    return dataclasses.replace(spec, window=None) if isinstance(spec, PagedKV) else spec


def page_bytes(spec: KVSpec) -> int:
    """Bytes of one page: a place for every kind of state that may lie in it."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in _layout(spec).values())


def _layout(spec: KVSpec) -> dict[tuple[StateSpec, int], tuple[tuple[int, ...], Any]]:
    """(geometry, part) -> shape of that part of one page, all layers first, and its dtype. Keys and values lie head by head,
    [layers, 2, kv_heads, page_size, head_dim], as attention reads them; other states as in the neutral format."""
    layers: dict[StateSpec, int] = {}
    for group in spec.groups:
        layers[geometry(group.spec)] = max(layers.get(geometry(group.spec), 0), len(group.states))
    places: dict[tuple[StateSpec, int], tuple[tuple[int, ...], Any]] = {}
    for state, count in layers.items():
        if isinstance(state, PagedKV):
            places[state, 0] = (count, 2, state.kv_heads, spec.page_size, state.head_dim), KV_DTYPES[spec.dtype]
            continue
        for part, shape in enumerate(state.page_shapes(spec.page_size)):
            places[state, part] = (count, *shape), np.float32 if isinstance(state, Recurrent) else KV_DTYPES[spec.dtype]
    return places


class Pool:
    """All pages. `versions`[page] changes whenever anything is written into the page."""

    def __init__(self, spec: KVSpec, pages: int) -> None:
        each = page_bytes(spec)
        if pages * each > total_memory():
            raise CapacityError(f"{pages} pages of {each} bytes need {pages * each} bytes; there are {total_memory()}")
        self.spec = spec
        self.versions = np.zeros(pages, np.int64)
        self._writes = 0
        self._arrays: dict[tuple[StateSpec, int], Array] = {}
        for key, (shape, dtype) in _layout(spec).items():
            at = 2 if isinstance(key[0], PagedKV) else 1
            self._arrays[key] = np.moveaxis(np.zeros((pages, *shape), dtype), 0, at)  # a page's bytes lie together

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays.values())

    def keys_and_values(self, group: int) -> Array:
        """[layers, 2, pages, kv_heads, page_size, head_dim] of a group of PagedKV."""
        which = self.spec.groups[group]
        return self._arrays[geometry(which.spec), 0][: len(which.states)]

    def written(self, pages: Sequence[int] | Array) -> None:
        """Gives the pages a new version."""
        self._writes += 1
        self.versions[pages] = self._writes

    def export(self, group: int, ids: Sequence[int]) -> Pages:
        which = self.spec.groups[group]
        layers = range(len(which.states))
        if isinstance(which.spec, PagedKV):
            held = self.keys_and_values(group)
            tensors = [tuple(numbers_of(held[i, j][list(ids)].swapaxes(1, 2)) for j in (0, 1)) for i in layers]
        else:
            tensors = [tuple(numbers_of(a[i, list(ids)]) for a in self._parts(which)) for i in layers]
        return Pages(which, self.spec.page_size, self.spec.dtype, tuple(tensors))

    def import_(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        which = self.spec.groups[group]
        for i, tensors in enumerate(pages.tensors):
            for j, tensor in enumerate(tensors):
                numbers = np.asarray(tensor, np.float32)
                if isinstance(which.spec, PagedKV):
                    shape = len(ids), self.spec.page_size, which.spec.kv_heads, which.spec.head_dim
                    self.keys_and_values(group)[i, j][list(ids)] = stored(numbers.reshape(shape).swapaxes(1, 2), self.spec.dtype)
                else:
                    array = self._parts(which)[j]
                    array[i, list(ids)] = stored(numbers, "float32" if array.dtype == np.float32 else self.spec.dtype)
        self.written(list(ids))

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for (state, _), array in self._arrays.items():
            at = np.moveaxis(array, 2 if isinstance(state, PagedKV) else 1, 0)
            at[list(dst)] = at[list(src)]
        self.written(list(dst))

    def _parts(self, group: Group) -> list[Array]:
        parts = 2 if isinstance(group.spec, LatentKV) else 1
        return [self._arrays[group.spec, part] for part in range(parts)]
