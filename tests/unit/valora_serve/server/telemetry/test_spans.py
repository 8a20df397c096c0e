"""OpenTelemetry spans."""

import gzip

import pytest

from tests.support.http_helpers import chat, serving
from tests.support.website import Website

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_spans_reach_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Collector(Website):
        def answer(self, path, body):
            got.append((path, body))
            return 200, {}, ()

    with Collector() as collector, serving(otlp_endpoint=f"{collector.url}/") as server:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        server.client.post("/v1/chat/completions", json=chat(max_tokens=3), headers=headers)
    ((path, body),) = got
    assert path == "/v1/traces"
    body = gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
    request = ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    facts = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert facts["service.name"] == "valora-serve"
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("chat tiny", TRACE)
    facts = {item.key: item.value for item in span.attributes}
    assert facts["gen_ai.request.model"].string_value == "tiny"
    assert facts["gen_ai.usage.output_tokens"].int_value == 3
