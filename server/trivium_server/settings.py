"""What the operator decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trivium_server.keys import Keys
from trivium_server.limits import MAX_PIXELS
from trivium_server.splits import Split


@dataclass(frozen=True)
class Settings:
    """keys: see Keys. origins: web pages that may call the server (CORS); "*": all. max_body: bytes; max_headers: bytes of a
    request's headers; body_timeout: seconds in which the headers, and then a body, must have arrived, and in which a client
    must take something of what waits for it. request_timeout: seconds until an answer is ended, waiting included; None: never.
    max_prompts: of one request, each counted n times. max_image_pixels: of all images of a prompt together. shutdown_timeout:
    seconds in which what runs may finish after SIGTERM. idle_seconds: without calls, until a model is unloaded; None: never.
    max_loaded_models: at a time; None: all. splits: see Split. key_metrics: /metrics counts requests and tokens by name of the key.
    timings: every answer tells its times, not only those that ask for it. vllm_metrics: /metrics has each name also with vllm: in
    place of trivium:. ping: seconds of silence after which a stream says that it is alive. certificate, private_key: files in PEM;
    with them HTTPS is spoken.

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
    max_image_pixels: int = MAX_PIXELS
    shutdown_timeout: float = 30.0
    idle_seconds: float | None = None
    max_loaded_models: int | None = None
    splits: tuple[Split, ...] = ()
    key_metrics: bool = False
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
