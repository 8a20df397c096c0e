"""OpenTelemetry spans."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.http_helpers import chat, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"


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
        with serving(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/") as server:
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            server.client.post("/v1/chat/completions", json=chat(max_tokens=3), headers=headers)
        collector.shutdown()
    ((path, request),) = got
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    facts = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert facts["service.name"] == "valora-serve"
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("chat tiny", TRACE)
    facts = {item.key: item.value for item in span.attributes}
    assert facts["gen_ai.request.model"].string_value == "tiny"
    assert facts["gen_ai.usage.output_tokens"].int_value == 3
