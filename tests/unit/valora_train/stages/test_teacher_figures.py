"""What teachers reach: their mAP against pycocotools on the boxes as they were distilled."""

import contextlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.scenes.builtin import builtin_labels
from valora_train.metrics.measures import calibration_error
from valora_train.settings import DomainSettings, SourceSettings, TeacherSettings
from valora_train.stage import read_json
from valora_train.stages.data import build_data
from valora_train.stages.distill import (
    REPORT,
    TAUGHT,
    answers_on_test,
    build_distilled,
    distill_stage,
    teacher_figures,
    teacher_speed,
)

SEEN: dict[str, tuple[Box, ...]] = {}
"""The boxes that the teacher gave, by sample."""


def jitter(samples):
    """A detector that sees most objects, roughly, and some that are not there."""
    answers = []
    for sample in samples:
        rng = random.Random(sample.id)
        boxes = []
        for box in sample.answer.boxes:
            x0, y0 = box.x0 + rng.uniform(-2, 2), box.y0 + rng.uniform(-2, 2)
            boxes.append(Box(x0, y0, box.x1, box.y1, box.label, rng.uniform(0.02, 1)))
        for _ in range(2):
            x0, y0 = rng.uniform(0, 30), rng.uniform(0, 30)
            boxes.append(Box(x0, y0, x0 + 20, y0 + 25, "person", rng.uniform(0.01, 0.5)))
        boxes.sort(key=lambda box: -box.confidence)
        SEEN[sample.id] = tuple(boxes)
        answers.append(Answer(tuple(boxes)))
    return answers


def pycocotools_map(truth, found):
    """COCO's mAP, from rows in its own format."""

    def rows(images):
        return [
            {"id": 0, "image_id": at, "category_id": 1, "area": b.area, "iscrowd": 0,
             "bbox": [b.x0, b.y0, b.x1 - b.x0, b.y1 - b.y0], "score": b.confidence}
            for at, boxes in enumerate(images) for b in boxes
        ]  # fmt: skip

    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = {
            "info": {}, "images": [{"id": at} for at in range(len(truth))],
            "categories": [{"id": 1, "name": "person"}],
            "annotations": [row | {"id": at + 1} for at, row in enumerate(rows(truth))],
        }  # fmt: skip
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(rows(found)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> tuple[DomainSettings, Path]:
    data = tmp_path_factory.mktemp("data")
    counts = {"train": 4, "unlabelled": 40, "val": 40, "test": 50}
    domain = DomainSettings(
        name="person", task=Task.DETECTION, labels=["person"], prompt="find",
        teacher="detector:jitter", source=SourceSettings(counts=counts),
    )  # fmt: skip
    build_data(domain, data)
    return domain, data


def distilled(domain, data, out, monkeypatch, **teacher):
    import sys

    monkeypatch.setitem(sys.modules, "detector", sys.modules[__name__])
    out.mkdir()
    build_distilled(domain, TeacherSettings(kind="function", **teacher), data, None, out)
    return out


def test_the_teachers_map_is_that_of_pycocotools(person, tmp_path, monkeypatch):
    domain, data = person
    out = distilled(domain, data, tmp_path / "out", monkeypatch)
    figures = teacher_figures(out)
    test = shards.read(data / Split.TEST)
    truth = [sample.answer.boxes for sample in test]
    found = [SEEN[sample.id] for sample in test]
    assert figures["teacher_map"] == pytest.approx(pycocotools_map(truth, found), abs=1e-9)
    assert 0.2 < figures["teacher_map"] < 0.95
    # Also of boxes that are no training samples: ours are measured from 0.01 on, too.
    assert min(box.confidence for boxes in found for box in boxes) < 0.05
    report = json.loads((out / REPORT).read_text())
    assert figures["teacher"] == report["accuracy"]["test"]["accuracy"]
    low, high = figures["teacher_ci95"]
    assert low < figures["teacher"] < high
    assert set(figures) >= {"teacher_ece", "teacher_precision", "teacher_recall"}


def test_boxes_below_the_least_confidence_are_never_distilled(person, tmp_path, monkeypatch):
    domain, data = person
    for number, threshold in enumerate((None, 0.1)):
        out = distilled(
            domain, data, tmp_path / str(number), monkeypatch,
            min_confidence=0.3, threshold=threshold,
        )  # fmt: skip
        kept = [box.confidence for one in shards.read(out / TAUGHT) for box in one.answer.boxes]
        assert min(kept) >= 0.3
        assert teacher_figures(out)["teacher_map"] > 0.2


def test_what_the_teacher_says_of_the_test_images_is_kept(person, tmp_path, monkeypatch):
    domain, data = person
    for number, (least, threshold, sure) in enumerate([(0.3, 0.1, 0.3), (0.05, 0.4, 0.4)]):
        out = distilled(
            domain, data, tmp_path / str(number), monkeypatch,
            min_confidence=least, threshold=threshold,
        )  # fmt: skip
        test = shards.read(data / Split.TEST)
        expected = [
            [([b.x0, b.y0, b.x1, b.y1], b.confidence) for b in SEEN[one.id] if b.confidence >= sure]
            for one in test
        ]
        found = answers_on_test(out)
        assert [[(b["box"], b["confidence"]) for b in boxes] for boxes in found] == expected
        assert {box["label"] for boxes in found for box in boxes} == {"person"}
        assert any(expected)


def test_the_teachers_speed_is_measured_while_it_works(person, tmp_path, monkeypatch):
    domain, data = person
    out = distilled(domain, data, tmp_path / "out", monkeypatch)
    speed = teacher_speed(out)
    assert speed["images_per_second"] > 0
    assert speed["machine"]


def silent(samples):
    """A teacher that has nothing to say."""
    return [Answer(answers=("",)) for _ in samples]


def test_a_teacher_without_answers_is_refused(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    domain = DomainSettings(
        name="ledger", task=Task.CONTEXT, labels=[], prompt="{}", teacher="detector:silent",
        source=SourceSettings(kind="records", entries=5),
    )  # fmt: skip
    build_data(domain, data)
    with pytest.raises(DataError, match="of domain ledger answers none of 60 unlabelled samples"):
        distilled(domain, data, tmp_path / "out", monkeypatch)


def test_labels_without_a_teacher_have_no_figures(person, tmp_path):
    domain, data = person
    build_distilled(replace(domain, teacher="labels"), TeacherSettings(), data, None, tmp_path)
    assert teacher_figures(tmp_path) == {"teacher": None}
    assert answers_on_test(tmp_path) == []
    assert teacher_speed(tmp_path) == {}


def test_a_report_of_an_earlier_version_is_read(tmp_path):
    report = {"accuracy": {"test": {"accuracy": 0.5, "mae": float("nan")}}}
    (tmp_path / REPORT).write_text(json.dumps(report))
    assert teacher_figures(tmp_path) == {"teacher": 0.5}
    assert answers_on_test(tmp_path) == []
    assert teacher_speed(tmp_path) == {}
    assert read_json(tmp_path / REPORT)["accuracy"]["test"]["accuracy"] == 0.5


def test_calibration_of_labels_equals_its_definition():
    rng = np.random.default_rng(3)
    shares = rng.dirichlet([0.6, 0.6, 0.6], size=400)
    labels = ["a", "b", "c"]
    truth = [labels[place] for place in rng.integers(0, 3, 400)]
    predicted = [
        Answer(label=labels[int(row.argmax())], soft=tuple(map(float, row))) for row in shares
    ]
    bins = np.minimum((shares.max(axis=1) * 15).astype(int), 14)
    hit = np.array([one.label == other for one, other in zip(predicted, truth, strict=True)])
    expected = sum(
        abs(hit[bins == number].mean() - shares.max(axis=1)[bins == number].mean())
        * (bins == number).mean()
        for number in set(bins.tolist())
    )
    answers = [Answer(label=label) for label in truth]
    assert calibration_error(predicted, answers) == pytest.approx(expected, abs=1e-5)
    assert calibration_error([Answer(label="a")], [Answer(label="a")]) is None
    assert calibration_error([], []) is None


def test_label_teachers_have_a_calibration_error(tmp_path, monkeypatch):
    labels = list(builtin_labels(Task.CLASSIFICATION, "weather"))
    domain = DomainSettings(
        name="weather", task=Task.CLASSIFICATION, labels=labels, prompt="how?",
        teacher="guesser:guess",
        source=SourceSettings(counts={"train": 4, "unlabelled": 8, "val": 12, "test": 12}),
    )  # fmt: skip
    data, out = tmp_path / "data", tmp_path / "out"
    for folder in (data, out):
        folder.mkdir()
    build_data(domain, data)
    (tmp_path / "guesser.py").write_text(
        "def guess(samples):\n"
        f"    return [dict(zip({labels!r}, [0.7] + [0.3 / {len(labels) - 1}] * {len(labels) - 1}))"
        " for _ in samples]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    build_distilled(domain, TeacherSettings(kind="function"), data, None, out)
    figures = teacher_figures(out)
    assert figures["teacher_ece"] == pytest.approx(abs(0.7 - figures["teacher"]), abs=1e-5)
    assert answers_on_test(out) == [{"label": labels[0], "confidence": pytest.approx(0.7)}] * 12
    assert distill_stage(domain, TeacherSettings(kind="function"), data, None).version == 5
