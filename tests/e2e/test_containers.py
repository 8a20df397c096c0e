"""The image for CPUs is built, and its compose file started, where there is a container engine."""

import shutil
import subprocess
import time
import uuid

import httpx
import pytest

from tests.e2e.valora_serve.serving import ROOT

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "docs" / "deploy"


def docker(*arguments, seconds=60):
    return subprocess.run(
        ["docker", *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


@pytest.fixture
def project():
    """Name of a compose project, which is taken down in the end."""
    if shutil.which("docker") is None or docker("info").returncode:
        pytest.skip("no container engine: tests/unit/test_deploy.py lints the files instead")
    if docker("compose", "version").returncode:
        pytest.skip("the container engine has no compose")
    name = f"valora-{uuid.uuid4().hex[:8]}"
    yield name
    docker("compose", "-p", name, "down", "--volumes", "--rmi", "local", seconds=300)


@pytest.mark.timeout(3600)
def test_a_server_with_prometheus_and_grafana(project):
    (ROOT / "bundles").mkdir(exist_ok=True)
    override = "services: {valora: {command: [valora, demo, --no-browser, --host, 0.0.0.0, "
    override += "--allowed-hosts, valora]}}"
    given = ["compose", "-p", project, "-f", "compose.yaml", "-f", "-"]
    started = subprocess.run(
        ["docker", *given, "up", "--build", "--detach", "--wait"], cwd=DEPLOY, input=override,
        capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    models = httpx.get("http://127.0.0.1:8000/v1/models").json()["data"]
    assert "person" in {model["id"] for model in models}
    end = time.monotonic() + 120
    query = "http://127.0.0.1:3000/api/datasources/proxy/uid/prometheus/api/v1/query"
    while not (
        (found := httpx.get(query, params={"query": 'up{job="valora"} == 1'})).is_success
        and found.json()["data"]["result"]
    ):
        assert time.monotonic() < end, found.text
        time.sleep(1)
