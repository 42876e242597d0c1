"""The last minutes: what the dashboard shows, from the readings that /metrics aggregates too, and bounded whatever comes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from trivium import Metrics

from trivium_server.meters import Ended

STEP = 2.0
"""Seconds between readings of the engines, and the span of the shortest slice."""
KEPT = 900.0
"""Seconds that are kept."""
POINTS = 90
"""Most points of a series."""
REQUESTS = 60
"""Requests that are kept, of each model."""
TIMES = (
    "time_to_first_token", "inter_token_latency", "time_per_output_token", "queue_time", "prefill_time", "decode_time", "e2e_time",
)  # fmt: skip
_GAPS = "inter_token_latency"


class Digest:
    """Counts of times by buckets that grow by 4 %, from 10 microseconds to hours: a quantile is at most 2 % off, however many times
    there were. counts: int32[BUCKETS], kept by whoever gives it."""

    BUCKETS = 560
    _LEAST = 1e-5
    _SCALE = 1 / math.log(1.04)

    def __init__(self, counts: npt.NDArray[np.int32]) -> None:
        self._counts = counts

    @property
    def count(self) -> int:
        """How many there were."""
        return int(self._counts.sum())

    def add(self, seconds: float) -> None:
        """Another one."""
        bucket = int(math.log(max(seconds / self._LEAST, 1.0)) * self._SCALE)
        self._counts[min(bucket, self.BUCKETS - 1)] += 1

    def quantiles(self, shares: Sequence[float]) -> list[float] | None:
        """For each share the least time that so many of them don't exceed. None: there were none."""
        seen = self._counts.cumsum()
        if not (total := int(seen[-1])):
            return None
        found = np.searchsorted(seen, [share * total for share in shares])
        return [self._LEAST * math.exp((bucket + 0.5) / self._SCALE) for bucket in found.tolist()]


class Ran(NamedTuple):
    """A request that has ended. began: Unix seconds. times: of its own clock,
    without the gaps."""

    model: str
    operation: str
    began: float
    prompt_tokens: int
    generated_tokens: int
    reason: str
    times: Metrics


class Slice:
    """What ended in one span of time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = self.prompt_tokens = self.cached_tokens = 0
        self._counts = np.zeros((len(TIMES), Digest.BUCKETS), np.int32)
        self.digests = {name: Digest(counts) for name, counts in zip(TIMES, self._counts, strict=True)}

    def add(self, prompt_tokens: int, metrics: Metrics) -> None:
        """A request that has ended."""
        self.ended += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += metrics.num_cached_tokens
        for name, digest in self.digests.items():
            values = metrics.inter_token_latencies if name == _GAPS else (getattr(metrics, name),)
            for value in values:
                if value is not None:
                    digest.add(value)

    def update(self, other: Slice) -> None:
        """All of another's."""
        self.ended += other.ended
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self._counts += other._counts


class Reading(NamedTuple):
    """What the engines said. at: seconds of the clock. engines: statistics by model."""

    at: float
    engines: Mapping[str, Any]

    def total(self, field: str, models: Iterable[str]) -> float:
        """Of some models together; what is not loaded counts as nothing."""
        return sum(float(getattr(self.engines[name], field)) for name in models if name in self.engines)

    def prefilled(self, models: Iterable[str]) -> float:
        """Tokens computed so far that were neither made nor guessed: those of prompts."""
        guessed = self.total("draft_tokens", models) - self.total("accepted_tokens", models)
        return self.total("computed_tokens", models) - self.total("generated_tokens", models) - guessed


class Recent:
    """Of one server. clock: seconds, ever growing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.started = clock()
        self._slices: dict[str, deque[Slice]] = {}
        self._ran: dict[str, deque[Ran]] = {}
        self._readings: deque[Reading] = deque(maxlen=int(KEPT / STEP) + 2)

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.started

    def add(self, ended: Ended) -> None:
        """A request that has ended; one that nobody waited for has no times and is left out."""
        metrics = ended.metrics
        if metrics is None:
            return
        name, number = ended.served.version, int(self._clock() / STEP)
        slices = self._slices.setdefault(name, deque(maxlen=int(KEPT / STEP) + 1))
        if not slices or slices[-1].number != number:
            slices.append(Slice(number))
        slices[-1].add(ended.prompt_tokens, metrics)
        times = metrics._replace(inter_token_latencies=())  # as many as tokens, and counted by now
        one = Ran(name, ended.operation, ended.began, ended.prompt_tokens, ended.generated_tokens, ended.reasons[-1], times)
        self._ran.setdefault(name, deque(maxlen=REQUESTS)).append(one)

    def read(self, engines: Mapping[str, Any]) -> None:
        """What the engines say now."""
        self._readings.append(Reading(self._clock(), engines))

    @property
    def last(self) -> Reading:
        """The newest reading."""
        return self._readings[-1] if self._readings else Reading(self._clock(), {})

    def ran(self, models: Iterable[str]) -> list[Ran]:
        """The last requests, newest first."""
        found = [one for name in models for one in self._ran.get(name, ())]
        return sorted(found, key=lambda one: -(one.began + one.times.e2e_time))[:REQUESTS]

    def window(self, seconds: float, models: Sequence[str]) -> Window:
        """The last `seconds`, of some models together."""
        stride = math.ceil(seconds / STEP / POINTS)
        newest = int(self._clock() / STEP) // stride
        count = math.ceil(seconds / STEP / stride)
        window = Window(models, stride * STEP, [Slice(i) for i in range(newest - count + 1, newest + 1)])
        for one in self._all(models):
            if (at := one.number // stride - window.slices[0].number) >= 0:
                window.slices[at].update(one)
        for reading in self._readings:
            if (at := int(reading.at / STEP) // stride - window.slices[0].number) >= -1:
                window.readings[at] = reading
        return window

    def _all(self, models: Iterable[str]) -> Iterator[Slice]:
        return (one for name in models for one in self._slices.get(name, ()))


class Window:
    """Some minutes in slices of equal span, oldest first. readings: the last one of each slice by its place, -1 for what went
    before."""

    def __init__(self, models: Sequence[str], span: float, slices: Sequence[Slice]) -> None:
        self.models, self.span, self.slices = models, span, slices
        self.readings: dict[int, Reading] = {}

    def whole(self) -> Slice:
        """All of it as one slice."""
        found = Slice(0)
        for one in self.slices:
            found.update(one)
        return found

    def gauge(self, field: str) -> list[float | None]:
        """A figure of the engines at the end of each slice."""
        return [None if (r := self.readings.get(i)) is None else r.total(field, self.models) for i in range(len(self.slices))]

    def rate(self, total: Callable[[Reading], float]) -> list[float | None]:
        """How fast a total grew up to the end of each slice: its growth by the wall clock's seconds since the reading before."""
        found: list[float | None] = []
        before = self.readings.get(-1)
        for i in range(len(self.slices)):
            last = self.readings.get(i)
            grown = None if last is None or before is None else max(total(last) - total(before), 0.0) / (last.at - before.at)
            found.append(grown)
            before = last or before
        return found
