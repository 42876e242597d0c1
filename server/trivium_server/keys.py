"""API keys: how they are kept and written down, what each may do, and how much of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trivium_server.faults import Refusal

SCOPES = ("inference", "metrics", "admin")
"""What a route may ask for. Keys that say nothing have all but the last."""
_GRACE = 5
"""Looks for a place, 20 ms apart: a client has read its answer, and may ask again, before its call has ended here."""
_LIMITS = ("requests-per-minute", "tokens-per-minute", "concurrent-requests")


@dataclass(frozen=True)
class Key:
    """A key as it is kept: its SHA-256, and from that the salt that keeps its cached prefixes apart from those of others. priority:
    of its requests, unless they ask for a higher number, which runs later. Limits: None is none."""

    digest: bytes
    label: str = field(default="", compare=False)
    scopes: frozenset[str] = frozenset(SCOPES[:2])
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority: int | None = None

    @classmethod
    def of(cls, text: str, **fields: Any) -> Key:
        """`text`: the key itself, or sha256:HEX for one that only its owner knows. ValueError if it is neither."""
        if not text or not text.isascii() or not text.isprintable():
            raise ValueError("an API key must be printable ASCII, and not empty")
        kind, found, digits = text.partition("sha256:")
        if not found or kind:
            return cls(hashlib.sha256(text.encode()).digest(), **fields)
        if len(digits) != 64:
            raise ValueError("after sha256: there must be 64 hexadecimal digits")
        return cls(bytes.fromhex(digits), **fields)

    @classmethod
    def line(cls, text: str) -> Key:
        """A line of a key file: the key as in of(), then words as name=alice, scopes=inference,metrics, requests-per-minute=60,
        tokens-per-minute=9000, concurrent-requests=4, priority=5. ValueError."""
        key, *words = text.split()
        fields: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name == "name" and value:
                fields["label"] = value
            elif name == "scopes" and value and set(value.split(",")) <= set(SCOPES):
                fields["scopes"] = frozenset(value.split(","))
            elif name in _LIMITS and value.isdecimal() and int(value) > 0:
                fields[name.replace("-", "_")] = int(value)
            elif name == "priority" and value.removeprefix("-").isdecimal():
                fields["priority"] = int(value)
            else:
                possible = f"name, scopes (of {', '.join(SCOPES)}), priority, or a number above 0 for {', '.join(_LIMITS)}"
                raise ValueError(f"{word:.80} is no option of a key; possible are {possible}")
        return cls.of(key, **fields)

    @property
    def name(self) -> str:
        """By which it can be told from others, and nobody can use it: the label that it was given, or else of its digest."""
        return self.label or hashlib.sha256(b"name" + self.digest).hexdigest()[:12]

    @property
    def salt(self) -> str:
        """Of the prefix cache. The digest itself is not shown."""
        return hashlib.sha256(b"salt" + self.digest).hexdigest()[:16]


def read_keys(text: str) -> list[Key]:
    """The keys of a file, one a line; empty lines and those that begin with # don't count. ValueError names the line, no key."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                found.append(Key.line(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return found


class Keys:
    """The keys that open the server; none: it is open to all, but for what needs the scope admin. ValueError: two have one name."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)
        names = [key.label for key in self._keys if key.label]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two keys are called {twice[0]}")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def of_digest(self, digest: bytes) -> Key | None:
        """The key with this SHA-256, if it is (still) one."""
        return next((key for key in self._keys if hmac.compare_digest(key.digest, digest)), None)

    def find(self, text: bytes) -> Key | None:
        """The key that a client gave, if it is one. Takes the same time whichever of them it is."""
        digest = hashlib.sha256(text).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None


class _Bucket:
    """What is left of a limit: it fills evenly, `limit` a minute and never above, and may be overdrawn."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit, self._clock = limit, clock
        self._level, self._at = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level, self._at = min(self.limit, self._level + (now - self._at) * self.limit / 60), now
        return self._level

    def take(self, count: int) -> None:
        self._level = self.level - count

    def wait(self, level: float) -> float:
        """Seconds until so much is there."""
        return max(0.0, level - self.level) * 60 / self.limit


class Account:
    """What a key has used. A request is let in while a whole request and at least one token are left; its tokens, of prompt and
    answer, are taken when it ends, so that the key may be overdrawn then, and waits until that is made good."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self.active = key, 0
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._buckets = {kind: _Bucket(limit, clock) for kind, limit in limits.items() if limit is not None}

    async def room(self) -> None:
        """Until one more request may run, but not for long."""
        for _ in range(_GRACE):
            if self.key.concurrent_requests is None or self.active < self.key.concurrent_requests:
                return
            await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """For as long as a request lasts. Raises Refusal (429)."""
        most = self.key.concurrent_requests
        if most is not None and self.active >= most:
            raise _limited(f"this key has {self.active} requests under way, and no more may be", 1.0)
        for kind, bucket in self._buckets.items():
            if wait := bucket.wait(1):
                raise _limited(f"this key may have {bucket.limit} {kind} a minute, and has used them up", wait)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def charge(self, tokens: int) -> None:
        """A request has cost so many."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def headers(self) -> dict[str, str]:
        """What is left, as OpenAI's clients read it."""
        found = {}
        for kind, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{kind}"] = _duration(bucket.wait(bucket.limit))
        return found


def _limited(message: str, seconds: float) -> Refusal:
    headers = {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1e3)))}
    return Refusal(429, "rate_limit_exceeded", f"{message}; try again in {seconds:.1f} seconds", headers=headers)


def _duration(seconds: float) -> str:
    """As in "6m0s", "1.5s", "20ms"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
