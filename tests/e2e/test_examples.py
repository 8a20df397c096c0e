"""The scripts of docs/examples, as a user runs them."""

import subprocess
import sys

import pytest

from tests.e2e.valora_serve.serving import ROOT, Process
from valora_serve.demo.command import BUNDLES

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"
BUNDLE = BUNDLES / "detection"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_endpoint(tmp_path):
    process = Process(BUNDLE, "--no-golden", cwd=tmp_path).ready()
    try:
        said = run("endpoints.py", process.url)
    finally:
        process.end()
    assert "detections" in said
    assert "{'status': 'ok'} None" in said


def test_the_engine_in_ones_own_process():
    said = run("engine.py", BUNDLE, BUNDLE / "golden" / "person-0.png").splitlines()
    assert [line.split()[0] for line in said[:6]] == [
        "license_plate", "traffic_sign", "vehicle", "vegetation", "bicycle", "person",
    ]  # fmt: skip
    assert "'label': 'person'" in said[5]
    assert said[-1].strip()
