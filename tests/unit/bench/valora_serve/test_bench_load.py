"""The figures of `bench_load` against NumPy, and what it sends to a server."""

import json

import numpy as np
import pytest

from tests.bench.valora_serve import bench_load as bench
from tests.support.http_helpers import serving
from valora_serve.errors import SettingsError
from valora_serve.workloads import traces


def test_bench_figures_against_numpy():
    results = [
        bench.Result(
            "a", latency=1.0, first=0.5, gaps=[0.1, 0.4], prompt=10, output=3, latency_limit=0.9
        ),
        bench.Result("a", latency=3.0, first=1.5, gaps=[], prompt=20, output=1),
        bench.Result("b", error="429 overloaded", latency_limit=5.0),
        bench.Result("b", latency=2.0, first=2.0, prompt=66, output=0, latency_limit=5.0),
    ]
    figures = bench.summarise(results, slo=2.5)
    assert (figures["requests"], figures["answered"]) == (4, 3)
    assert figures["errors"] == {"429 overloaded": 1}
    assert figures["average_token_latency"] == pytest.approx(6.0 / 100)
    # Late, late, not answered, in time.
    assert figures["slo_attainment"] == pytest.approx(1 / 4)
    assert figures["seconds"]["latency"]["p50"] == 2.0
    assert figures["seconds"]["latency"]["p90"] == pytest.approx(np.percentile([1, 2, 3], 90))
    assert figures["seconds"]["between tokens"]["mean"] == pytest.approx(0.25)
    empty = bench.summarise([bench.Result("a", error="x")], None)
    assert empty["average_token_latency"] is None
    assert empty["slo_attainment"] is None


def test_bench_asks_for_what_the_server_has():
    target = bench.Target(256, "tiny", ("person", "scene"), ("other",))
    trace = traces.video(3, 5.0, adapters=4, skew=None, seed=1)
    requests, cut = bench.build_requests(trace, target, 0)
    assert cut == 0
    assert {request.model for request in requests} == {"person", "scene"}
    assert all(request.path == f"/v1/vision/{request.model}" for request in requests)
    assert {len(request.body.get("frames", [1])) for request in requests} == {1, traces.CLIP_FRAMES}
    images = [json.dumps(request.body) for request in requests]
    assert len(set(images)) == len(images)
    requests, cut = bench.build_requests(traces.poisson(5, 5, prompt=500, output=50), target, 0)
    assert cut == len(requests)
    assert all(
        len(request.body["prompt"]) == 256 - 50 - bench.TEMPLATE_TOKENS for request in requests
    )
    assert {request.model for request in requests} == {"other"}
    assert [request.at for request in requests] == sorted(request.at for request in requests)


def test_bench_says_what_was_refused(capsys):
    with serving(max_waiting=1, rate=60, burst=3) as server:
        status = bench.main([
            "--url", server.url, "--workload", "at_once", "--requests", "10", "--slo", "5",
        ])  # fmt: skip
        said = capsys.readouterr().out
    assert status == 0
    assert "× 429" in said
    assert "answered within their latency limit" in said
    with pytest.raises(SettingsError, match="does not answer"):
        bench.main(["--url", "http://127.0.0.1:9"])
