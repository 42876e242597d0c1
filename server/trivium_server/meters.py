"""Prometheus metrics. What a histogram gets is what the request's own clock says, the same as in its answer.

Time to first token: from the arrival of the request in the engine to the first token made, its wait in the queue included.
Inter-token latency: an observation for each gap between the moments at which an output grew. Time per output token: the same time
divided by the tokens after the first, one observation a request. Queue time: arrival to first scheduling; what a preempted request
waits later is in the interval it falls into. Names are vLLM's where it has one, with trivium: in place of vllm:.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from trivium import Metrics, RequestOutput, SamplingParams, errors

from trivium_server.models import Models, Served, Slot

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_TIMES: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "time_to_first_token", "Arrival to first token, queue included", _LONG),
    ("request_time_per_output_token_seconds", "time_per_output_token", "Mean time of a token after the first", _SHORT),
    ("e2e_request_latency_seconds", "e2e_time", "Arrival to the end", _LONG),
    ("request_queue_time_seconds", "queue_time", "Arrival to first scheduling", _LONG),
    ("request_prefill_time_seconds", "prefill_time", "First scheduling to the end of the prompt", _LONG),
    ("request_decode_time_seconds", "decode_time", "First to last token", _LONG),
)
_COUNTS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of the requests taken"),
    ("generation_tokens", "generated_tokens", "Tokens made"),
    ("prefix_cache_queries", "prompt_tokens", "Prompt tokens looked for in the prefix cache"),
    ("prefix_cache_hits", "cached_tokens", "Prompt tokens found in the prefix cache or a tier below it"),
    ("num_preemptions", "preemptions", "Sequences that gave their pages up and ran again"),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Guessed tokens that were checked"),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Guessed tokens that came true"),
    ("spec_decode_num_failed_drafts", "failed_drafts", "Proposals of drafts that failed"),
    (
        "prefix_cache_restored_host_tokens",
        "restored_host_tokens",
        "Prompt tokens found that came back from host memory",
    ),
    ("prefix_cache_restored_disk_tokens", "restored_disk_tokens", "Prompt tokens found that came back from disk"),
    ("kv_tier_faults", "tier_faults", "Pages that a tier below the cache could not move or read"),
    ("engine_steps", "steps", "Steps of the engine; by engine_computed_tokens, the tokens of a step"),
    ("engine_failed_steps", "failed_steps", "Steps that were undone"),
    ("engine_computed_tokens", "computed_tokens", "Tokens computed: of prompts, made, and guessed"),
    ("engine_host_seconds", "host_seconds", "Time of the steps in which the device has nothing to do"),
    ("engine_device_seconds", "device_seconds", "Time of the steps on the device"),
    ("engine_draft_seconds", "draft_seconds", "Time of the steps in which drafts were proposed"),
)
_OUTPUTS = (1, 2, 5, 10, 20)
_LABEL = ["model_name", "version"]
"""The name that clients ask for, and the model that answers."""
_CACHE = ["block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"]
"""Labels of cache_config_info, by vLLM's names: tokens a page and pages, whatever the device is."""


class Ended(NamedTuple):
    """A request that has come to its end. operation: as OpenTelemetry calls it. params: None where nothing was to be made. reasons:
    of its outputs. began: its arrival in Unix seconds. metrics: None where nobody waited for the end; then nothing is known of its
    prompt, and `began` is when it was asked for."""

    served: Served
    operation: str
    params: SamplingParams | None
    began: float
    reasons: Sequence[str]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    metrics: Metrics | None = None
    error: errors.TriviumError | None = None

    @classmethod
    def of(
        cls, served: Served, output: RequestOutput, made: int, reasons: Sequence[str], operation: str, params: SamplingParams | None
    ) -> Ended:
        """Of the last news of a request that made so many tokens."""
        assert output.metrics is not None, "a request that has finished has metrics"
        began = time.time() - (time.perf_counter() - output.metrics.arrival)
        prompt = len(output.prompt_token_ids)
        return cls(served, operation, params, began, reasons, prompt, made, output.metrics, output.error)


class Meters:
    """Of one server: a registry of its own. watchers: are told of each request that has ended."""

    def __init__(self, models: Models, *, aliases: bool, keys: bool = False) -> None:
        """aliases: each name also with vllm: in place of trivium:. keys: requests and tokens are also counted by key."""
        self._models, self._aliases = models, aliases
        self.watchers: list[Callable[[Ended], None]] = []
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"trivium:{name}", text, _LABEL, registry=registry, buckets=buckets)

        self._times = [(field, histogram(name, text, buckets)) for name, field, text, buckets in _TIMES]
        self._gaps = histogram("inter_token_latency_seconds", "Gap between the moments at which an output grew", _SHORT)
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens of a request", _SIZES)
        self._made = histogram("request_generation_tokens", "Tokens that a request made", _SIZES)
        self._ran = histogram("request_inference_time_seconds", "First scheduling to last token", _LONG)
        self._outputs = histogram("request_params_n", "Outputs that a request asked for", _OUTPUTS)
        self._most = histogram("request_params_max_tokens", "Most tokens that a request asked for, where it did", _SIZES)
        labels = [*_LABEL, "finished_reason"]
        self._ended = Counter("trivium:request_success", "Outputs that ended, by how", labels, registry=registry)
        self._refused = Counter("trivium:requests_refused", "Calls that got an error, by its code", ["code"], registry=registry)
        self._by_key: tuple[Counter, Counter] | None = None
        if keys:
            asked = Counter("trivium:key_requests", "Requests let in, by name of the key", ["key"], registry=registry)
            spent = Counter("trivium:key_tokens", "Tokens of prompts and answers, by name of the key", ["key"], registry=registry)
            self._by_key = asked, spent
        for slot in models:
            for _, one in self._times:
                one.labels(slot.name, slot.name)
            for reason in ("stop", "length", "tool_calls", "abort", "error"):
                self._ended.labels(slot.name, slot.name, reason)
            for one in (self._gaps, self._prompts, self._made, self._ran, self._outputs, self._most):
                one.labels(slot.name, slot.name)

    def ended(self, ended: Ended) -> None:
        """A request has come to its end."""
        names = _names(ended.served)
        for reason in ended.reasons:
            self._ended.labels(*names, reason).inc()
        if ended.metrics is not None:
            self._prompts.labels(*names).observe(ended.prompt_tokens)
            self._made.labels(*names).observe(ended.generated_tokens)
            self._observe(ended.served, ended.metrics)
        if ended.params is not None:
            self._outputs.labels(*names).observe(ended.params.n)
            if ended.params.max_tokens is not None:
                self._most.labels(*names).observe(ended.params.max_tokens)
        for watcher in self.watchers:
            watcher(ended)

    def asked(self, key: str) -> None:
        """A request was let in with a key."""
        if self._by_key is not None:
            self._by_key[0].labels(key).inc()

    def charged(self, key: str, tokens: int) -> None:
        """It has cost so many tokens."""
        if self._by_key is not None:
            self._by_key[1].labels(key).inc(tokens)

    def refused(self, code: str) -> None:
        """A call got an error."""
        self._refused.labels(code).inc()

    def _observe(self, served: Served, metrics: Metrics) -> None:
        for field, histogram in self._times:
            value = getattr(metrics, field)
            if value is not None:
                histogram.labels(*_names(served)).observe(value)
        first, queue, decode = metrics.time_to_first_token, metrics.queue_time, metrics.decode_time
        if first is not None and queue is not None and decode is not None:
            self._ran.labels(*_names(served)).observe(first - queue + decode)
        gaps = self._gaps.labels(*_names(served))
        for gap in metrics.inter_token_latencies:
            gaps.observe(gap)

    async def engines(self) -> dict[str, Any]:
        """Statistics of the engines by model, of those that were ever loaded."""
        found = [(slot.name, await slot.stats()) for slot in self._models]
        return {name: stats for name, stats in found if stats is not None}

    async def text(self) -> bytes:
        """The exposition."""
        registry = CollectorRegistry()
        registry.register(_Now([*(await self.engines()).items()]))
        registry.register(_Caches([*self._models]))
        text = generate_latest(self._registry) + generate_latest(registry)
        return text + text.replace(b"trivium:", b"vllm:") if self._aliases else text


def _names(served: Served) -> tuple[str, str]:
    return served.name, served.version


class _Now:
    """What the engines say at this moment."""

    def __init__(self, stats: list[tuple[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, field, text in _COUNTS:
            total = CounterMetricFamily(f"trivium:{name}", text, labels=_LABEL)
            for model, stats in self._stats:
                total.add_metric([model, model], getattr(stats, field))
            yield total
        now: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
            ("num_requests_running", "Sequences that run", lambda s: s.running),
            ("num_requests_waiting", "Sequences that wait", lambda s: s.waiting),
            ("num_tokens_waiting", "Prompt tokens that wait", lambda s: s.waiting_tokens),
            ("kv_cache_usage_perc", "Share of the pages in use, 0 to 1", lambda s: 1 - s.free_pages / max(s.pages, 1)),
            ("kv_cache_free_pages", "Pages of the KV cache that are free", lambda s: s.free_pages),
        )
        for name, text, read in now:
            gauge = GaugeMetricFamily(f"trivium:{name}", text, labels=_LABEL)
            for model, stats in self._stats:
                gauge.add_metric([model, model], read(stats))
            yield gauge
        name, text = "trivium:spec_decode_num_accepted_tokens_per_pos", "Guessed tokens that came true, by place"
        accepted = CounterMetricFamily(name, text, labels=[*_LABEL, "position"])
        for model, stats in self._stats:
            for position, count in enumerate(stats.accepted_by_position):
                accepted.add_metric([model, str(position)], count)
        yield accepted


class _Caches:
    """How the KV caches of the models that are loaded are laid out."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("trivium:cache_config_info", "Layout of the KV cache, in the labels", labels=[*_LABEL, *_CACHE])
        for name, llm in ((slot.name, slot.llm) for slot in self._slots if slot.llm is not None):
            spec, caching = llm.loaded.kv_spec, llm.engine.config.enable_prefix_caching
            info.add_metric([name, name, str(spec.page_size), str(llm.loaded.num_pages), spec.dtype, str(caching)], 1)
        yield info
