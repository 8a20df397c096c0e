"""What teachers reach, and what of their answers is distilled and shown."""

import json
import random
from dataclasses import replace

import pytest

from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.scenes.builtin import builtin_domain
from valora_train.fusion.samples import PSEUDO_LABELLED
from valora_train.metrics.evaluate import match
from valora_train.settings import DomainSettings, SourceSettings, TeacherSettings
from valora_train.stages.data import build_data
from valora_train.stages.distill import (
    REPORT,
    answers_on_test,
    build_distilled,
    build_teacher,
    teacher_accuracy,
    teacher_figures,
    teacher_speed,
)

SEEN = {}  # the boxes that the teacher gave, by sample
PLANTS = list(builtin_domain(Task.CLASSIFICATION, "plant_type").labels)


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
        SEEN[sample.id] = tuple(sorted(boxes, key=lambda box: -box.confidence))
        answers.append(Answer(SEEN[sample.id]))
    return answers


def guess(samples):
    """A classifier that always says the first label, rather surely."""
    rest = [0.3 / (len(PLANTS) - 1)] * (len(PLANTS) - 1)
    return [dict(zip(PLANTS, [0.7, *rest], strict=True)) for _ in samples]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Builds the data of a domain, once for each."""
    built = {}

    def of(domain):
        if domain.name not in built:
            built[domain.name] = tmp_path_factory.mktemp(domain.name)
            build_data(domain, built[domain.name])
        return built[domain.name]

    return of


PERSON = DomainSettings(
    name="person", task=Task.DETECTION, labels=["person"], prompt="find",
    teacher=f"{__name__}:jitter",
    source=SourceSettings(counts={"train": 4, "unlabelled": 24, "val": 24, "test": 30}),
)  # fmt: skip
SKY = DomainSettings(
    name="plant_type", task=Task.CLASSIFICATION, labels=PLANTS, prompt="how?",
    teacher=f"{__name__}:guess",
    source=SourceSettings(counts={"train": 40, "unlabelled": 12, "val": 12, "test": 12}),
)  # fmt: skip


def distilled(domain, data, out, **teacher):
    out.mkdir()
    build_distilled(domain, TeacherSettings(kind="function", **teacher), data(domain), None, out)
    return out


def test_a_detector_is_measured_with_all_its_boxes(data, tmp_path):
    out = distilled(PERSON, data, tmp_path / "out")
    figures = teacher_figures(out)
    test = shards.read(data(PERSON) / Split.TEST)
    found = [SEEN[sample.id] for sample in test]
    matches = match(found, [sample.answer.boxes for sample in test], ["person"])
    assert figures["teacher_map"] == matches.map
    assert 0.2 < figures["teacher_map"] < 0.95
    threshold = json.loads((out / REPORT).read_text())["threshold"]
    assert figures["teacher"] == teacher_accuracy(out, Split.TEST) == matches.f1(threshold)
    low, high = figures["teacher_ci95"]
    assert low < figures["teacher"] < high
    assert set(figures) >= {"teacher_ece", "teacher_precision", "teacher_recall"}
    assert teacher_speed(out)["images_per_second"] > 0


@pytest.mark.parametrize(("least", "threshold", "sure"), [(0.3, None, 0.3), (0.05, 0.4, 0.4)])
def test_boxes_below_the_least_confidence_are_never_distilled(
    data, tmp_path, least, threshold, sure
):
    out = distilled(PERSON, data, tmp_path / "out", min_confidence=least, threshold=threshold)
    samples = shards.read(out / PSEUDO_LABELLED)
    kept = [box.confidence for one in samples for box in one.answer.boxes]
    assert min(kept) >= sure
    if threshold is not None:  # what it says of the test images is kept
        found = answers_on_test(out)
        assert [[(b["box"], b["confidence"], b["label"]) for b in boxes] for boxes in found] == [
            [(list(b.xyxy), b.confidence, "person") for b in SEEN[one.id] if b.confidence >= sure]
            for one in shards.read(data(PERSON) / Split.TEST)
        ]
        assert any(found)


def test_a_teacher_without_answers_is_refused(data, tmp_path):
    with pytest.raises(DataError, match=r"answers none of 12 unlabelled .* at confidence 0\.8:"):
        distilled(SKY, data, tmp_path / "unsure", threshold=0.8)


def test_reports_of_an_earlier_version(tmp_path):
    report = {"accuracy": {"test": {"accuracy": 0.5, "mae": float("nan")}}}
    (tmp_path / REPORT).write_text(json.dumps(report))
    assert teacher_figures(tmp_path) == {"teacher": 0.5}
    assert answers_on_test(tmp_path) == []
    assert teacher_speed(tmp_path) == {}


def test_a_classifier_has_a_calibration_error(data, tmp_path):
    out = distilled(SKY, data, tmp_path / "out")
    figures = teacher_figures(out)
    assert figures["teacher_ece"] == pytest.approx(abs(0.7 - figures["teacher"]), abs=1e-5)
    assert answers_on_test(out) == [{"label": PLANTS[0], "confidence": pytest.approx(0.7)}] * 12
    assert {sample.answer.label for sample in shards.read(out / PSEUDO_LABELLED)} == {PLANTS[0]}


def test_a_small_teacher_is_distilled_with_its_soft_labels(data, tmp_path):
    teacher = TeacherSettings(kind="small", labelled=True, options={"epochs": 2, "size": 32})
    domain, out = replace(SKY, teacher="train"), tmp_path
    build_teacher(domain, teacher, data(SKY), out, lambda *_: None)
    build_distilled(domain, teacher, data(SKY), out, out)
    samples = shards.read(out / PSEUDO_LABELLED)
    assert len(samples) == 12 + 40
    assert all(len(sample.answer.soft) == len(PLANTS) for sample in samples[:12])
    assert all(sample.answer.choice for sample in samples)
    assert set(json.loads((out / REPORT).read_text())["accuracy"]) == {"unlabelled", "val", "test"}
