"""Runs the server: loads the models, listens, and stops in good order on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from trivium import AsyncLLM
from trivium.errors import NoCacheError

from trivium_server.app import App
from trivium_server.models import Models, Slot
from trivium_server.protocol import configured
from trivium_server.settings import Settings

_log = logging.getLogger("trivium.server")


def slots(models: Iterable[tuple[str, str]], options: dict[str, Any]) -> list[Slot]:
    """Of (name, model) of each; options: of AsyncLLM. Several models share them, so that those about the KV cache are then for the
    models that have one."""
    found = list(models)
    load = AsyncLLM if len(found) == 1 else _load_beside
    return [Slot(name, partial(load, model, **options)) for name, model in found]


def _load_beside(model: str, **options: Any) -> AsyncLLM:
    """One of several models, without what its kind has no use for; the log says so."""
    try:
        return AsyncLLM(model, **options)
    except NoCacheError as error:
        unused = error.param
        _log.warning("%s; it is for the other models alone", error)
    return _load_beside(model, **{name: value for name, value in options.items() if name != unused})


class _Server(uvicorn.Server):
    """Signals are ours: see serve()."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_certificate(settings: Settings) -> None:
    """Raises OSError or ValueError if HTTPS is wanted and can't be had from these files."""
    if settings.certificate is not None:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.certificate, settings.private_key)
    elif settings.private_key is not None:
        raise ValueError("a private key was given without a certificate")


def check_tracing(settings: Settings) -> None:
    """Raises ValueError if traces are wanted and can't be had."""
    if (endpoint := settings.otlp_endpoint) is None:
        return
    if not (url := urlsplit(endpoint)).netloc or url.scheme not in ("http", "https"):
        raise ValueError(f"{endpoint!r:.80} is no http:// or https:// URL of a collector")
    try:
        import trivium_server.tracing  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is missing; pip install 'trivium[otel]' brings it") from error


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; OSError says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    sock.listen(2048)
    return sock


def serve(models: Models, settings: Settings, sock: socket.socket) -> int:
    """Loads the models and answers until it is told to stop; 0 if all that ran could finish, 1 if some had to be ended. Raises what
    the models raise that could not be loaded at the start; /health and the lists of models answer from the first moment on.

    The first SIGTERM or SIGINT: /health says no, new work is refused, what runs may finish (settings.shutdown_timeout). The second
    ends the process at once.
    """
    app = App(models, settings)
    if settings.otlp_endpoint is not None:
        from trivium_server.tracing import Tracing

        app.trace(Tracing.to(settings.otlp_endpoint))
    config = configured(app)
    server = _Server(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stopping: list[asyncio.Task[None]] = []

        def stop(number: int) -> None:
            if stopping:
                os._exit(128 + number)
            print("trivium: stopping; a second signal ends at once", file=sys.stderr, flush=True)
            stopping.append(loop.create_task(_drained(app, server)))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        answering, starting = loop.create_task(server.serve([sock])), loop.create_task(models.start())
        try:
            await asyncio.wait({answering, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                host, port = sock.getsockname()[:2]
                scheme, names = "https" if config.is_ssl else "http", ", ".join(models.names)
                print(f"trivium: serving {names} at {scheme}://{host}:{port}", file=sys.stderr, flush=True)
        except BaseException:
            server.should_exit = True
            raise
        finally:
            await answering
            starting.cancel()

    with contextlib.closing(models), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    return 1 if app.active else 0


async def _drained(app: App, server: uvicorn.Server) -> None:
    await app.drain(app.settings.shutdown_timeout)
    server.should_exit = True
