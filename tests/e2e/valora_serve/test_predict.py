"""`valora predict` with the real engine: it answers as the bundle did when it was exported."""

import json
import os
import shutil

import pytest

from tests.e2e.valora_serve.serving import ENVIRONMENT
from tests.support.forked import Forked, finish
from valora_data.contract.results import BoxesResult
from valora_serve.demo.command import BUNDLES

pytestmark = pytest.mark.slow

BUNDLE = BUNDLES / "detection"


def test_answers_are_the_golden_ones(tmp_path):
    shutil.copytree(BUNDLE / "golden", tmp_path / "photos")
    asked = ["predict", "photos", "--bundle", BUNDLE, "--device", "cpu", "--no-golden",
             "--format", "coco,yolo"]  # fmt: skip
    finish(Forked("valora_serve.commands", asked, tmp_path, env=os.environ | ENVIRONMENT))
    lines = (tmp_path / "predictions" / "predictions.jsonl").read_text().splitlines()
    found = {(row["file"], row["domain"]): row["answer"] for row in map(json.loads, lines)}
    examples = json.loads((BUNDLE / "golden" / "golden.json").read_text())
    assert len(found) == 6 * len(examples)
    domains = json.loads((BUNDLE / "bundle.json").read_text())["domains"]
    for example in examples:
        rows = found[example["image"].removeprefix("golden/"), example["domain"]]["detections"]
        threshold = domains[example["domain"]]["threshold"]
        assert BoxesResult.matches(rows, example["expected"], threshold), example["image"]
    coco = json.loads((tmp_path / "predictions" / "coco.json").read_text())
    assert len(coco["annotations"]) == sum(len(answer["detections"]) for answer in found.values())
