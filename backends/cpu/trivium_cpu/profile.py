"""What the operations of a tape take, against what this machine can do at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trivium.ops import Batch
from trivium.plugin import OperatorTime, Profile
from trivium_cpu import _native
from trivium_cpu.places import Place

Sizes = Mapping[str, int]
"""Rows of a step by symbol: tokens, rows, pooled, seqs."""
_REPEATS = 7
_DOT_ROUNDS = 200_000
_DOT_OPERATIONS = 12 * 64 * 2
_FMA_ROUNDS = 500_000


class Work(NamedTuple):
    """bytes: that can't help being moved. operations: of arithmetic; a multiply-add counts as two."""

    bytes: int
    operations: int


WorkOf = Callable[[Sizes, Batch], Work]


class Cost(NamedTuple):
    """What an operation of the tape does in a step: it reads and writes places once, four bytes a number. Its arithmetic is
    an operation for each number written, or that of `extra`, which may also add bytes. unit: a key of the ceilings."""

    read: tuple[Place, ...]
    written: tuple[Place, ...]
    extra: WorkOf | None = None
    unit: str = "float32"

    def work(self, sizes: Sizes, batch: Batch) -> Work:
        more = self.extra(sizes, batch) if self.extra else Work(0, 0)
        made = 0 if self.extra else _numbers(self.written, sizes)
        return Work(4 * _numbers((*self.read, *self.written), sizes) + more.bytes, made + more.operations)


def _numbers(places: Iterable[Place], sizes: Sizes) -> int:
    return sum(p.width * sizes.get(p.space, 1) for p in places if p.space not in ("constant", "input", "kv"))


def projection(rows: Any, matrices: Sequence[Any]) -> WorkOf:
    """Every weight is read once, and multiplied and added once a row. rows: an Extent."""
    nbytes, products = sum(m.nbytes for m in matrices), sum(m.shape[0] * m.shape[1] for m in matrices)

    def work(sizes: Sizes, batch: Batch) -> Work:
        count = rows.factor * sizes.get(rows.symbol, 1)
        return Work(nbytes if count else 0, 2 * count * products)

    return work


def attention(key_bytes: float, products: int, window: int, causal: bool, chunk: int = 0) -> WorkOf:
    """Every key and value that some query sees is read once; each pair of query and key takes `products` multiply-adds.
    key_bytes: of one token's keys and values. window, chunk: 0, none."""

    def oldest(position: Any) -> Any:
        return np.maximum(0, position + 1 - window) if window else position // chunk * chunk if chunk else np.zeros_like(position)

    def work(sizes: Sizes, batch: Batch) -> Work:
        queries = np.diff(batch.query_starts).astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        first = contexts - queries
        positions = np.arange(queries.sum()) + np.repeat(first - batch.query_starts[:-1], queries)
        end = positions + 1 if causal else np.repeat(contexts, queries)
        read = (contexts - oldest(first))[queries > 0].sum()
        return Work(int(read * key_bytes), 2 * int((end - oldest(positions)).sum()) * products)

    return work


def both_ways(products: int, window: int | None) -> WorkOf:
    """Each pair of tokens of a sequence, no farther from each other than the window, takes `products` multiply-adds."""

    def work(sizes: Sizes, batch: Batch) -> Work:
        tokens = np.diff(batch.query_starts).astype(np.int64)
        reach = tokens if window is None else np.minimum(window, tokens)
        pairs = tokens**2 - (tokens - reach - 1).clip(0) * (tokens - reach)
        return Work(0, 2 * int(pairs.sum()) * products)

    return work


def sparse(key_bytes: float, products: int, top_k: int) -> WorkOf:
    """Each token reads top_k positions, or all that it sees, which take `products` multiply-adds each. Bytes are the least there
    can be: all tokens of a sequence read the same."""

    def work(sizes: Sizes, batch: Batch) -> Work:
        queries = np.diff(batch.query_starts).astype(np.int64)
        ends = np.repeat(batch.context_lens.astype(np.int64) - batch.query_starts[1:], queries)
        pairs = np.minimum(ends + np.arange(queries.sum()) + 1, top_k).sum()
        keys = np.minimum(batch.context_lens, top_k)[queries > 0].sum()
        return Work(int(keys * key_bytes), 2 * int(pairs) * products)

    return work


def store(token_bytes: float) -> WorkOf:
    """A token's keys and values go to its page, one operation a number read."""
    return lambda sizes, batch: Work(int(sizes["tokens"] * token_bytes), 0)


class Meter:
    """Adds up times and work while profiling is on. costs: of each operation of the tape."""

    def __init__(self, tape: Any, runtime: Any, costs: Sequence[Cost], matrices: Sequence[Any]) -> None:
        self._tape, self._runtime, self._costs, self._matrices = tape, runtime, costs, matrices
        self.on = False
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._work = [Work(0, 0)] * len(self._costs)
        self._host: dict[str, tuple[int, float]] = {}

    def switch(self, on: bool) -> Profile:
        """What was seen; then starts again, or stops."""
        seen = self._profile()
        self._clear()
        self.on = on
        self._tape.set_profile(on)
        return seen

    def step(self, sizes: Sizes, batch: Batch) -> None:
        """A step will run."""
        self._steps += 1
        self._work = [
            Work(*map(sum, zip(w, c.work(sizes, batch), strict=True))) for w, c in zip(self._work, self._costs, strict=True)
        ]

    def host(self, name: str, seconds: float) -> None:
        """A call ran on the host."""
        calls, before = self._host.get(name, (0, 0.0))
        self._host[name] = calls + 1, before + seconds

    def _profile(self) -> Profile:
        if not self._steps:
            return Profile((), {})
        ceilings = measure_ceilings(self._runtime, self._matrices)
        found: dict[str, OperatorTime] = {}
        for (name, seconds), work, cost in zip(self._tape.profile(), self._work, self._costs, strict=True):
            floor = max(work.bytes / ceilings["bytes"], work.operations / ceilings[cost.unit])
            o = found.get(name, OperatorTime(name, 0, 0.0, 0, 0, 0.0))
            found[name] = OperatorTime(
                name,
                o.calls + self._steps,
                o.seconds + seconds,
                o.bytes + work.bytes,
                o.operations + work.operations,
                o.floor_s + floor,
            )
        host = [OperatorTime(f"{name} (host)", calls, seconds, 0, 0, 0.0) for name, (calls, seconds) in self._host.items()]
        return Profile(tuple(sorted((*found.values(), *host), key=lambda o: -o.seconds)), ceilings)


def measure_ceilings(runtime: Any, matrices: Sequence[Any]) -> dict[str, float]:
    """Bytes a second that all threads together read of these weights (of 64 MB, if there are none), and operations a second of
    int8 dot products and float32 multiply-adds on registers. Medians."""
    import statistics

    threads, linear = runtime.threads, _native.linear
    matrices = list(matrices) or [linear.pack(linear.Arena(), "float32", "float32", 1024, np.zeros((1 << 14, 1 << 12), np.uint8))]
    reads = linear.measure_read(matrices, threads, _REPEATS)
    dots = linear.measure_dots(runtime.linear, _DOT_ROUNDS, threads, _REPEATS)
    return {
        "bytes": sum(m.nbytes for m in matrices) / statistics.median(reads),
        "int8": _DOT_OPERATIONS * _DOT_ROUNDS * threads / statistics.median(dots),
        "float32": 2 * statistics.median(runtime.multiply_add_rate(_FMA_ROUNDS) for _ in range(_REPEATS)),
    }
