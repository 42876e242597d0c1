"""Spans of requests: their times are those of the request's own clock, their names OpenTelemetry's, their parent the caller's."""

from __future__ import annotations

import threading

import pytest
from http_server import AUTH, CHAT, running

pytestmark = pytest.mark.http
CHATS = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced(folder):
    """(client, spans()): the spans so far by name, and an empty exporter."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    import httpx
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from trivium_server.tracing import Tracing

    exporter = InMemorySpanExporter()

    def spans():
        found = list(exporter.get_finished_spans())
        exporter.clear()
        return found

    with running(folder) as server, httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        server.app.trace(Tracing(SimpleSpanProcessor(exporter)))
        yield client, spans


def tree(spans):
    """The one root, and its children by name."""
    ids = {span.context.span_id for span in spans}
    [root] = [span for span in spans if span.parent is None or span.parent.span_id not in ids]
    children = {span.name: span for span in spans if span is not root}
    assert all(child.parent.span_id == root.context.span_id for child in children.values())
    return root, children


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_is_a_span_with_its_phases_below(traced, streams):
    import json

    client, spans = traced
    reply = client.post(CHATS, json={**CHAT, "stream": streams, "include_metrics": True})
    last = reply.text.split("data: ")[-2] if streams else reply.text
    times, usage = json.loads(last)["metrics"], json.loads(last)["usage" if not streams else "x_groq"]
    root, children = tree(spans())
    assert (
        root.name == "chat tiny"
        and root.kind.name == "SERVER"
        and root.parent is None
        and list(children) == ["queue", "prefill", "decode"]
    )
    for span, name in ((root, "e2e"), (children["queue"], "queue"), (children["prefill"], "prefill")):
        assert seconds(span) == pytest.approx(times[f"{name}_time_ms"] / 1e3, abs=2e-6), name
    assert seconds(children["decode"]) == pytest.approx(times["generation_time_ms"] / 1e3, abs=2e-6)
    first = children["decode"].start_time - root.start_time
    assert first / 1e9 == pytest.approx(times["time_to_first_token_ms"] / 1e3, abs=2e-6)
    assert root.start_time == children["queue"].start_time and children["queue"].end_time == children["prefill"].start_time
    usage = usage if not streams else usage["usage"]
    want = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "trivium", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.response.finish_reasons": ("length",), "gen_ai.request.max_tokens": 24,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": 24, "gen_ai.request.temperature": 0,
    }  # fmt: skip
    assert want.items() <= dict(root.attributes).items()
    assert "hello" not in str([span.to_json() for span in (root, *children.values())])


def test_the_span_belongs_to_the_callers_trace(traced):
    client, spans = traced
    client.post(CHATS, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    root, _ = tree(spans())
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT and root.parent.is_remote
    client.post(CHATS, json=CHAT, headers={"traceparent": "00-nonsense-01"})
    root, _ = tree(spans())
    assert root.parent is None and f"{root.context.trace_id:032x}" != TRACE
    client.post(CHATS, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans() == []  # the caller has decided that this trace is not recorded


def test_prompts_of_one_call_are_spans_of_one_trace(traced):
    client, spans = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    for streams in (False, True):
        client.post("/v1/completions", json={"prompt": ["ab", "cd"], "max_tokens": 3, "stream": streams}, headers=headers)
        roots = [span for span in spans() if f"{span.parent.span_id:016x}" == PARENT]
        assert [span.name for span in roots] == ["text_completion tiny"] * 2
    client.post("/v1/embeddings", json={"input": "abc"}, headers=headers)
    root, children = tree(spans())
    assert root.name == "embeddings tiny" and list(children) == ["queue", "prefill"]


def test_what_fails_or_is_left_says_so(traced):
    client, spans = traced
    for streams in (False, True):
        client.post(CHATS, json={**CHAT, "max_completion_tokens": 480, "timeout": 0.02, "stream": streams})
    whole, streamed = (span for span in spans() if span.name == "chat tiny")
    assert whole.attributes["gen_ai.response.finish_reasons"] == streamed.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert streamed.attributes["error.type"] == "deadline_exceeded" and streamed.status.status_code.name == "ERROR"


def test_the_names_are_those_of_the_conventions():
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    import re
    from pathlib import Path

    from trivium_server import tracing

    known = {value for name, value in vars(attributes).items() if name.startswith("GEN_AI_")}
    used = set(re.findall(r'"(gen_ai\.[a-z_.]*[a-z])"', Path(tracing.__file__).read_text()))
    used |= {f"gen_ai.request.{name}" for name in tracing._SAMPLING.values()}
    assert used <= known and len(used) > 12


@pytest.mark.parametrize(("flag", "words"), [("localhost:4318", "no http:// or https:// URL"), ("", "no http")])
def test_a_bad_endpoint_ends_with_one_line(folder, flag, words):
    import subprocess
    import sys

    line = [sys.executable, "-m", "trivium.cli", "serve", f"tiny={folder}", "--otlp-endpoint", flag]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    said = done.stderr.strip()
    assert done.returncode == 2 and words in said and "\n" not in said


def test_spans_reach_a_collector(folder):
    from http.server import BaseHTTPRequestHandler, HTTPServer

    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    import httpx
    from trivium_server.tracing import Tracing

    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, self.headers["content-encoding"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        with running(folder) as server:
            server.app.trace(Tracing.to(f"http://127.0.0.1:{collector.server_port}/"))
            httpx.post(server.url + CHATS, json=CHAT, headers=AUTH, timeout=60)
        collector.shutdown()
    [(path, encoding, body)] = got
    assert path == "/v1/traces" and encoding is None
    [resource] = proto.ExportTraceServiceRequest.FromString(body).resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat tiny", "decode", "prefill", "queue"]


def test_without_an_endpoint_nothing_of_it_is_imported(folder):
    import subprocess
    import sys

    code = "import sys, trivium_server.run; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
