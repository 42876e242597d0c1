"""Which page holds which token: block tables of all running sequences, prefix hits, and pages that fall out of a window."""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from trivium.kv.neutral import Array, decode, encode, stored_dtype
from trivium.kv.pool import BlockPool, Key, Origin
from trivium.kv.tiers import Mover, Parcel, Tiers
from trivium.ops import KVSpec, Pages, Span
from trivium.ops.batch import I32, I64


class Stream:
    """Tokens of one sequence and its place in the cache.

    length: tokens known. computed: how many of them are in the cache. row: in the block tables, -1: it holds no pages. blocks:
    columns of its row that have pages, in every paged group; first[g]: first of them that is still held in group g. forked: pages
    that it will write may have other owners, see KVCache.fork(). parcel: what another engine computed, until it is admitted. given:
    how many tokens it came with. media: which of them stand for something else. kept: pages of the recurrent groups with the states
    after `kept_at` tokens (-1: none), see KVCache.keeps(). branch: end of the longest prefix that others had.
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
        self.parcel: Parcel | None = None
        self.given = self.length
        self.kept: list[int] = []
        self.kept_at = -1
        self.branch = 0
        self.media: Sequence[Span] = ()

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
    """A cached prefix of `tokens` tokens in `blocks` pages. pages[g]: those of group g that it needs to read, the last ones, as far
    as they are in the pool; of a recurrent group the one behind the last block. restore: (group, block) of the others; fresh: how
    many pages they take that a stream without a hit would not; content: what collect() has read for them, by (group, block): tier,
    dtype and stored arrays. declined: tokens that are computed sooner than restored.
    """

    blocks: int
    tokens: int
    pages: list[list[int]]
    restore: tuple[tuple[int, int], ...]
    fresh: int
    content: dict[tuple[int, int], tuple[str, str, tuple[Array, ...]]]
    declined: int = 0

    def restored(self, tier: str) -> int:
        """Pages' columns for which something was read from `tier`; "": from what came with the request."""
        return len({block for (_, block), (name, _, _) in self.content.items() if name == tier})


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
    one of a recurrent state: whoever writes next gets a copy, the last owner writes in place.

    A stream has one page for its state in a recurrent group, column 0 of its row. Where a step ends at the end of a page, that page
    is published under the same key as the others, and never written again either: the stream goes on in a copy and keeps it until
    the next page is full. So a prefix is found if all pages that it reads are there and, of each recurrent group, one.
    """

    def __init__(self, spec: KVSpec, num_pages: int, max_seqs: int) -> None:
        self.spec = spec
        self.page_size = spec.page_size
        self.tiers: Tiers | None = None
        self.private = False
        """No stream finds what another has published."""
        self.pool = BlockPool(num_pages)
        self.paged = [g for g, group in enumerate(spec.groups) if group.spec.paged]
        self.recurrent = [g for g, group in enumerate(spec.groups) if not group.spec.paged]
        # The first position after k full pages of p tokens reads from k*p - w + 1 on, so ceil((w-1)/p) pages before it are needed.
        windows = [group.spec.window if group.spec.paged else 2 for group in spec.groups]  # a state is read as if it were one page
        self._lookback = [sys.maxsize if w is None else -(-(w - 1) // spec.page_size) for w in windows]
        self._tables = np.full((len(spec.groups), max_seqs, 16), -1, np.int32)
        self._rows = list(range(max_seqs - 1, -1, -1))

    def blocks(self, tokens: int) -> int:
        """Pages of one full group that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def peak_pages(self, tokens: int) -> int:
        """Most pages that a sequence holds on its way to `tokens` tokens, if it goes page by page."""
        blocks = self.blocks(tokens)
        return sum(min(blocks, back + 1) for back in self._lookback)

    def keeps(self, stream: Stream, tokens: int) -> bool:
        """Whether grow() to `tokens` tokens keeps the states as they are by then and gives the stream copies: at the end of a page,
        for others to find, and before drafts, which may be wrong."""
        here = stream.computed % self.page_size == 0 or tokens > stream.length
        return here and bool(self.recurrent) and stream.computed not in (0, stream.kept_at)

    def chunk(self, stream: Stream, start: int, count: int) -> int:
        """`count` tokens of prefill from `start` on, or so many fewer that they end where states are worth keeping: where others
        went on differently, else at the end of the last page that a prompt like this can share."""
        if not self.recurrent or self.private:
            return count
        end = min(start + count, stream.given - 1)
        stop = stream.branch if start < stream.branch < end else end - end % self.page_size
        return stop - start if stop > start else count

    def pages_to_grow(self, stream: Stream, tokens: int, blocks: int) -> int:
        """Pages that grow() will allocate for a stream that has `blocks` blocks by then, without those that copies take."""
        fresh = len(self.recurrent) if stream.row < 0 else 0
        return fresh + max(0, self.blocks(tokens) - blocks) * len(self.paged)

    def reach(self, stream: Stream, blocks: int, free: int) -> int:
        """Tokens up to which a stream that has `blocks` blocks can grow with `free` pages."""
        if stream.row < 0:
            free -= len(self.recurrent)
        if free < 0 or not self.paged:
            return 0 if free < 0 else sys.maxsize
        return (blocks + free // len(self.paged)) * self.page_size

    def match(self, stream: Stream, limit: int, *, restore: bool = True) -> Hit:
        """The longest cached prefix of at most `limit` tokens: for every group, all pages that it will read are in the pool, or,
        with `restore`, come from elsewhere sooner than they would be computed. Notes stream.branch."""
        if restore and stream.parcel is not None:
            return self._unpack(stream, stream.parcel)
        hit = self._longest(stream, limit, lambda key: self.pool.lookup(key) is not None)
        if restore and self.tiers is not None:
            longer = self._longest(stream, limit, self._held_somewhere)
            if self.tiers.worth(((stream.keys[b], g) for g, b in longer.restore), saved := longer.tokens - hit.tokens):
                return longer
            return hit._replace(declined=saved)
        return hit

    def prefetch(self, stream: Stream, limit: int) -> None:
        """Has read ahead what a stream that just came in will want from disk."""
        if self.tiers is not None:
            hit = self._longest(stream, limit, self._held_somewhere)
            self.tiers.prefetch(((stream.keys[b], g), self._origin(stream, b)) for g, b in hit.restore)

    def collect(self, stream: Stream, hit: Hit) -> bool:
        """Reads what a hit wants restored; False: some of it can't be had, so match() will say something else now."""
        for g, block in hit.restore:
            if stream.parcel is not None:
                hit.content[g, block] = "", "float32", stream.parcel.page(g, block, self.page_size, g in self.paged)
            elif self.tiers is not None and (g, block) not in hit.content:
                key = stream.keys[block], g
                tier, page = self.tiers.where(key), self.tiers.fetch(key, self._origin(stream, block))
                if page is None or tier is None:
                    return False
                hit.content[g, block] = tier, stored_dtype(self.spec, g), page.arrays
        return True

    def _longest(self, stream: Stream, limit: int, there: Callable[[Key], bool]) -> Hit:
        """The longest prefix for which all pages that will be read are `there`; those that the pool lacks are to be restored."""
        runs, best, stream.branch = [0] * len(self._lookback), 0, 0
        for block in range(limit // self.page_size if runs else 0):
            key = self._key(stream, block)
            runs = [run + 1 if there((key, g)) else 0 for g, run in enumerate(runs)]
            if all(run >= min(block + 1, back) for run, back in zip(runs, self._lookback)):
                best = block + 1
            elif any(run <= block for run, back in zip(runs, self._lookback) if back == sys.maxsize):
                break
            else:
                stream.branch = (block + 1) * self.page_size
        pages, restore = [list[int]() for _ in self._lookback], list[tuple[int, int]]()
        for g, (mine, back) in enumerate(zip(pages, self._lookback)):
            for block in range(max(0, best - back), best):
                page = self.pool.lookup((stream.keys[block], g))
                if page is None:
                    restore.append((g, block))
                else:
                    mine.append(page)
        return Hit(best, best * self.page_size, pages, tuple(restore), len(restore), {})

    def _held_somewhere(self, key: Key) -> bool:
        return self.pool.lookup(key) is not None or (self.tiers is not None and self.tiers.where(key) is not None)

    def adopt(self, stream: Stream, hit: Hit) -> None:
        """Gives the stream, which holds nothing, a row and those pages of a hit that are in the pool; fill() allocates the others,
        once all hits of a step are adopted, as that may evict what they share."""
        self._seat(stream)
        self._widen(hit.blocks)
        for g, pages in enumerate(hit.pages):
            self.pool.share(pages)
            missing = {block for group, block in hit.restore if group == g}
            stream.first[g] = hit.blocks - len(pages) - len(missing)
            self._put(stream, g, [b for b in range(stream.first[g], hit.blocks) if b not in missing], pages)
        stream.blocks = hit.blocks if self.paged else 0
        stream.computed = hit.tokens

    def fill(self, stream: Stream, hit: Hit) -> None:
        """Allocates the pages of an adopted hit that are to be restored."""
        for (g, block), page in zip(hit.restore, self.pool.allocate(len(hit.restore))):
            self._put(stream, g, [block], [page])

    def _put(self, stream: Stream, g: int, blocks: list[int], pages: list[int]) -> None:
        self._tables[g, stream.row, blocks if g in self.paged else [0] * len(blocks)] = pages

    def restore(self, mover: Mover, stream: Stream, hit: Hit) -> None:
        """Writes what was collected for a hit into its pages, and publishes those that are whole."""
        for g in sorted({g for g, _ in hit.restore}):
            blocks, began = [b for group, b in hit.restore if group == g], time.perf_counter()
            _, dtype, first = hit.content[g, blocks[0]]
            parts = [decode(np.stack([hit.content[g, b][2][i] for b in blocks]), dtype) for i in range(len(first))]
            which, each = self.spec.groups[g], len(first) // len(self.spec.groups[g].states)
            layers = tuple(tuple(parts[i : i + each]) for i in range(0, len(parts), each))
            pages = self._tables[g, stream.row, blocks].tolist() if g in self.paged else [self._states(stream)[g]]
            mover.import_pages(g, pages, Pages(which, self.page_size, self.spec.dtype, layers))
            if self.tiers is not None:
                self.tiers.importing.add(len(blocks) * sum(a.nbytes for a in first), time.perf_counter() - began)
        for g, block in hit.restore:
            whole = stream.parcel is None or stream.parcel.parts[g][0] <= block * self.page_size
            if whole and (block + 1) * self.page_size <= hit.tokens:
                self._publish(stream, block, g)

    def pack(self, mover: Mover, stream: Stream) -> Parcel | None:
        """What has been computed of a stream, to be continued elsewhere; None: nothing."""
        if stream.parcel is not None or stream.row < 0 or not stream.computed:
            return stream.parcel
        parts = []
        for g, group in enumerate(self.spec.groups):
            first = stream.first[g] if group.spec.paged else 0
            columns = self._tables[g, stream.row, first : self.blocks(stream.computed)].tolist()
            pages = columns if group.spec.paged else [self._states(stream)[g]]
            tensors = [t for layer in mover.start_export(g, pages)().tensors for t in layer]
            count, dtype = stream.computed - first * self.page_size, stored_dtype(self.spec, g)
            tokens = [t.reshape(-1, *t.shape[2:])[:count] if group.spec.paged else t[0] for t in tensors]
            parts.append((first * self.page_size, tuple((dtype, np.array(encode(t, dtype))) for t in tokens)))
        return Parcel(stream.computed, tuple(parts))

    def fork(self, parent: Stream, child: Stream) -> None:
        """Gives the child, which begins with the tokens that the parent has computed, a row and all the parent's pages."""
        self._seat(child)
        blocks = self.blocks(parent.computed)
        source, copy = self._tables[:, parent.row], self._tables[:, child.row]
        copy[self.recurrent, 0] = list(self._states(parent).values())
        copy[self.paged, :blocks] = source[self.paged, :blocks]
        child.computed, child.blocks, child.first, child.keys = parent.computed, blocks, parent.first.copy(), parent.keys.copy()
        child.forked = parent.forked = True
        self.pool.share(self.held(child))

    def holds(self, stream: Stream, tokens: int) -> bool:
        """Whether grow() has nothing to do, as for most tokens that are decoded: the page is there, and nobody else's."""
        return not stream.forked and tokens <= stream.blocks * self.page_size

    def written(self, stream: Stream) -> list[int]:
        """The pages that the next token of a stream may change."""
        return [page for _, _, page in self._last(stream, self.keeps(stream, stream.length))]

    def grow(self, stream: Stream, tokens: int) -> list[Copy]:
        """Makes room for the first `tokens` tokens and gives the stream what it will write for itself: the copies that this takes
        have to be made before. Raises CapacityError if there are too few pages; then nothing has changed but that states which it
        had kept may be let go."""
        keeps = self.keeps(stream, tokens)
        shared = [place for place in self._last(stream, keeps) if self.pool.refs[place[2]] > 1] if stream.forked else []
        states = self._states(stream) if keeps else {}
        if keeps:
            self._let_go(stream)
        pages = self.pool.allocate(self.pages_to_grow(stream, tokens, stream.blocks) + len(shared) + len(states))
        copies = [Copy(*place, pages.pop()) for place in (*shared, *((g, 0, page) for g, page in states.items()))]
        for g, column, _, dst in copies:
            self._tables[g, stream.row, column] = dst
        self.pool.release(page for _, _, page in shared)
        if keeps:
            stream.kept, stream.kept_at = [*states.values()], stream.computed
        stream.forked = False
        if pages and stream.row < 0:
            self._seat(stream)
            for g in self.recurrent:
                self._tables[g, stream.row, 0] = pages.pop()
        if pages:
            blocks = self.blocks(tokens)
            self._widen(blocks)
            self._tables[self.paged, stream.row, stream.blocks : blocks] = np.reshape(pages, (len(self.paged), -1))
            stream.blocks = blocks
        return copies

    def shrink(self, stream: Stream, blocks: int, copies: Iterable[Copy] = ()) -> None:
        """Undoes grow(), which returned `copies`, of a stream that had `blocks` blocks, or the later part of it."""
        stream.forked = True
        for g, column, src, dst in copies:
            if src in stream.kept:
                stream.kept.remove(src)
            else:
                self.pool.share([src])
            self.pool.release([dst])
            self._tables[g, stream.row, column] = src
        stream.kept_at = stream.kept_at if stream.kept else -1
        if stream.blocks > blocks:
            self.pool.release(reversed(self.held(stream, blocks)))
            self._tables[self.paged, stream.row, blocks : stream.blocks] = -1
            stream.blocks = blocks

    def take_back(self, stream: Stream, count: int) -> None:
        """Only `count` of the tokens that a stream has room for were right. Recurrent states are again those before the first of
        them, which all are to be computed again."""
        if not self.recurrent:
            self.advance(stream, count)
        else:
            self.pool.release(self._tables[self.recurrent, stream.row, 0].tolist())
            self._tables[self.recurrent, stream.row, 0] = stream.kept
            stream.kept, stream.kept_at = [], -1
        self.shrink(stream, self.blocks(stream.computed))

    def rewind(self, stream: Stream) -> None:
        """Forgets what a failed step may have spoilt: the last, partly filled page; with recurrent states, everything."""
        if self.recurrent:
            self.release(stream)
        stream.computed -= stream.computed % self.page_size

    def advance(self, stream: Stream, count: int) -> None:
        """`count` more tokens are in the cache: publishes the pages they filled, and states if they end with a page; frees pages
        that fell out of a window, and states that were kept before."""
        before = stream.computed // self.page_size
        stream.computed += count
        stream.parcel = None
        full = stream.computed // self.page_size
        if full == before:
            return
        for block in range(before, full):
            for g in self.paged:
                self._publish(stream, block, g)
        if stream.kept_at not in (-1, stream.computed):
            self._let_go(stream)
        for g in self.recurrent if stream.computed == full * self.page_size else ():
            self._publish(stream, full - 1, g)
        for g in self.paged:
            first, last = stream.first[g], full - self._lookback[g]
            if last > first:
                self._give_back(self._tables[g, stream.row, first:last].tolist(), forget=self.private)
                self._tables[g, stream.row, first:last] = -1
                stream.first[g] = last

    def release(self, stream: Stream, *, ended: bool = False) -> None:
        """Gives everything back. What was published can be found again, but what is private ends with its stream."""
        if stream.row < 0:
            return
        self._give_back(self.held(stream)[::-1], forget=ended and self.private)
        self._tables[:, stream.row, : max(stream.blocks, 1)] = -1
        self._rows.append(stream.row)
        stream.row, stream.blocks, stream.computed, stream.forked = -1, 0, 0, False
        stream.kept, stream.kept_at = [], -1

    def _let_go(self, stream: Stream) -> None:
        """Others may find the states that a stream has kept, unless later ones serve as well: behind what it came with."""
        replaced = stream.kept_at > stream.given and stream.computed % self.page_size == 0
        self._give_back(stream.kept, forget=replaced or self.private)
        stream.kept, stream.kept_at = [], -1

    def _give_back(self, pages: list[int], *, forget: bool) -> None:
        self.pool.release(pages)
        if forget:
            self.pool.forget(pages)

    def held(self, stream: Stream, start: int = 0) -> list[int]:
        """The pages a stream owns from column `start` on, column by column, so that all groups of a prefix age together."""
        columns = self._tables[:, stream.row, start : max(stream.blocks, 1)].T.ravel()
        return [*(stream.kept if start == 0 else ()), *columns[columns >= 0].tolist()] if stream.row >= 0 else []

    def check_idle(self) -> None:
        """Raises AssertionError if anything is still held; O(1)."""
        held = self.pool.pages - self.pool.available
        assert held == 0 and len(self._rows) == self._tables.shape[1], f"{held} pages are still held although nothing runs"

    def block_tables(self, rows: Sequence[int], blocks: int) -> I32:
        """int32[groups, len(rows), max(blocks, 1)]: a copy of those rows, as Batch wants them."""
        return np.ascontiguousarray(self._tables.take(rows, 1)[:, :, : max(blocks, 1)])  # half of what indexing costs

    def slots(self, spans: Sequence[tuple[int, int, int]]) -> I64:
        """int64[groups, tokens]: page * page_size + offset of tokens start..stop of each (row, start, stop); for recurrent groups
        the offset is 0. Loops over pages, never over tokens."""
        found: list[list[int]] = [[] for _ in self.spec.groups]
        size, page = self.page_size, self._tables.item
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
        shape = len(found), len(found[0]) if found else sum(stop - start for _, start, stop in spans)
        return np.ndarray(shape, np.int64, array("q", [slot for slots in found for slot in slots]))

    def check(self, streams: Iterable[Stream]) -> None:
        """Raises AssertionError unless the pages in use are exactly those of `streams`, and none is written while it is shared."""
        streams = list(streams)
        owners = Counter(page for s in streams for page in self.held(s))
        self.pool.check(owners, [page for s in streams if s.row >= 0 and not s.forked for page in self.written(s)])
        rows = [s.row for s in streams if s.row >= 0]
        assert len(set(rows)) == len(rows) and len(rows) + len(self._rows) == self._tables.shape[1], "a row is lost or used twice"
        assert (self._tables[:, self._rows] == -1).all(), "a free row still names pages"

    def _last(self, stream: Stream, keeps: bool) -> list[tuple[int, int, int]]:
        """(group, column, page) of what the next token may change and is there: the partly filled page, and recurrent states,
        unless the stream keeps them."""
        columns = range(stream.computed // self.page_size, stream.blocks)
        places = [(g, 0) for g in self.recurrent if not keeps] + [(g, column) for g in self.paged for column in columns]
        return [(g, column, int(self._tables[g, stream.row, column])) for g, column in places]

    def _states(self, stream: Stream) -> dict[int, int]:
        """The page of each recurrent group with the state after all computed tokens."""
        now = stream.kept if stream.kept_at == stream.computed else self._tables[self.recurrent, stream.row, 0].tolist()
        return dict(zip(self.recurrent, now))

    def _unpack(self, stream: Stream, parcel: Parcel) -> Hit:
        """All of what another engine has computed, as far as later tokens read it."""
        blocks, full = self.blocks(parcel.computed), parcel.computed // self.page_size
        firsts = [(g, max(parcel.parts[g][0] // self.page_size, full - self._lookback[g])) for g in self.paged]
        paged = [(g, block) for g, first in firsts for block in range(first, blocks)]
        items = (*paged, *((g, blocks - 1) for g in self.recurrent))
        return Hit(blocks, parcel.computed, [[] for _ in self._lookback], items, len(items if blocks == full else paged), {})

    def _origin(self, stream: Stream, block: int) -> Origin:
        return Origin(stream.root, stream.keys[block - 1] if block else stream.root, self._content(stream, block))

    def _content(self, stream: Stream, block: int) -> bytes:
        """What is in the page `block`: its tokens, and where which row of what stands in place of them."""
        stop = (start := block * self.page_size) + self.page_size
        shown = (span.cut(start, stop) for span in stream.media)
        parts = [np.array([s.start - start, s.stop - start, s.row], "<i4").tobytes() + s.tile.digest for s in shown if s]
        return stream.tokens(start, stop).tobytes() + b"".join(parts)

    def _publish(self, stream: Stream, block: int, g: int) -> None:
        """A page that a window leaves behind, or a state, is of use without those before it; a page of full attention is not."""
        key, full = self._key(stream, block), self._lookback[g] == sys.maxsize
        parent = (stream.keys[block - 1], g) if block and full else None
        origin = self._origin(stream, block) if self.tiers is not None else None
        page = self._states(stream)[g] if g in self.recurrent else int(self._tables[g, stream.row, block])
        self.pool.publish(page, (key, g), parent, origin)

    def _key(self, stream: Stream, block: int) -> bytes:
        """The digest of all up to the end of `block`."""
        for b in range(len(stream.keys), block + 1):
            content = (stream.keys[-1] if b else stream.root) + self._content(stream, b)
            stream.keys.append(blake2b(content, digest_size=32).digest())
        return stream.keys[block]

    def _seat(self, stream: Stream) -> None:
        stream.row = self._rows.pop()
        stream.first = [0] * len(self._lookback)

    def _widen(self, blocks: int) -> None:
        have = self._tables.shape[2]
        if blocks > have:
            more = max(blocks - have, have)
            self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, more)), constant_values=-1)
