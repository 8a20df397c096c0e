"""Metrics, logs, traces, golden examples, finding bundles, constraints: each by itself."""

import asyncio
import gzip
import json
import logging
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import chat, encoded, own_logging, picture, serving
from valora_data.contract.base_model import base_folder
from valora_serve.errors import AdapterError, RequestError, SettingsError
from valora_serve.server.constrain import Grammars
from valora_serve.server.loading import golden, startup
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import MOST_LABELS, Metrics
from valora_serve.server.telemetry.spans import Tracer
from valora_serve.types import Finish, Output, Times, Usage

# Metrics


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_happened():
    with serving() as server:
        for _ in range(3):
            server.client.post("/v1/chat/completions", json=chat(max_tokens=4))
        server.client.post("/v1/vision/person", files={"image": encoded(picture())})
        server.client.post("/v1/chat/completions", json=chat(model="nobody"))
        server.client.get("/somewhere/else")
        found = samples(server.client.get("/metrics").text)
    model = (("model_name", "tiny"),)
    assert found["valora_request_success_total",
                 (("finished_reason", "length"), ("model_name", "tiny"))] == 3  # fmt: skip
    assert found["valora_request_success_total",
                 (("finished_reason", "head"), ("model_name", "person"))] == 1  # fmt: skip
    assert found["valora_request_generation_tokens_total", model] == 12
    assert found["valora_request_prompt_tokens_total", model] == 15
    assert found["valora_inter_token_latency_seconds_count", model] == 9
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"valora_{name}_seconds_count", model] == 3
    assert found["valora_request_failure_total", (("code", "model_not_found"),)] == 1
    path = "/v1/chat/completions"
    assert found["valora_http_requests_total",
                 (("method", "POST"), ("path", path), ("status", "200"))] == 3  # fmt: skip
    assert ("valora_http_requests_total",
            (("method", "GET"), ("path", "other"), ("status", "404"))) in found  # fmt: skip
    assert found["valora_kv_cache_usage_ratio", ()] == 0.2
    assert found["valora_adapter_cache_usage_ratio", ()] == 0.1
    assert found["valora_mode", (("mode", "mixture"),)] == 1
    assert found["valora_mode", (("mode", "merged"),)] == 0
    assert found["valora_mode_switches_total", ()] == 3
    assert found["valora_merged_adapter_info", (("adapter", "adapter-1"),)] == 1
    assert found["valora_prefix_cache_hits_total", ()] == 5
    assert found["process_resident_memory_bytes", ()] > 10**7


def test_label_sets_are_bounded():
    metrics = Metrics(FakeEngine())
    last = Output("x", finish=Finish.STOP, usage=Usage(1, 1), times=Times(0.0, 0.0, 0.0, 1.0))
    for number in range(MOST_LABELS + 30):
        metrics.ended(f"adapter {number}", last, [])
    found = samples(metrics.text().decode())
    names = {dict(labels).get("model_name") for _, labels in found} - {None}
    assert len(names) == MOST_LABELS + 1
    assert "other" in names


def test_the_dashboard_asks_only_for_metrics_that_are_there():
    import re
    from pathlib import Path

    file = Path(__file__).parents[4] / "docs" / "grafana-dashboard.json"
    board = json.loads(file.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    assert len(queries) >= 15
    metrics = Metrics(FakeEngine())
    last = Output("x", finish=Finish.STOP, usage=Usage(1, 1), times=Times(0.0, 0.0, 0.0, 1.0))
    metrics.ended("tiny", last, [0.0, 1.0])
    metrics.failed("x")
    metrics.http("/x", "GET", 200, 0.1)
    there = {name for name, _ in samples(metrics.text().decode())}
    for query in queries:
        for name in re.findall(r"\b(?:valora|process)_\w+", query):
            assert name in there, name


# Logs


def test_json_logs_have_the_requests_id_and_no_content(capsys):
    key = "a-secret-key-that-is-long"
    with own_logging(), serving(api_key=key, log_format="json") as server:
        logs.set_up("info", "json")
        answer = server.client.post(
            "/v1/chat/completions", json=chat("a private question"),
            headers={"authorization": "Bearer a-secret-key-that-is-long", "x-request-id": "abc-1"},
        )  # fmt: skip
        assert answer.headers["x-request-id"] == "abc-1"
        odd = server.client.get("/health", headers={"x-request-id": "a b\tc" * 50})
        assert odd.headers["x-request-id"] != "a b\tc" * 50
        server.client.get("/v1/%0aforged%20line", headers={"authorization": "Bearer x"})
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == "abc-1"]
    assert (line["event"], line["status"], line["model"]) == ("request", 200, "tiny")
    assert line["key"] == "api_key"
    assert line["seconds"] > 0
    assert "a-secret-key" not in text
    assert "private" not in text
    assert len(lines) == len([line for line in text.splitlines() if line])


def test_text_logs_stay_on_one_line():
    form = logs._Formatter(False)
    record = logging.LogRecord("x", logging.INFO, "", 0, "said\nforged", (), None)
    record.facts = {"path": "/a\r\nINFO forged"}
    assert len(form.format(record).splitlines()) == 1


# OpenTelemetry


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


def test_the_page_of_the_api_loads_nothing_from_elsewhere():
    with serving() as server:
        page = server.client.get("/docs").text
        links = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(links) >= 3
        for link in links:
            assert link.startswith("/console/docs/")
            assert server.client.get(link).status_code == 200


# Golden examples


def golden_bundle(folder, expected, domain="person", threshold=0.5):
    (folder / "golden").mkdir(parents=True)
    Image.new("RGB", (40, 20)).save(folder / "golden" / "a.png")
    examples = [{"domain": domain, "image": "golden/a.png", "expected": expected}]
    (folder / "golden" / "golden.json").write_text(json.dumps(examples))
    (folder / "bundle.json").write_text(json.dumps({"domains": {domain: {"threshold": threshold}}}))
    return folder


BOX = {"label": "person", "confidence": 0.9, "box": [0.0, 0.0, 20.0, 10.0]}
SECOND = {"label": "person", "confidence": 0.4, "box": [10.0, 5.0, 40.0, 20.0]}


def replay(folder):
    return asyncio.run(golden.replay(FakeEngine(), folder))


@pytest.mark.parametrize(
    ("expected", "threshold"),
    [
        ([BOX], 0.5),
        ([BOX | {"confidence": 0.905, "box": [0.4, 0.0, 19.6, 10.0]}], 0.5),
        ([BOX, SECOND], 0.2),
        ([SECOND, BOX], 0.2),
        ([BOX], 0.395),  # the second box is about the threshold: it may come or go
        ([BOX, SECOND], 0.405),
    ],
)
def test_golden_boxes_that_are_the_same(tmp_path, expected, threshold):
    assert replay(golden_bundle(tmp_path / "b", expected, threshold=threshold)) == 1


@pytest.mark.parametrize(
    ("expected", "threshold"),
    [
        ([], 0.5), ([BOX, BOX], 0.5), ([BOX, SECOND], 0.5), ([BOX], 0.2),
        ([BOX | {"confidence": 0.88}], 0.5), ([BOX | {"label": "car"}], 0.5),
        ([BOX | {"box": [0.6, 0.0, 20.0, 10.0]}], 0.5),
    ],
)  # fmt: skip
def test_golden_boxes_that_differ(tmp_path, expected, threshold):
    if expected == [BOX, SECOND]:
        expected = [BOX, SECOND | {"confidence": 0.6}]
    with pytest.raises(AdapterError, match="differently"):
        replay(golden_bundle(tmp_path / "b", expected, threshold=threshold))


def test_golden_labels_and_texts(tmp_path):
    good = {"label": "street", "confidence": 0.751}
    assert replay(golden_bundle(tmp_path / "1", good, "scene", None)) == 1
    assert replay(golden_bundle(tmp_path / "2", "street", "scene", None)) == 1
    text = "a red star and a blue ring over the green key"
    assert replay(golden_bundle(tmp_path / "3", text, "caption", None)) == 1
    for number, (wrong, domain) in enumerate(
        [({"label": "beach"}, "scene"), (good | {"confidence": 0.7}, "scene"), ("a", "caption")]
    ):
        with pytest.raises(AdapterError, match="differently"):
            replay(golden_bundle(tmp_path / f"w{number}", wrong, domain, None))


def test_damaged_golden_examples(tmp_path):
    folder = golden_bundle(tmp_path / "b", [BOX])
    for content in ("{", '[{"domain": "person"}]', '[{"domain": "x", "image": "golden/a.png"}]',
                    '[{"domain": "person", "image": "none.png", "expected": []}]'):  # fmt: skip
        (folder / "golden" / "golden.json").write_text(content)
        with pytest.raises(AdapterError):
            replay(folder)
    assert asyncio.run(golden.replay(FakeEngine(), tmp_path)) == 0


# Finding bundles


def test_bundles_are_found_by_folder_and_folder_of_folders(tmp_path):
    for name in ("a", "b", "b@1", ".c.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").write_text("{}")
    (tmp_path / "other").mkdir()
    assert startup.find_bundles([str(tmp_path)], tmp_path) == [tmp_path / "a", tmp_path / "b"]
    old = startup.find_bundles([str(tmp_path / "b@1")], tmp_path)
    assert old == [tmp_path / "b@1"]
    for name in (tmp_path / "none", tmp_path / "other", tmp_path / "a" / "bundle.json"):
        with pytest.raises(SettingsError, match="is no bundle"):
            startup.find_bundles([str(name)], tmp_path)


@pytest.mark.slow
def test_a_bundle_from_mlflows_registry(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "bundle.json").write_text('{"name": "made"}')
    mlflow.set_tracking_uri(store)
    experiment = mlflow.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(folder), "bundle")
    found = _with_tracking(store, f"runs:/{run.info.run_id}/bundle", tmp_path / "downloads")
    assert (found / "bundle.json").read_text() == '{"name": "made"}'
    with pytest.raises(SettingsError, match="MLflow"):
        _with_tracking(store, "models:/nobody/1", tmp_path / "downloads")


def _with_tracking(store, uri, place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        return startup.find_bundles([uri], place)[0]


def test_serving_imports_no_training_library():
    code = (
        "import sys, valora_serve.cli, valora_serve.server.app, "
        "valora_serve.server.loading.startup, valora_serve.engine.async_engine, "
        "valora_serve.workloads.bench\n"
        "print(sorted({'mlflow', 'hydra', 'ultralytics', 'valora_train'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# JSON schemas


@pytest.fixture(scope="module")
def grammars():
    return Grammars(FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny"))))


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"anyOf": [{"const": None}, {"type": "number", "minimum": 0, "maximum": 9}]},
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**32))
def test_any_walk_through_a_constraint_keeps_to_the_schema(grammars, schema, seed):
    jsonschema = pytest.importorskip("jsonschema_rs")
    tokenizer = grammars._engine.tokenizer
    (constraint,) = asyncio.run(grammars.json(schema))
    rng = np.random.default_rng(seed)
    tokens = []
    padded = len(tokenizer) + 13  # a vocabulary that is padded to a round number
    for _ in range(400):
        allowed = np.ones(padded, dtype=bool)
        constraint.mask(allowed)
        assert not allowed[len(tokenizer) :].any()
        choices = np.flatnonzero(allowed)
        assert choices.size
        if tokenizer.eos_token_id in choices:
            break
        # Short tokens end sooner: digits could go on for ever.
        token = int(rng.choice(choices))
        tokens.append(token)
        constraint.advance(token)
    else:
        return
    assert jsonschema.is_valid(schema, json.loads(tokenizer.decode(tokens)))


def test_a_mask_only_takes_away(grammars):
    allowed = np.zeros(len(grammars._engine.tokenizer), dtype=bool)
    asyncio.run(grammars.json({"type": "integer"}))[0].mask(allowed)
    assert not allowed.any()


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"},
     {"pattern": "(", "type": "string"}, {"properties": 5}, False, {"enum": ["x" * 300_000]}],
)  # fmt: skip
def test_schemas_that_cannot_be(grammars, schema):
    with pytest.raises(RequestError, match="schema"):
        asyncio.run(grammars.json(schema))


def test_version_and_console(tmp_path):
    with serving() as server:
        found = server.client.get("/version").json()
        assert found["base"] == "tiny"
        assert found["python"] == sys.version.split()[0]
        page = server.client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in ("app.js", "style.css", "icon.svg"):
            assert server.client.get(f"/console/{name}").status_code == 200
        for name in ("index.html", "../server.py", "%2e%2e/server.py", "x"):
            assert server.client.get(f"/console/{name}").status_code == 404
    with serving(console=False) as server:
        assert server.client.get("/").status_code == 404


def test_https(tmp_path):
    import ssl

    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
        "/CN=localhost", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate, and is not installed")
    files = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    with serving(**files) as server:
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        context.check_hostname = False
        answer = httpx.get(f"https://127.0.0.1:{server.port}/health", verify=context)
        assert answer.status_code == 200
