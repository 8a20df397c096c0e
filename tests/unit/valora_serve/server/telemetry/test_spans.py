"""OpenTelemetry spans."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.http_helpers import chat, serving
from valora_serve.server.telemetry.spans import Tracer


def test_a_request_is_a_span_in_the_callers_trace():
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(tracer=Tracer(provider)) as server:
        for stream in (False, True):
            server.client.post(
                "/v1/chat/completions", json=chat(max_tokens=3, stream=stream),
                headers={"traceparent": parent},
            )  # fmt: skip
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    for span in spans:
        assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        assert span.attributes["gen_ai.request.model"] == "tiny"
        assert span.attributes["gen_ai.usage.output_tokens"] == 3


def test_spans_reach_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracer = Tracer.to(f"http://127.0.0.1:{collector.server_port}/")
        with serving(tracer=tracer) as server:
            server.client.post("/v1/chat/completions", json=chat(max_tokens=3))
        tracer.close()
        collector.shutdown()
    ((path, request),) = got
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    facts = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert facts["service.name"] == "valora-serve"
    assert [span.name for span in resource.scope_spans[0].spans] == ["chat tiny"]
