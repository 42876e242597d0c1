"""What the dashboard shows, as data; its page, and that of the API, are files beside this one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import trivium
from msgspec import Struct

from trivium_server.faults import Refusal
from trivium_server.http import Call, Plain, Route
from trivium_server.meters import Meters
from trivium_server.models import Slot
from trivium_server.openai_types import rate
from trivium_server.recent import KEPT, STEP, TIMES, Digest, Ran, Reading, Recent, Window

_log = logging.getLogger("trivium.server")
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SHOWN = ("time_to_first_token", "inter_token_latency")
_DIGITS = 5
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SAFE = {
    "content-security-policy": _POLICY, "cache-control": "no-cache", "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff", "cross-origin-opener-policy": "same-origin",
}  # fmt: skip
_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Quantiles(Struct, kw_only=True):
    """Of the requests that ended in the window, in seconds; at most 2 % off. null: there were none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Curves(Struct, kw_only=True):
    """The same, slice by slice."""

    p50: list[float | None]
    p90: list[float | None]
    p99: list[float | None]


class Series(Struct, kw_only=True):
    """Slice by slice, oldest first; null where nothing was read or nothing ended. prefill_tokens_per_second: tokens of prompts that
    were computed; decode_tokens_per_second: tokens that were made; both by the seconds of the wall clock, of all requests together.
    kv_cache_usage: share of the pages, 0 to 1. prefix_hit_rate: share of the prompt tokens of the requests that ended which were
    found in the prefix cache. device_busy: share of the wall clock in which a step was on the device."""

    running: list[float | None]
    waiting: list[float | None]
    kv_cache_usage: list[float | None]
    prefix_hit_rate: list[float | None]
    prefill_tokens_per_second: list[float | None]
    decode_tokens_per_second: list[float | None]
    device_busy: list[float | None]
    time_to_first_token: Curves
    inter_token_latency: Curves


class Now(Struct, kw_only=True):
    """At the last reading. waiting_tokens: prompt tokens that wait."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_pages: int
    kv_pages_free: int
    preemptions: int


class PastRequest(Struct, kw_only=True):
    """A request that has ended, without a word of what it said. began: Unix seconds; all else in seconds of its own clock. queue:
    until it was first scheduled; prefill: from there to the end of the prompt; decode: first to last token; total: to the end.
    tokens_per_second: the tokens after the first by `decode`."""

    model: str
    operation: str
    began: float
    total: float
    queue: float | None
    prefill: float | None
    decode: float | None
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    finish_reason: str
    tokens_per_second: float | None


class WeightRoute(Struct, kw_only=True):
    """So many tensors came from one storage format into one resident format. bytes: as stored."""

    storage: str
    resident: str
    lossless: bool
    tensors: int
    bytes: int


class ModelCard(Struct, kw_only=True):
    """A model and where it runs; null of what is known only once it is loaded. Memory in bytes, that of the device 0 where it can't
    tell: device_memory and device_free of the whole device, weight_memory and kv_memory what this model holds."""

    name: str
    ready: bool
    max_model_len: int | None = None
    architecture: str | None = None
    backend: str | None = None
    backend_version: str | None = None
    device: str | None = None
    device_index: int | None = None
    weights: list[WeightRoute] = []
    kv_format: str | None = None
    page_tokens: int | None = None
    pages: int | None = None
    device_memory: int | None = None
    device_free: int | None = None
    weight_memory: int | None = None
    kv_memory: int | None = None


class DashboardData(Struct, kw_only=True):
    """Times in seconds. now: Unix seconds. window: how far back it goes, in slices of `step`. prefix_hit_rate: of the window."""

    version: str
    now: float
    uptime: float
    draining: bool
    window: float
    step: float
    requests_ended: int
    prefix_hit_rate: float | None
    latency: dict[str, Quantiles]
    current: Now
    series: Series
    requests: list[PastRequest]
    models: list[ModelCard]


def quantiles(digest: Digest) -> Quantiles:
    """50, 90 and 99 per cent."""
    found = digest.quantiles([*_SHARES.values()]) or ()
    return Quantiles(count=digest.count, **dict(zip(_SHARES, found)))


def curves(window: Window, name: str) -> Curves:
    """The same of each slice."""
    found = [quantiles(one.digests[name]) for one in window.slices]
    return Curves(**{share: _short(getattr(of, share) for of in found) for share in _SHARES})


def series(window: Window) -> Series:
    """All curves of a window."""

    def total(field: str) -> Callable[[Reading], float]:
        return lambda reading: reading.total(field, window.models)

    pages, free = window.gauge("pages"), window.gauge("free_pages")
    return Series(
        running=window.gauge("running"), waiting=window.gauge("waiting"),
        kv_cache_usage=_short(_share((p or 0) - (f or 0), p) for p, f in zip(pages, free)),
        prefix_hit_rate=_short(_share(one.cached_tokens, one.prompt_tokens) for one in window.slices),
        prefill_tokens_per_second=_short(window.rate(lambda reading: reading.prefilled(window.models))),
        decode_tokens_per_second=_short(window.rate(total("generated_tokens"))),
        device_busy=_short(window.rate(total("device_seconds"))),
        **{name: curves(window, name) for name in _SHOWN},
    )  # fmt: skip


def _share(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _short(values: Any) -> list[float | None]:
    """As many digits as anyone can see."""
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def past(ran: Ran) -> PastRequest:
    """As the page shows it."""
    m = ran.times
    return PastRequest(
        model=ran.model, operation=ran.operation, began=ran.began, total=m.e2e_time, queue=m.queue_time, prefill=m.prefill_time,
        decode=m.decode_time, first_token=m.time_to_first_token, prompt_tokens=ran.prompt_tokens,
        cached_tokens=m.num_cached_tokens, generated_tokens=ran.generated_tokens, preemptions=m.num_preemptions,
        finish_reason=ran.reason, tokens_per_second=rate(m, ran.generated_tokens),
    )  # fmt: skip


def card(slot: Slot) -> ModelCard:
    """Of a model, loaded or not."""
    if slot.llm is None:
        return ModelCard(name=slot.name, ready=False)
    loaded = slot.llm.loaded
    memory = loaded.session.memory()
    ways: dict[tuple[str, str, bool], list[int]] = {}
    for route in loaded.routes:
        ways.setdefault((route.storage, route.resident, route.lossless), []).append(route.nbytes)
    return ModelCard(
        name=slot.name, ready=slot.usable, max_model_len=loaded.max_model_len, architecture=loaded.architecture,
        backend=loaded.backend.name, backend_version=loaded.backend.version, device=loaded.device.name,
        device_index=loaded.device.index, kv_format=loaded.kv_spec.dtype, page_tokens=loaded.kv_spec.page_size,
        pages=loaded.num_pages, device_memory=memory.total, device_free=memory.free, weight_memory=memory.weights,
        kv_memory=memory.kv,
        weights=[
            WeightRoute(storage=s, resident=r, lossless=exact, tensors=len(sizes), bytes=sum(sizes))
            for (s, r, exact), sizes in sorted(ways.items(), key=lambda way: -sum(way[1]))
        ],
    )  # fmt: skip


async def watch(recent: Recent, meters: Meters) -> None:
    """Reads the engines every STEP seconds, until it is cancelled."""
    while True:
        try:
            recent.read(await meters.engines())
        except Exception:
            _log.exception("the engines could not be read for the dashboard")
        await asyncio.sleep(STEP)


async def data(call: Call, body: None) -> DashboardData:
    """The path ends in MINUTES, or MINUTES/MODEL for one model only."""
    minutes, one, name = call.rest.partition("/")
    app, recent = call.app, call.app.recent
    if not minutes.isdecimal() or not 0 < int(minutes) * 60 <= KEPT:
        raise Refusal(404, "no_route", f"the window must be 1 to {KEPT / 60:g} minutes, not {minutes:.20}")
    served = list(app.models)
    models = [app.models.find(name).name] if one else [model.name for model in served]
    window = recent.window(int(minutes) * 60, models)
    whole, last = window.whole(), recent.last

    def now(field: str) -> int:
        return int(last.total(field, models))

    return DashboardData(
        version=trivium.__version__, now=time.time(), uptime=recent.uptime, draining=app.draining, window=int(minutes) * 60,
        step=window.span, requests_ended=whole.ended, prefix_hit_rate=_share(whole.cached_tokens, whole.prompt_tokens),
        latency={of: quantiles(whole.digests[of]) for of in TIMES},
        current=Now(
            running=now("running"), waiting=now("waiting"), waiting_tokens=now("waiting_tokens"), kv_pages=now("pages"),
            kv_pages_free=now("free_pages"), preemptions=now("preemptions"),
        ),
        series=series(window), requests=[past(ran) for ran in recent.ran(models)], models=[card(model) for model in served],
    )  # fmt: skip


def page(name: str) -> Plain:
    """One of the files beside this one, with headers that let it load nothing but its like."""
    media = f"{_MEDIA[name.rpartition('.')[2]]}; charset=utf-8"
    return Plain((files("trivium_server") / "pages" / name).read_bytes(), media, headers=_SAFE)


def _file(name: str) -> Callable[[Call, None], Awaitable[Plain]]:
    """Answers with one of them, read once: no name of a request reaches a file."""
    found = page(name)

    async def answer(call: Call, body: None) -> Plain:
        return found

    return answer


_FILES: Mapping[str, Sequence[str]] = {
    "dashboard.html": ("/dashboard", "The dashboard: a page"), "docs.html": ("/docs", "A page that shows /openapi.json"),
    "style.css": ("/pages/style.css", "How the pages look"), "icon.svg": ("/pages/icon.svg", "The mark of trivium"),
    "common.js": ("/pages/common.js", "What the pages share"), "charts.js": ("/pages/charts.js", "Charts of the dashboard"),
    "chat.js": ("/pages/chat.js", "The chat of the dashboard"), "dashboard.js": ("/pages/dashboard.js", "The dashboard"),
    "docs.js": ("/pages/docs.js", "The page of the API"),
}  # fmt: skip


ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/dashboard/data/{window}",
        data,
        "Figures of the last MINUTES, or MINUTES/MODEL",
        None,
        DashboardData,
        open=True,
        scope="metrics",
    ),
    *(
        Route("GET", path, _file(name), summary, None, _MEDIA[name.rpartition(".")[2]], public=True, open=True)
        for name, (path, summary) in _FILES.items()
    ),
)
