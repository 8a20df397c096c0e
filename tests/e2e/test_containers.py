"""The image for CPUs is built, and its compose file started, where there is a container engine.

Its steps are also replayed without one. What is not as in the image: packages come from this
environment instead of an index, and those of Debian are not installed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
import venv
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.valora_serve.serving import ROOT, free_port

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


def instructions(stage):
    """Instructions of the base stage and another one, as (word, rest), continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    now, found = None, []
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            now = rest.split()[-1]
        elif now in ("base", stage):
            found.append((word, rest))
    return found


def test_the_steps_of_the_image_for_cpus(tmp_path):
    image, new, home = tmp_path / "image", tmp_path / "venv", tmp_path / "home"
    image.mkdir()
    home.mkdir()
    venv.create(new)
    (packages,) = new.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    port = free_port()
    kept = {
        "PATH": f"{new}/bin:{os.environ['PATH']}", "HOME": str(home), "VALORA_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    settings, replayed, command = dict(kept), 0, []
    for word, rest in instructions("cpu"):
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, image / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, image / target)
        elif word in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            settings[name] = value
        elif word == "RUN" and "pip install" in rest:
            # pip is that of this environment, too
            offline = "python -m pip install --quiet --no-compile --no-index --no-build-isolation"
            done = subprocess.run(
                ["sh", "-ec", rest.replace("pip install", offline)], cwd=image, env=settings,
                capture_output=True, text=True, check=False, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            replayed += 1
        elif word == "CMD":
            command = json.loads(rest)
        else:
            assert word in ("WORKDIR", "EXPOSE", "USER") or rest.startswith("apt-get "), rest
    assert replayed == 1
    check = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["valora"]
    url = check["healthcheck"]["test"][-1].replace(":8000", f":{port}")
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(new / "bin" / command[0]), *command[1:]], cwd=home, env=kept, stdout=out,
            stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 180
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            try:
                if httpx.get(url).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        models = httpx.get(url.replace("ready", "v1/models")).json()["data"]
        assert "person" in {model["id"] for model in models}
        where = subprocess.run(
            [str(new / "bin" / "python"), "-c", "import valora_serve as it; print(it.__file__)"],
            cwd=home, env=kept, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert Path(where.stdout.strip()).is_relative_to(new)  # not this checkout
    finally:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
