"""Traces by OpenTelemetry: a span of each request and, below it, its queue, prefill and decode, as its own clock saw them.

Names of attributes: OpenTelemetry's semantic conventions for generative AI. No prompt and no answer is in a span. This module needs
the extra `otel`, and is imported only where traces are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trivium
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trivium_server.meters import Ended

_TRACES = "/v1/traces"
_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_tokens", "seed": "seed",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "stop": "stop_sequences", "n": "choice.count",
}  # fmt: skip
"""Fields of SamplingParams, and what they are called behind gen_ai.request."""


class Tracing:
    """Makes spans and hands them to a processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({"service.name": "trivium", "service.version": trivium.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("trivium_server", trivium.__version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """To a collector that speaks OTLP over HTTP. endpoint: its URL, as http://127.0.0.1:4318; spans go to /v1/traces there."""
        url = endpoint.rstrip("/")
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url if url.endswith(_TRACES) else url + _TRACES)))

    def enter(self, headers: Mapping[bytes, bytes]) -> None:
        """A call with these headers has begun, in a task of its own: spans made in it belong to the trace that it names."""
        carrier = {name: headers[name.encode()].decode("latin-1") for name in self._propagator.fields if name.encode() in headers}
        context.attach(self._propagator.extract(carrier))

    def add(self, ended: Ended) -> None:
        """The spans of a request that has ended."""
        start, m = _ns(ended.began), ended.metrics
        name = f"{ended.operation} {ended.served.name}"
        span = self._tracer.start_span(name, kind=trace.SpanKind.SERVER, start_time=start, attributes=_attributes(ended))
        if ended.error is not None:
            span.set_status(trace.StatusCode.ERROR)
            span.set_attribute("error.type", ended.error.code)
        if m is None:
            span.end()
            return
        inside = trace.set_span_in_context(span)
        for phase, after, took in (
            ("queue", 0.0, m.queue_time), ("prefill", m.queue_time, m.prefill_time),
            ("decode", m.time_to_first_token, m.decode_time),
        ):  # fmt: skip
            if after is not None and took is not None:
                begun = start + _ns(after)
                self._tracer.start_span(phase, inside, start_time=begun).end(begun + _ns(took))
        span.end(start + _ns(m.e2e_time))

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _attributes(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": ended.operation, "gen_ai.provider.name": "trivium", "gen_ai.request.model": ended.served.name,
        "gen_ai.response.model": ended.served.name, "gen_ai.response.finish_reasons": tuple(ended.reasons),
    }  # fmt: skip
    if ended.metrics is not None:
        found["gen_ai.usage.input_tokens"] = ended.prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = ended.metrics.num_cached_tokens
        found["gen_ai.usage.output_tokens"] = ended.generated_tokens
    for field, name in _SAMPLING.items() if ended.params is not None else ():
        value = getattr(ended.params, field)
        if value is not None and value != ():
            found[f"gen_ai.request.{name}"] = value
    return found
