"""What the stages before fusion depend on; what teachers reach, and what of it is distilled."""

import json
import random
import shutil
import sys
from dataclasses import replace

import pytest

from tests.support.data_sets import picture
from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.scenes.builtin import builtin_domain
from valora_teachers.registry import KINDS
from valora_train.fusion.samples import PSEUDO_LABELLED
from valora_train.metrics.evaluate import match
from valora_train.settings import DomainSettings, SourceSettings, TeacherSettings
from valora_train.stage import digest
from valora_train.stages.data import build_data, data_stage
from valora_train.stages.distill import (
    REPORT,
    answers_on_test,
    build_distilled,
    build_teacher,
    distill_stage,
    teach_stage,
    teacher_accuracy,
    teacher_figures,
    teacher_speed,
)

SPLITS = ("train", "unlabelled", "val", "test")
FUNCTION = "def answer(samples):\n    return ['red' for _ in samples]\n"


def write_images(root, changed=""):
    """An image folder with all splits; one split may hold other images."""
    number = 0
    for split in SPLITS:
        for label in ("red", "white"):
            for index in range(4):
                number += 1
                seed = number + 1_000 * (split == changed)
                picture(root / split / label / f"{index}.png", seed)


class Chain:
    """The stages before fusion of one domain, in a work folder that outlives the chain."""

    def __init__(self, root, domain, teacher):
        self.work = root / "work"
        stage = data_stage(domain, self.work)
        self.data, self.reused = stage.run(self.work, lambda folder: build_data(domain, folder))
        self.teach, trained = teach_stage(domain, teacher, self.data, self.work), None
        if self.teach is not None:
            artefact = str(KINDS[teacher.kind].artefact)
            trained, _ = self.teach.run(self.work, lambda f: (f / artefact).write_text("weights"))
        self.distill = distill_stage(domain, teacher, self.data, trained, self.work)

    @property
    def keys(self):
        keys = {split: digest(self.data / split) for split in SPLITS}
        keys["teach"] = self.teach.key if self.teach else ""
        return keys | {"distill": self.distill.key}


@pytest.fixture
def domain(tmp_path):
    write_images(tmp_path / "set")
    return DomainSettings(
        "cells", Task.CLASSIFICATION, ["red", "white"], "Which?",
        source=SourceSettings(kind="imagefolder", path=str(tmp_path / "set")),
    )  # fmt: skip


SMALL = TeacherSettings(kind="small", options={"epochs": 2})


def changes(before, after):
    return {name for name, key in before.keys.items() if after.keys[name] != key}


def test_a_stage_depends_on_the_splits_that_it_reads(tmp_path, domain):
    teacher = replace(SMALL, labelled=True)
    before = Chain(tmp_path, domain, teacher)
    for split in SPLITS:
        write_images(tmp_path / "set", changed=split)
        after = Chain(tmp_path, domain, teacher)
        assert not after.reused
        assert changes(before, after) == {split, "distill", *(["teach"] * (split == "train"))}


def test_settings_that_stages_depend_on(tmp_path, domain):
    before = Chain(tmp_path, domain, SMALL)
    for change in ({"required": 0.9}, {"mirror": False}, {"prompt": "?"}, {"name": "blood"}):
        after = Chain(tmp_path, replace(domain, **change), SMALL)
        assert not changes(before, after)
        # And what was made under another name is found.
        assert after.teach.folder(after.work) == before.teach.folder(before.work)
    labels = Chain(tmp_path, replace(domain, teacher="labels"), SMALL)
    assert changes(before, labels) == {"teach", "distill"}
    other = TeacherSettings(kind="yolo", threshold=0.4, options={"epochs": 3})
    assert not changes(labels, Chain(tmp_path, replace(domain, teacher="labels"), other))
    for change in (
        {"threshold": 0.5}, {"min_confidence": 0.2}, {"labelled": True},
        {"options": {"epochs": 2, "names": {"a": "red"}}},
    ):  # fmt: skip
        assert changes(before, Chain(tmp_path, domain, replace(SMALL, **change))) == {"distill"}
    longer = replace(SMALL, options={"epochs": 3})
    assert changes(before, Chain(tmp_path, domain, longer)) == {"teach", "distill"}
    # The same data elsewhere and written again is the same.
    (tmp_path / "set").rename(tmp_path / "moved")
    domain = replace(domain, source=replace(domain.source, path=str(tmp_path / "moved")))
    after = Chain(tmp_path, domain, SMALL)
    assert after.reused
    shutil.rmtree(tmp_path / "work")
    again = Chain(tmp_path, domain, SMALL)
    assert not again.reused
    assert not changes(before, again)


@pytest.fixture
def given(tmp_path, domain, monkeypatch):  # the chain of a teacher that lies in `tmp_path`
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(kind, place, prompt="Which?", **options):
        sys.modules.pop("own_teacher", None)
        teacher = TeacherSettings(kind=kind, options=options)
        return Chain(tmp_path, replace(domain, teacher=place, prompt=prompt), teacher)

    return make


def test_options_of_given_models(given, tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    before = given("small", "best")
    assert changes(before, given("small", "best", names={"rot": "red"})) == {"distill"}
    (tmp_path / "best").rename(tmp_path / "other")
    assert not changes(before, given("small", "other"))
    (tmp_path / "other" / "config.json").write_text("{ }")
    assert "teach" in changes(before, given("small", "other"))
    (tmp_path / "vit").mkdir()
    before = given("huggingface", "vit", device="cpu", batch=4)
    assert not changes(before, given("huggingface", "vit", device="cuda", batch=8))
    assert changes(before, given("huggingface", "vit", dtype="bfloat16")) == {"distill"}
    assert changes(before, given("huggingface", "vit", "Say")) == {"distill"}


@pytest.mark.parametrize(
    ("kind", "place", "file", "options"),
    [
        ("yolo_world", "best.pt", "clip/vocab.json", {"text_encoder": "clip"}),
        ("huggingface", "vit", "vit/model.safetensors", {"device": "cpu", "batch": 4}),
        ("function", "own_teacher:answer", "levels/a.json", {"files": ["levels"]}),
        ("function", "own_teacher:answer", "own_teacher.py", {}),
    ],
)
def test_files_of_a_teacher(given, tmp_path, kind, place, file, options):
    (tmp_path / "best.pt").write_bytes(b"weights")
    (tmp_path / "own_teacher.py").write_text(FUNCTION)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    if not (tmp_path / file).exists():
        (tmp_path / file).write_bytes(b"1")
    before = given(kind, place, **options)
    assert not changes(before, given(kind, place, **options))
    with (tmp_path / file).open("a") as written:
        written.write("\n# 2")
    assert changes(before, given(kind, place, **options)) == {"distill"}


SEEN = {}  # the boxes that the teacher gave, by sample
PLANTS = list(builtin_domain(Task.CLASSIFICATION, "plant_type").labels)


def jitter(samples):
    """A detector that sees most objects, roughly, and some that are not there."""
    answers = []
    for sample in samples:
        rng = random.Random(sample.id)
        boxes = []
        for box in sample.answer.boxes:
            x0, y0 = (max(0.0, edge + rng.uniform(-2, 2)) for edge in box.xyxy[:2])
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
