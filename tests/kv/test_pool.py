"""The page pool against a brute-force model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trivium.errors import CapacityError
from trivium.kv import BlockPool, Ledger

PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """Owners as plain lists of pages; content as a plain mapping that only eviction may shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES)
        self.owners: list[list[int]] = []
        self.content: dict[tuple[bytes, int], int] = {}
        self.released: list[int] = []  # idle published pages, least recently released first
        self.counter = 0

    @property
    def owned(self) -> Counter[int]:
        return Counter(page for pages in self.owners for page in pages)

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        room = PAGES - len(self.owned)
        assert self.pool.available == room
        if count > room:
            with pytest.raises(CapacityError, match=f"{count} pages"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count and not set(pages) & set(self.owned)
        evicted = [p for p in pages if p in self.released]
        assert evicted == self.released[: len(evicted)], "the least recently released goes first"
        assert not evicted or room - len(self.released) == count - len(evicted), "idle pages go last"
        self.released = [p for p in self.released if p not in evicted]
        self.content = {k: p for k, p in self.content.items() if p not in evicted}
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        pages = [p for pages in self.owners for p in pages if p not in self.content.values()]
        if not pages:
            return
        page = data.draw(st.sampled_from(pages))
        key = (bytes([data.draw(st.integers(0, 5))]), 0)
        self.pool.publish(page, key)
        self.content.setdefault(key, page)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.content.values())))
        self.pool.share([page])
        self.released = [p for p in self.released if p != page]
        self.owners.append([page])

    @rule(pages=st.sets(st.integers(0, PAGES - 1)))
    def forget(self, pages: set[int]) -> None:
        self.pool.forget(sorted(pages))
        gone = [p for p in self.released if p in pages]
        self.released = [p for p in self.released if p not in pages]
        self.content = {k: p for k, p in self.content.items() if p not in gone}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(pages)
        self.released += [p for p in pages if p not in self.owned and p in self.content.values()]

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.owned)
        for letter in range(6):
            key = (bytes([letter]), 0)
            assert self.pool.lookup(key) == self.content.get(key)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_ledger_foresees_what_the_pool_will_do(data: st.DataObject) -> None:
    pool = BlockPool(PAGES)
    owners = [pool.allocate(data.draw(st.integers(0, 2))) for _ in range(3)]
    for i, page in enumerate(p for pages in owners for p in pages):
        pool.publish(page, (bytes([i]), 0))
    pool.release(owners.pop())
    published = [p for i in range(6) if (p := pool.lookup((bytes([i]), 0))) is not None]
    drops = data.draw(st.lists(st.sampled_from(range(len(owners))), unique=True))
    takes = data.draw(st.lists(st.sampled_from(published), max_size=4)) if published else []
    ledger = Ledger(pool)
    for owner in drops:
        ledger.drop(owners[owner])
    foreseen = ledger.free - len(set(takes)) if not any(map(ledger.owners, takes)) else None
    ledger.take(takes)
    before = pool.available
    assert before == Ledger(pool).free
    for owner in drops:
        pool.release(owners[owner])
    pool.share(takes)
    assert ledger.free == pool.available
    assert foreseen is None or foreseen == ledger.free


def test_check_finds_a_lost_page_and_a_wrong_count() -> None:
    pool = BlockPool(3)
    pages = pool.allocate(2)
    pool.check(Counter(pages))
    with pytest.raises(AssertionError):
        pool.check(Counter(pages[:1]))
    pool.refs[pages[0]] = 0
    with pytest.raises(AssertionError):
        pool.check(Counter(pages[1:]))


class ChainMachine(RuleBasedStateMachine):
    """Sequences whose pages continue one another, released in any order: a shared root outlives what continues it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES)
        self.chains: list[list[tuple[int, bytes]]] = []
        self.parent: dict[bytes, bytes | None] = {}

    def _published(self) -> dict[bytes, int]:
        return {key: page for key in self.parent if (page := self.pool.lookup((key, 0))) is not None}

    @rule(data=st.data(), length=st.integers(1, 3))
    def run(self, data: st.DataObject, length: int) -> None:
        """A sequence begins with a cached prefix, if it likes, and computes further pages, maybe some that are there already."""
        text = bytes(data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
        keys = [text[: i + 1] for i in range(length)]
        hits = 0
        while hits < length and self.pool.lookup((keys[hits], 0)) is not None and data.draw(st.booleans()):
            hits += 1
        shared = [self.pool.lookup((key, 0)) for key in keys[:hits]]
        self.pool.share([p for p in shared if p is not None])
        if self.pool.available < length - hits:
            self.pool.release([p for p in reversed(shared) if p is not None])
            return
        pages = [self._allocate() for _ in range(length - hits)]
        for i, page in enumerate(pages, hits):
            self.parent.setdefault(keys[i], keys[i - 1] if i else None)
            self.pool.publish(page, (keys[i], 0), (keys[i - 1], 0) if i else None)
        self.chains.append(list(zip([p for p in shared if p is not None] + pages, keys)))

    def _allocate(self) -> int:
        """One page; what was given up for it had nothing published behind it, unless that was true of no idle page."""
        before, idle = self._published(), {page for page, refs in enumerate(self.pool.refs) if not refs}
        [page] = self.pool.allocate(1)
        continued = {self.parent[key] for key in before}
        for key in before.keys() - self._published().keys() & continued:
            assert all(k in continued for k, p in before.items() if p in idle), f"{key!r} went before what continues it"
        return page

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release([page for page, _ in data.draw(st.sampled_from([chain, chain[::-1]]))])

    @invariant()
    def agrees(self) -> None:
        self.pool.check(Counter(page for chain in self.chains for page, _ in chain))


TestChains = ChainMachine.TestCase
TestChains.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
