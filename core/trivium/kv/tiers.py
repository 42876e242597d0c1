"""Pages outside the pool: a host tier and a disk tier for what the pool gives away, and requests that came from another engine.

A page is found by its key and verified by what it was computed from (root, digest of the page before, token ids), whatever tier it
is in. A page that can't be had any more is a miss, never an error: its tokens are computed again.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from trivium.errors import InvalidRequestError, PageFormatError
from trivium.kv.neutral import TYPES, Array, Layout, decode, encode, pack, stored_dtype, unpack
from trivium.kv.pool import Evicted, Key, Origin
from trivium.ops import Pages

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_IN_FLIGHT = 256 << 20
"""Bytes that may wait to be written, and bytes that may be read ahead. What is beyond is not written, or read when needed."""
EXPORTED = 64
"""Pages that leave the pool at a time: they pass through float32."""
MAX_FILE = 1 << 30
"""Bytes of a file that are read: more is no page."""
STALE_SECONDS = 3600
"""Age from which a half-written file is taken for that of a process that died."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}-\d+\.kvpage(\.[0-9a-f]{16}\.tmp)?")


class Mover(Protocol):
    """The part of a Session that moves pages."""

    def start_export(self, group: int, ids: Sequence[int]) -> Callable[[], Pages]: ...
    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None: ...


class Page(NamedTuple):
    """One page outside the pool. arrays: in stored form, in the order of Layout.shapes."""

    origin: Origin
    arrays: tuple[Array, ...]


class Faults:
    """Pages that could not be moved, or were not what they should be."""

    count = 0

    def add(self, reason: object, pages: int = 1) -> None:
        import logging

        log, known, self.count = logging.getLogger(__name__), self.count, self.count + pages
        what = "pages of the KV cache are passed over, what they hold is computed again (told once): %s"
        log.log(logging.DEBUG if known else logging.WARNING, what, reason)


class Rate:
    """Units a second, a moving average over what was measured last; before that, `prior`."""

    def __init__(self, prior: float) -> None:
        self._units, self._seconds = prior * 0.05, 0.05

    def add(self, units: float, seconds: float) -> None:
        self._units, self._seconds = 0.8 * self._units + units, 0.8 * self._seconds + seconds

    def seconds(self, units: float) -> float:
        """Time that `units` would take."""
        return units * self._seconds / self._units


class Disk:
    """A folder of pages, one file each, used by any number of processes and models.

    A file is written under a temporary name and renamed. Not synced: what a crash of the system leaves is found by its checksum.
    When the files grow beyond `capacity` bytes, the least recently used go (by modification time, which reading renews); each
    process counts what it writes itself, and the others' since its last look. A file with a page's name that is damaged or says
    other than its name is removed; files with other names are never touched.
    """

    def __init__(self, folder: Path, capacity: int, layout: Layout) -> None:
        self._folder, self._capacity, self._layout = folder, capacity, layout
        self._prefix = f"{layout.digest}-"
        self._names: set[str] = set()
        self._queued: dict[Key, Page] = {}
        self._waiting = self._used = 0
        self.faults = Faults()
        self._closed = False
        self.rate = Rate(300e6)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._look(0)
        except OSError as e:
            raise InvalidRequestError(f"kv_disk_path {folder} can't be used: {e}", param="kv_disk_path") from e
        from concurrent.futures import ThreadPoolExecutor

        self._writer = ThreadPoolExecutor(1, "trivium-kv-write")
        self._reader = ThreadPoolExecutor(1, "trivium-kv-read")

    def holds(self, key: Key) -> bool:
        return key in self._queued or self._name(key) in self._names

    def write(self, key: Key, page: Page) -> None:
        """Writes behind the caller's back, or drops the page if too much waits already; after close(), on this thread."""
        size = sum(array.nbytes for array in page.arrays)
        busy = not self._closed and self._waiting + size > MAX_IN_FLIGHT
        if busy or size > self._capacity or self.holds(key):
            return
        self._queued[key] = page
        self._waiting += size
        if self._closed:
            self._write(key, page, size)
        else:
            self._writer.submit(self._write, key, page, size)

    def read(self, key: Key, origin: Origin) -> Future[Page | None]:
        """Starts to read a page; None if it can't be had, and it is not offered again then."""
        return self._reader.submit(self._read, key, origin)

    def close(self) -> None:
        """Waits for what is to be written; nothing can be read any more."""
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)
        self._closed = True

    def _name(self, key: Key) -> str:
        return f"{self._prefix}{key[0].hex()}-{key[1]}.kvpage"

    def _said(self, group: int, origin: Origin) -> dict[str, Any]:
        return {"layout": self._layout.describe(group), "root": origin.root.hex(), "previous": origin.previous.hex()}

    def _write(self, key: Key, page: Page, size: int) -> None:
        name, group, dtype = self._name(key), key[1], stored_dtype(self._layout.spec, key[1])
        temporary = self._folder / f"{name}.{os.urandom(8).hex()}.tmp"
        arrays = {part: (dtype, array) for part, array in zip(self._layout.shapes(group, 1), page.arrays)}
        arrays["tokens"] = "int32", np.frombuffer(page.origin.tokens, np.int32)
        try:
            data = pack(self._said(group, page.origin), arrays)
            if self._used + len(data) > self._capacity:
                self._look(len(data))
            temporary.write_bytes(data)
            temporary.replace(self._folder / name)
            self._names.add(name)
            self._used += len(data)
        except OSError as e:
            self.faults.add(e)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        finally:
            del self._queued[key]
            self._waiting -= size

    def _read(self, key: Key, origin: Origin) -> Page | None:
        if (queued := self._queued.get(key)) is not None and queued.origin == origin:
            return queued
        path, began = self._folder / self._name(key), time.perf_counter()
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE)
            page = self._parse(data, key[1], origin)
            os.utime(path)
        except (OSError, PageFormatError, MemoryError) as e:
            self._names.discard(path.name)
            if not isinstance(e, FileNotFoundError):  # which is another process that made room
                self.faults.add(f"{path}: {e}")
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            return None
        self.rate.add(len(data), time.perf_counter() - began)
        return page

    def _parse(self, data: bytes, group: int, origin: Origin) -> Page:
        (meta, arrays), shapes = unpack(data), self._layout.shapes(group, self._layout.spec.page_size)
        tokens = arrays.pop("tokens", ("", np.zeros(0)))[1].tobytes()
        said = self._said(group, origin)
        want = said, origin.tokens, {name: (stored_dtype(self._layout.spec, group), shape) for name, shape in shapes.items()}
        if want != ({n: meta.get(n) for n in said}, tokens, {n: (dtype, array.shape) for n, (dtype, array) in arrays.items()}):
            raise PageFormatError("it belongs to another model, layout or text than its name says")
        return Page(origin, tuple(arrays[name][1] for name in shapes))

    def _look(self, room: int) -> None:
        """Sees what is in the folder and makes `room` in it; a tenth of the capacity more, so as not to come back at once."""
        files, stale = dict[str, tuple[float, int]](), time.time() - STALE_SECONDS
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process makes room, too
                if match := _NAME.fullmatch(path.name):
                    stat = path.stat()
                    if not match[1]:
                        files[path.name] = stat.st_mtime, stat.st_size
                    elif stat.st_mtime < stale:
                        path.unlink()
        self._used, limit = sum(size for _, size in files.values()), self._capacity - room
        target = limit - self._capacity // 10 if self._used > limit else limit
        for name in sorted(files, key=lambda name: files[name]):
            if self._used <= target:
                break
            (self._folder / name).unlink(missing_ok=True)
            self._used -= files.pop(name)[1]
        self._names = {name for name in files if name.startswith(self._prefix)}


class Tiers:
    """What became of published pages that the pool gave away: `host_bytes` of them in memory, then the disk, if there is one."""

    def __init__(self, layout: Layout, host_bytes: int, disk: Disk | None = None) -> None:
        self._layout, self._capacity, self._disk = layout, host_bytes, disk
        self._host: OrderedDict[Key, Page] = OrderedDict()
        self._reads: OrderedDict[Key, Future[Page | None]] = OrderedDict()
        self._free, self._leaving = host_bytes, list[tuple[Callable[[], Pages], list[Evicted]]]()
        numbers = [sum(map(math.prod, layout.shapes(g, layout.spec.page_size).values())) for g in range(len(layout.spec.groups))]
        self._sizes = [n * np.dtype(TYPES[stored_dtype(layout.spec, g)]).itemsize for g, n in enumerate(numbers)]
        self.importing, self.prefill = Rate(2e9), Rate(1000.0)
        self.faults = Faults() if disk is None else disk.faults

    def where(self, key: Key) -> str | None:
        """ "host", "disk", or None: it is nowhere."""
        held = key in self._host or any(key == e.key for _, mine in self._leaving for e in mine)
        return "host" if held else "disk" if self._disk is not None and self._disk.holds(key) else None

    def worth(self, keys: Iterable[Key], tokens: int) -> bool:
        """Whether restoring these pages is quicker than computing the `tokens` tokens that would be saved."""
        seconds = 0.0
        for key in keys:
            seconds += self.importing.seconds(self._sizes[key[1]])
            if key not in self._host and self._disk is not None:
                seconds += self._disk.rate.seconds(self._sizes[key[1]])
        return seconds < self.prefill.seconds(tokens)

    def prefetch(self, pages: Iterable[tuple[Key, Origin]]) -> None:
        """Starts to read ahead what is only on disk."""
        for key, origin in pages:
            if self._disk is not None and key not in self._reads and self.where(key) == "disk":
                self._reads[key] = self._disk.read(key, origin)
                if len(self._reads) * max(self._sizes) > MAX_IN_FLIGHT:
                    self._reads.popitem(last=False)

    def fetch(self, key: Key, origin: Origin) -> Page | None:
        """A page, verified; waits for the device or the disk if need be. None: it can't be had, and is not offered again."""
        self.settle()
        if (page := self._host.pop(key, None)) is not None:
            if page.origin == origin:
                self._host[key] = page  # as the last to go
                return page
            self._free += self._sizes[key[1]]
        return (self._reads.pop(key, None) or self._disk.read(key, origin)).result() if self._disk is not None else None

    def save(self, mover: Mover, evicted: list[Evicted]) -> None:
        """Starts to take in pages that the pool has given away. To be called before anything is written into them."""
        new = {e.key: e for e in evicted if self.where(e.key) is None}
        groups = [[e for e in new.values() if e.key[1] == g] for g in range(len(self._sizes))]
        parts = [found[at : at + EXPORTED] for found in groups for at in range(0, len(found), EXPORTED)]
        for mine in parts:
            try:
                self._leaving.append((mover.start_export(mine[0].key[1], [e.page for e in mine]), mine))
            except Exception as fault:
                self.faults.add(fault, len(mine))

    def settle(self) -> None:
        """Takes in what save() has started with, waiting for it if need be."""
        while self._leaving:
            landing, mine = self._leaving.pop(0)
            try:
                tensors = [t for layer in landing().tensors for t in layer]
            except Exception as fault:
                self.faults.add(fault, len(mine))
                continue
            for i, e in enumerate(mine):
                arrays = tuple(np.array(encode(t[i], stored_dtype(self._layout.spec, e.key[1]))) for t in tensors)
                self._put(e.key, Page(e.origin, arrays))

    def close(self, mover: Mover, published: list[Evicted]) -> None:
        """Puts what fits on disk there, what was used last being kept, and ends."""
        if self._disk is not None:
            self._disk.close()
            for key, page in self._host.items():
                self._disk.write(key, page)
            self._free = 0
            self.save(mover, published)
            self.settle()

    def _put(self, key: Key, page: Page) -> None:
        self._host[key] = page
        self._free -= self._sizes[key[1]]
        while self._free < 0 and self._host:
            old, gone = self._host.popitem(last=False)
            self._free += self._sizes[old[1]]
            if self._disk is not None:
                self._disk.write(old, gone)


class Parcel(NamedTuple):
    """The cache of one sequence under way, token by token. computed: tokens it covers. parts: of each group the first token that
    is there and, for each array of a page, dtype and stored array[tokens, ...] (of a recurrent group the state itself)."""

    computed: int
    parts: tuple[tuple[int, tuple[tuple[str, Array], ...]], ...]

    def page(self, group: int, block: int, page_size: int, paged: bool) -> tuple[Array, ...]:
        """float32 arrays of one page of any page size; zeros where there is nothing."""
        first, arrays = self.parts[group]
        if not paged:
            return tuple(decode(array, dtype) for dtype, array in arrays)
        start, stop = max(block * page_size, first), min((block + 1) * page_size, self.computed)
        found = [np.zeros((page_size, *array.shape[1:]), np.float32) for _, array in arrays]
        for out, (dtype, array) in zip(found, arrays):
            out[start - block * page_size : stop - block * page_size] = decode(array[start - first : stop - first], dtype)
        return tuple(found)
