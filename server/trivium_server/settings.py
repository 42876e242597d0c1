"""What the operator decides."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Key:
    """An API key as it is kept: its SHA-256, and from that the salt that keeps its cached prefixes apart from those of others."""

    digest: bytes

    @classmethod
    def of(cls, text: str) -> Key:
        """`text`: the key itself, or sha256:HEX for one that only its owner knows. ValueError if it is neither."""
        if not text or not text.isascii() or not text.isprintable():
            raise ValueError("an API key must be printable ASCII, and not empty")
        kind, found, digits = text.partition("sha256:")
        if not found or kind:
            return cls(hashlib.sha256(text.encode()).digest())
        if len(digits) != 64:
            raise ValueError("after sha256: there must be 64 hexadecimal digits")
        return cls(bytes.fromhex(digits))

    @property
    def name(self) -> str:
        """By which it can be told from others, and nobody can use it."""
        return hashlib.sha256(b"name" + self.digest).hexdigest()[:12]

    @property
    def salt(self) -> str:
        """Of the prefix cache. The digest itself is not shown."""
        return hashlib.sha256(b"salt" + self.digest).hexdigest()[:16]


class Keys:
    """The keys that open the server; none: it is open to all."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

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


@dataclass(frozen=True)
class Settings:
    """keys: see Keys. origins: web pages that may call the server (CORS); "*": all. max_body: bytes; max_headers: bytes of a
    request's headers; body_timeout: seconds in which the headers, and then a body, must have arrived, and in which a client
    must take something of what waits for it. request_timeout: seconds until an answer is ended, waiting included; None: never.
    max_prompts: of one request, each counted n times. shutdown_timeout: seconds in which what runs may finish after SIGTERM.
    timings: every answer tells its times, not only those that ask for it. vllm_metrics: /metrics has each name also with vllm:
    in place of trivium:. ping: seconds of silence after which a stream says that it is alive. certificate, private_key: files
    in PEM; with them HTTPS is spoken.

    batch_dir: folder of files and batches; None: there are none. batch_parallel: requests of batches that run at a time.
    max_upload: bytes of a file with what is around it; batch_max_lines: requests of a batch; batch_max_open: batches of a key that
    are under way; batch_storage: bytes of all files of a key.

    moderation: names of plugins that judge requests and answers. otlp_endpoint: URL of a collector of traces (for which the extra
    `otel` is needed); None: there are no traces."""

    keys: Keys = field(default_factory=Keys)
    origins: tuple[str, ...] = ()
    max_body: int = 32 << 20
    max_headers: int = 64 << 10
    body_timeout: float = 60.0
    request_timeout: float | None = None
    max_prompts: int = 2048
    shutdown_timeout: float = 30.0
    timings: bool = False
    vllm_metrics: bool = False
    ping: float = 15.0
    batch_dir: Path | None = None
    batch_parallel: int = 32
    max_upload: int = 200 << 20
    batch_max_lines: int = 50_000
    batch_max_open: int = 100
    batch_storage: int = 10 << 30
    moderation: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    certificate: Path | None = None
    private_key: Path | None = None
