"""Which page holds which token: block tables of all running sequences, prefix hits, and pages that fall out of a window."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from trivium.kv.pool import BlockPool
from trivium.ops import KVSpec
from trivium.ops.batch import I32, I64


class Stream:
    """Tokens of one sequence and its place in the cache.

    length: tokens known. computed: how many of them are in the cache. row: its row in the block tables, -1: it holds no pages.
    blocks: columns of its row that have pages, in every paged group; first[g]: first of them that is still held in group g.
    forked: pages that it is going to write may have other owners, see KVCache.fork().
    """

    def __init__(self, tokens: Sequence[int], root: bytes) -> None:
        self.length = len(tokens)
        self._tokens = array("i", tokens)
        self.root = root
        self.keys: list[bytes] = []
        self.computed = 0
        self.row = -1
        self.blocks = 0
        self.first: list[int] = []
        self.forked = False

    @property
    def pending(self) -> int:
        """Tokens that are known and not in the cache."""
        return self.length - self.computed

    def tokens(self, start: int = 0, stop: int | None = None) -> array[int]:
        """int32 copy of tokens start..stop."""
        return self._tokens[start:stop]

    @property
    def last(self) -> int:
        """The last token."""
        return self._tokens[-1]

    def append(self, token: int) -> None:
        self._tokens.append(token)
        self.length += 1

    def truncate(self, length: int) -> None:
        """Takes back the tokens from `length` on, none of which may be in the cache."""
        del self._tokens[length:]
        self.length = length


class Hit(NamedTuple):
    """A cached prefix of `blocks` full pages; pages[i] are those that paged group i needs to read, the last ones."""

    blocks: int
    pages: list[list[int]]


class Copy(NamedTuple):
    """A page that a stream is about to write and shares: its copy `dst` takes the place of `src` in a column of group g."""

    g: int
    column: int
    src: int
    dst: int


def root_key(*parts: str) -> bytes:
    """Start of a digest chain: pages are shared only between requests with equal parts (model, adapter, tenant salt)."""
    texts = [part.encode() for part in parts]
    return blake2b(b"".join(len(text).to_bytes(8, "little") + text for text in texts), digest_size=32).digest()


class KVCache:
    """Block tables over one BlockPool.

    Keys of pages are chained 256-bit BLAKE2b digests, so equal keys mean equal tokens from the start on. Only full pages are
    published, and a full page is never written again, so whoever finds it needs no copy. fork() shares the last page too, and the
    one of a recurrent state: whoever writes next gets a copy, the last owner writes in place. A model with recurrent states
    publishes nothing: their one page a sequence holds the state after the last token only.
    """

    def __init__(self, spec: KVSpec, num_pages: int, max_seqs: int) -> None:
        self.page_size = spec.page_size
        self.pool = BlockPool(num_pages)
        self.paged = [g for g, group in enumerate(spec.groups) if group.spec.paged]
        self.recurrent = [g for g, group in enumerate(spec.groups) if not group.spec.paged]
        windows = [spec.groups[g].spec.window for g in self.paged]
        # The first position after k full pages of p tokens reads from k*p - w + 1 on, so ceil((w-1)/p) pages before it are needed.
        self._lookback = [sys.maxsize if w is None else -(-(w - 1) // spec.page_size) for w in windows]
        self._tables = np.full((len(spec.groups), max_seqs, 16), -1, np.int32)
        self._rows = list(range(max_seqs - 1, -1, -1))

    def blocks(self, tokens: int) -> int:
        """Pages of one full group that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def peak_pages(self, tokens: int, hit: Hit | None = None) -> int:
        """Most pages that a sequence holds on its way to `tokens` tokens, if it goes page by page; without those of `hit`."""
        blocks = self.blocks(tokens)
        held = [0] * len(self.paged) if hit is None else [len(p) for p in hit.pages]
        return len(self.recurrent) + sum(max(0, min(blocks, back + 1) - had) for back, had in zip(self._lookback, held))

    def pages_to_grow(self, stream: Stream, tokens: int, blocks: int) -> int:
        """Pages that grow() will allocate for a stream that has `blocks` blocks by then."""
        fresh = len(self.recurrent) if stream.row < 0 else 0
        return fresh + max(0, self.blocks(tokens) - blocks) * len(self.paged)

    def reach(self, stream: Stream, blocks: int, free: int) -> int:
        """Tokens up to which a stream that has `blocks` blocks can grow with `free` pages."""
        if stream.row < 0:
            free -= len(self.recurrent)
        if free < 0 or not self.paged:
            return 0 if free < 0 else sys.maxsize
        return (blocks + free // len(self.paged)) * self.page_size

    def match(self, stream: Stream, limit: int) -> Hit:
        """The longest cached prefix of at most `limit` tokens: for every group, all pages that it will read are there."""
        runs, best = [0] * len(self.paged), 0
        for block in range(limit // self.page_size if not self.recurrent else 0):
            key = self._key(stream, block)
            runs = [run + 1 if self.pool.lookup((key, g)) is not None else 0 for run, g in zip(runs, self.paged)]
            if all(run >= min(block + 1, back) for run, back in zip(runs, self._lookback)):
                best = block + 1
            elif any(run <= block for run, back in zip(runs, self._lookback) if back == sys.maxsize):
                break
        return self._hit(stream, best)

    def adopt(self, stream: Stream, hit: Hit) -> None:
        """Gives the stream, which holds nothing, a row and the pages of a hit."""
        self._seat(stream)
        self._widen(hit.blocks)
        for i, (g, pages) in enumerate(zip(self.paged, hit.pages)):
            self.pool.share(pages)
            stream.first[i] = hit.blocks - len(pages)
            self._tables[g, stream.row, stream.first[i] : hit.blocks] = pages
        stream.blocks = hit.blocks
        stream.computed = hit.blocks * self.page_size

    def fork(self, parent: Stream, child: Stream) -> None:
        """Gives the child, which begins with the tokens that the parent has computed, a row and all the parent's pages."""
        self._seat(child)
        blocks = self.blocks(parent.computed)
        source, copy = self._tables[:, parent.row], self._tables[:, child.row]
        copy[self.recurrent, 0] = source[self.recurrent, 0]
        copy[self.paged, :blocks] = source[self.paged, :blocks]
        child.computed, child.blocks, child.first, child.keys = parent.computed, blocks, parent.first.copy(), parent.keys.copy()
        child.forked = parent.forked = True
        self.pool.share(self.held(child))

    def written(self, stream: Stream) -> list[int]:
        """The pages of a forked stream that its next token may change."""
        return [page for _, _, page in self._written(stream)]

    def grow(self, stream: Stream, tokens: int) -> list[Copy]:
        """Makes room for the first `tokens` tokens and gives the stream what it will write for itself: the copies that this takes
        have to be made before. Raises CapacityError, and changes nothing, if there are too few pages."""
        shared = [place for place in self._written(stream) if self.pool.refs[place[2]] > 1]
        count = self.pages_to_grow(stream, tokens, stream.blocks)
        pages = self.pool.allocate(count + len(shared)) if count or shared else []
        copies = [Copy(*place, pages.pop()) for place in shared]
        for g, column, src, dst in copies:
            self.pool.release([src])
            self._tables[g, stream.row, column] = dst
        stream.forked = False
        self._extend(stream, tokens, pages)
        return copies

    def _extend(self, stream: Stream, tokens: int, pages: list[int]) -> None:
        if pages and stream.row < 0:
            self._seat(stream)
            for g in self.recurrent:
                self._tables[g, stream.row, 0] = pages.pop()
        if not pages:
            return
        blocks = self.blocks(tokens)
        self._widen(blocks)
        self._tables[self.paged, stream.row, stream.blocks : blocks] = np.reshape(pages, (len(self.paged), -1))
        stream.blocks = blocks

    def shrink(self, stream: Stream, blocks: int, copies: Iterable[Copy] = ()) -> None:
        """Undoes grow(), which returned `copies`, of a stream that had `blocks` blocks, or the later part of it."""
        stream.forked = True
        for g, column, src, dst in copies:
            self.pool.share([src])
            self.pool.release([dst])
            self._tables[g, stream.row, column] = src
        if stream.blocks == blocks:
            return
        self.pool.release(reversed(self._pages(stream, blocks)))
        self._tables[self.paged, stream.row, blocks : stream.blocks] = -1
        stream.blocks = blocks

    def rewind(self, stream: Stream) -> None:
        """Forgets what a failed step may have spoilt: the last, partly filled page; with recurrent states, everything."""
        if self.recurrent:
            self.release(stream)
        stream.computed -= stream.computed % self.page_size

    def advance(self, stream: Stream, count: int) -> None:
        """`count` more tokens are in the cache: publishes the pages they filled, frees those that fell out of a window."""
        before = stream.computed // self.page_size
        stream.computed += count
        full = stream.computed // self.page_size
        if full == before:
            return
        for block in range(before, full if not self.recurrent else before):
            key = self._key(stream, block)
            for g in self.paged:
                self.pool.publish(int(self._tables[g, stream.row, block]), (key, g))
        self._drop_outside(stream, full)

    def release(self, stream: Stream) -> None:
        """Gives everything back. What was published can be found again."""
        if stream.row < 0:
            return
        self.pool.release(reversed(self.held(stream)))
        self._tables[:, stream.row, : max(stream.blocks, 1)] = -1
        self._rows.append(stream.row)
        stream.row, stream.blocks, stream.computed, stream.forked = -1, 0, 0, False

    def held(self, stream: Stream) -> list[int]:
        """The pages a stream owns, first blocks first."""
        return self._pages(stream, 0) if stream.row >= 0 else []

    def check_idle(self) -> None:
        """Raises AssertionError if anything is still held; O(1)."""
        held = self.pool.pages - self.pool.available
        assert held == 0 and len(self._rows) == self._tables.shape[1], f"{held} pages are still held although nothing runs"

    def block_tables(self, rows: Sequence[int], blocks: int) -> I32:
        """int32[groups, len(rows), max(blocks, 1)]: a copy of those rows, as Batch wants them."""
        return np.ascontiguousarray(self._tables[:, rows, : max(blocks, 1)])

    def slots(self, spans: Iterable[tuple[int, int, int]]) -> I64:
        """int64[groups, tokens]: page * page_size + offset of tokens start..stop of each (row, start, stop); for recurrent groups
        the offset is 0. Loops over pages, never over tokens."""
        size, page, found = self.page_size, self._tables.item, [list[int]() for _ in self._tables]
        for row, start, stop in spans:
            for g in self.paged:
                at = start
                while at < stop:
                    block = at // size
                    end, shift = min(stop, (block + 1) * size), (page(g, row, block) - block) * size
                    found[g].extend(range(at + shift, end + shift))
                    at = end
            for g in self.recurrent:
                found[g].extend([page(g, row, 0) * size] * (stop - start))
        return np.array(found, np.int64)

    def check(self, streams: Iterable[Stream]) -> None:
        """Raises AssertionError unless the pages in use are exactly those of `streams`, and none is written while it is shared."""
        streams = list(streams)
        owners = Counter(page for s in streams for page in self.held(s))
        self.pool.check(owners)
        owned = all(s.forked or owners[page] == 1 for s in streams if s.row >= 0 for _, _, page in self._last(s))
        assert owned, "a page that will be written has two owners"
        rows = [s.row for s in streams if s.row >= 0]
        assert len(set(rows)) == len(rows) and len(rows) + len(self._rows) == self._tables.shape[1], "a row is lost or used twice"
        assert (self._tables[:, self._rows] == -1).all(), "a free row still names pages"

    def _pages(self, stream: Stream, start: int) -> list[int]:
        """Pages from column `start` on, column by column, so that all groups of a prefix age together."""
        columns = self._tables[:, stream.row, start : max(stream.blocks, 1)].T.ravel()
        pages: list[int] = columns[columns >= 0].tolist()
        return pages

    def _written(self, stream: Stream) -> list[tuple[int, int, int]]:
        return self._last(stream) if stream.forked else []

    def _last(self, stream: Stream) -> list[tuple[int, int, int]]:
        """(group, column, page) of what the next token may change and is there: recurrent states, the partly filled page."""
        columns = range(stream.computed // self.page_size, stream.blocks)
        places = [(g, 0) for g in self.recurrent] + [(g, column) for g in self.paged for column in columns]
        return [(g, column, int(self._tables[g, stream.row, column])) for g, column in places]

    def _hit(self, stream: Stream, blocks: int) -> Hit:
        def pages(g: int, back: int) -> list[int]:
            found = (self.pool.lookup((stream.keys[b], g)) for b in range(max(0, blocks - back), blocks))
            return [page for page in found if page is not None]

        return Hit(blocks, [pages(g, back) for g, back in zip(self.paged, self._lookback)])

    def _key(self, stream: Stream, block: int) -> bytes:
        """The digest of the tokens up to the end of `block`."""
        for b in range(len(stream.keys), block + 1):
            previous = stream.keys[-1] if b else stream.root
            content = stream.tokens(b * self.page_size, (b + 1) * self.page_size).tobytes()
            stream.keys.append(blake2b(previous + content, digest_size=32).digest())
        return stream.keys[block]

    def _drop_outside(self, stream: Stream, full: int) -> None:
        for i, (g, back) in enumerate(zip(self.paged, self._lookback)):
            if full - back > stream.first[i]:
                gone = slice(stream.first[i], full - back)
                self.pool.release(self._tables[g, stream.row, gone].tolist())
                self._tables[g, stream.row, gone] = -1
                stream.first[i] = full - back

    def _seat(self, stream: Stream) -> None:
        stream.row = self._rows.pop()
        stream.first = [0] * len(self.paged)

    def _widen(self, blocks: int) -> None:
        have = self._tables.shape[2]
        if blocks > have:
            more = max(blocks - have, have)
            self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, more)), constant_values=-1)
