"""Metrics for Prometheus."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import PNG, chat, serving
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile
from valora_serve.server.resolving.on_request import OnRequest
from valora_serve.server.service import Service
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry.metrics import Metrics, adapter_states, memory_bytes
from valora_serve.types import EngineStats, Finish, Output, ServedModel, Times, Usage


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
        server.client.post("/v1/vision/person", files={"image": PNG})
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
    for path, count in (("/v1/chat/completions", 3), ("/v1/vision/{domain}", 1)):
        assert found["valora_http_requests_total",
                     (("method", "POST"), ("path", path), ("status", "200"))] == count  # fmt: skip
    assert ("valora_http_requests_total",
            (("method", "GET"), ("path", "other"), ("status", "404"))) in found  # fmt: skip
    assert found["valora_kv_cache_usage_ratio", ()] == 0.2
    assert found["valora_adapter_cache_usage_ratio", ()] == 0.1
    assert found["valora_mode", (("mode", "mixture"),)] == 1
    assert found["valora_mode", (("mode", "merged"),)] == 0
    assert found["valora_mode_switches_total", ()] == 3
    assert ("valora_replicas", ()) not in found
    assert found["valora_merged_adapter_info", (("adapter", "adapter-1"),)] == 1
    assert found["valora_prefix_cache_hits_total", ()] == 5
    assert found["valora_memory_bytes", ()] > 10**7


def test_memory_is_that_of_all_processes():
    before, command = memory_bytes(), "held = b'x' * 10**8; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", command], **pipes) as child:
        child.stdout.readline()
        assert memory_bytes() - before > 10**8
        child.communicate(b"\n")
    assert memory_bytes() - before < 10**8


def test_a_replica_says_how_many_there_are():
    engine = FakeEngine()
    engine.peers = {"x1": engine.stats(), "y2": EngineStats(running=7)}
    found = samples(Metrics(engine).text().decode())
    assert found["valora_replicas", ()] == 2
    assert found["valora_num_requests_running", ()] == 0, "fronts add the others'"
    engine.peers = {}  # all have died
    assert samples(Metrics(engine).text().decode())["valora_replicas", ()] == 0


def test_answers_that_replicas_send_as_a_whole_have_their_mean_latency():
    engine = FakeEngine(step=0.02)
    engine.peers = {}
    with serving(engine) as server:
        server.client.post("/v1/chat/completions", json=chat(max_tokens=6))
        found = samples(server.client.get("/metrics").text)
    model = (("model_name", "tiny"),)
    whole = found["valora_e2e_request_latency_seconds_sum", model]
    first = found["valora_time_to_first_token_seconds_sum", model]
    assert found["valora_inter_token_latency_seconds_count", model] == 5
    between = found["valora_inter_token_latency_seconds_sum", model]
    assert between == pytest.approx(whole - first, rel=1e-6)


def test_label_sets_are_bounded(monkeypatch):
    monkeypatch.setattr("valora_serve.server.telemetry.metrics.MAX_LABELS", 20)
    metrics = Metrics(FakeEngine())
    last = Output("x", finish=Finish.STOP, usage=Usage(1, 1), times=Times(0.0, 0.0, 0.0, 1.0))
    for number in range(25):
        metrics.ended(f"adapter {number}", last, [])
    found = samples(metrics.text().decode())
    names = {dict(labels).get("model_name") for _, labels in found} - {None}
    assert len(names) == 21
    assert "other" in names


DOCS = Path(__file__).parents[5] / "docs"


def dashboard():
    """The queries of the dashboard."""
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    return [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]


def test_the_dashboard_shows_the_metrics_of_the_docs():
    text = (DOCS / "how-to" / "monitor.md").read_text().partition("with the prefix `valora_`")[2]
    names = re.findall(r"`(\w+)`", text.partition("An answer that is not streamed")[0])
    assert len(names) >= 25
    shown = " ".join(dashboard())
    assert [name for name in names if f"valora_{name}" not in shown] == []


def test_the_dashboard_asks_only_for_metrics_that_are_there(tmp_path):
    queries = dashboard()
    engine = FakeEngine()
    metrics = Metrics(engine)
    settings = ServerSettings(
        adapter_sources=(str(tmp_path),), adapter_allow=("*",), adapter_cache=str(tmp_path / "c")
    )
    service = Service(engine, None, metrics, None, settings)
    served = ServedSet(engine, None, StateFile(tmp_path / "state"))
    loader = OnRequest(service, served, settings)
    metrics.loader = loader
    last = Output("x", finish=Finish.STOP, usage=Usage(1, 1), times=Times(0.0, 0.0, 0.0, 1.0))
    metrics.ended("tiny", last, [0.0, 1.0])
    metrics.failed("x")
    metrics.http("/x", "GET", 200, 0.1)
    there = {name for name, _ in samples(metrics.text().decode())}
    for query in queries:
        for name in re.findall(r"\b(?:valora|process)_\w+", query):
            assert name in there, name


def test_where_adapters_are():
    models = [*(ServedModel(n, "adapter", n) for n in "abcd"), ServedModel("person", "domain", "d")]
    first = EngineStats(on_device=("a", "person"), on_disk=("b", "c"))
    assert adapter_states(models, first) == {"a": "device", "b": "disk", "c": "disk", "d": "host"}
