"""The pool of pages: reference counts, a free list, and full pages that can be found again by content."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trivium.errors import CapacityError

Key = tuple[bytes, int]
"""Content of a full page: the chained digest of everything up to its end, and the group it belongs to."""


class Origin(NamedTuple):
    """What a full page was computed from: root of the digest chain, digest of the page before it, the page's own tokens (int32) and
    what stands in place of some of them."""

    root: bytes
    previous: bytes
    tokens: bytes


class Evicted(NamedTuple):
    """A published page that was given away; until the next step runs it still holds its content."""

    page: int
    key: Key
    origin: Origin


class BlockPool:
    """Hands out page ids. Every operation is O(1) a page, but that an eviction passes over idle pages which others continue.

    A page is owned (refs > 0), free, or idle: nobody owns it, but its content is published under a key and `share` revives it.
    Idle pages are given away last, least recently released first, but none before the published pages that continue it, unless
    those are owned. What was given away is noted in `evicted` if its origin is known.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.refs = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * pages
        self._origins: list[tuple[Key | None, Origin | None]] = [(None, None)] * pages
        self._continued: Counter[Key | None] = Counter()
        self.evicted: list[Evicted] = []

    @property
    def available(self) -> int:
        """Pages that allocate() could hand out now."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with unknown content, each owned once. Raises CapacityError, and changes nothing, if there are fewer."""
        if count > self.available:
            raise CapacityError(f"{count} pages were asked for, {self.available} of {self.pages} are free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of these published or owned pages."""
        for page in pages:
            self._idle.pop(page, None)
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less. Release a sequence's last page first: then the start of a prefix, which others share, outlives it."""
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0 and self._keys[page] is None:
                self._free.append(page)
            elif self.refs[page] == 0:
                self._idle[page] = None

    def publish(self, page: int, key: Key, parent: Key | None = None, origin: Origin | None = None) -> None:
        """The owned page `page` is full and holds what `key` says, which is of no use without what `parent` says. The first page
        published under a key keeps it."""
        if self._pages.setdefault(key, page) == page and self._keys[page] is None:
            self._keys[page], self._origins[page] = key, (parent, origin)
            self._continued[parent] += 1

    def lookup(self, key: Key) -> int | None:
        """The page that holds this content, owned or idle."""
        return self._pages.get(key)

    def published(self) -> list[Evicted]:
        """Every page that lookup() finds and whose origin is known, those last that would be evicted last."""
        owned = (page for page, refs in enumerate(self.refs) if refs)
        found = ((page, self._keys[page], self._origins[page][1]) for page in [*self._idle, *owned])
        return [Evicted(page, key, origin) for page, key, origin in found if key is not None and origin is not None]

    def check(self, owners: Mapping[int, int], written: Sequence[int] = ()) -> None:
        """Raises AssertionError unless page p has exactly owners[p] owners and every page is free, idle or owned, those that are to
        be written by one that nobody finds."""
        assert all(owners[page] == 1 and self._keys[page] is None for page in written), "a page that will be written has two owners"
        wrong = [p for p, refs in enumerate(self.refs) if refs != owners.get(p, 0)]
        assert not wrong, f"pages (id, references, owners): {[(p, self.refs[p], owners.get(p, 0)) for p in wrong[:8]]}"
        places = Counter(self._free) + Counter(self._idle.keys()) + Counter(p for p, refs in enumerate(self.refs) if refs)
        assert len(places) == self.pages and places.total() == self.pages, "a page is lost or in two places"
        assert all(self._keys[page] == key for key, page in self._pages.items()), "a published page lost its key"
        assert self._continued == Counter(self._origins[page][0] for page in self._pages.values()), "continued pages miscounted"

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody will look for what the idle ones of these pages hold: they are free, and the first to be handed out again, so that
        the memory in use stays what owners need at a time."""
        for page in pages:
            if page in self._idle:
                self._unpublish(page)
                self._free.append(page)

    def _evict(self) -> int:
        page = next((page for page in self._idle if not self._continued[self._keys[page]]), next(iter(self._idle)))
        key, origin = self._keys[page], self._origins[page][1]
        self._unpublish(page)
        if key is not None and origin is not None:
            self.evicted.append(Evicted(page, key, origin))
        return page

    def _unpublish(self, page: int) -> None:
        del self._idle[page]
        parent, key = self._origins[page][0], self._keys[page]
        self._keys[page], self._origins[page] = None, (None, None)
        if key is not None:
            del self._pages[key]
            self._continued[parent] -= 1
            if self._continued[parent] == 0:
                del self._continued[parent]


class Ledger:
    """What a plan may still spend: counts the pages of a BlockPool through takes and drops without touching the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.free = pool.available
        self._refs = pool.refs
        self._delta: dict[int, int] = {}

    def take(self, pages: Iterable[int]) -> None:
        """Plans to share these pages."""
        for page in pages:
            self.free -= self.owners(page) == 0
            self._delta[page] = self._delta.get(page, 0) + 1

    def drop(self, pages: Iterable[int]) -> None:
        """Plans to release these pages."""
        for page in pages:
            self._delta[page] = self._delta.get(page, 0) - 1
            self.free += self.owners(page) == 0

    def split(self, pages: Sequence[int]) -> None:
        """Plans to replace those of these pages that have more than one owner by copies."""
        shared = [page for page in pages if self.owners(page) > 1]
        self.free -= len(shared)
        self.drop(shared)

    def owners(self, page: int) -> int:
        """How many a page has by now."""
        return self._refs[page] + self._delta.get(page, 0)
