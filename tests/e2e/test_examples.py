"""The scripts of docs/examples, as a user runs them."""

import os

import pytest

from tests.e2e.valora_serve.serving import ROOT, Process
from tests.support.forked import Forked, finish
from valora_serve.demo.command import BUNDLES

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"
BUNDLE = BUNDLES / "detection"


def run(name, folder, *arguments):
    return finish(Forked(name, arguments, folder, env={**os.environ, "PYTHONPATH": str(EXAMPLES)}))


def test_every_endpoint(tmp_path):
    with Process(BUNDLE, "--no-golden", cwd=tmp_path) as process:
        said = run("endpoints", tmp_path, process.url)
    assert "detections" in said
    assert "{'status': 'ok'} None" in said


def test_the_engine_in_ones_own_process(tmp_path):
    said = run("engine", tmp_path, BUNDLE, BUNDLE / "golden" / "person-0.png")
    said = said[said.index("license_plate {") :].splitlines()
    assert [line.split()[0] for line in said[:6]] == [
        "license_plate", "traffic_sign", "vehicle", "vegetation", "bicycle", "person",
    ]  # fmt: skip
    assert "'label': 'person'" in said[5]
    assert said[-1].strip()
