"""Teacher kinds by name: one of another package, from training to distilled labels."""

import json
import sys

import pytest

from tests.support.stores import new_store
from tests.unit.valora_train.test_cli import write_coco
from valora_data import shards
from valora_data.schema import Task
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, make_teacher
from valora_train import cli

EXAMPLE = """
import json

from valora_data.schema import Answer, Box
from valora_teachers.base import Teacher, TeacherOptions


class Options(TeacherOptions):
    scale: float = 1.0


class MeanBox(Teacher):
    options_type = Options
    artefact = "mean.json"
    trainable = True

    def load(self, weights):
        self.box = json.loads(open(weights).read())

    def answer_batch(self, samples):
        return [Answer((Box(*self.box, self.labels[0], confidence=0.75),)) for _ in samples]

    def train(self, samples, folder, on_epoch=None, validation=()):
        boxes = [box.xyxy for sample in samples for box in sample.answer.boxes]
        mean = [self.options.scale * sum(edge) / len(boxes) for edge in zip(*boxes)]
        (folder / self.artefact).write_text(json.dumps(mean))
        return {"boxes": len(boxes)}


extension = MeanBox
"""


def test_a_kind_of_another_package_is_trained_and_labels(installed, tmp_path, monkeypatch):
    installed("valora.teachers", "mean_box", EXAMPLE)
    monkeypatch.chdir(tmp_path)
    new_store(tmp_path)
    arguments = ["valora-train", *write_coco(tmp_path / "cats", count=30), "teacher=own",
                 "teacher.kind=mean_box", "+teacher.options.scale=1", "command=distill",
                 "domains.cat.teacher=train"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    cli.main()
    (trained,) = (tmp_path / ".valora").glob("teach-cat-*[0-9a-f]")
    assert json.loads((trained / "report.json").read_text())["boxes"] > 0
    box = json.loads((trained / "mean.json").read_text())
    (distilled,) = (tmp_path / ".valora").glob("distill-cat-*[0-9a-f]")
    samples = shards.read(distilled / "taught")
    assert len(samples)
    for sample in samples:
        (found,) = sample.answer.boxes
        assert found.xyxy == pytest.approx(box) and found.confidence == 0.75
    # A trained model is copied into its stage, and used from there.
    arguments += [f"domains.cat.teacher={trained}/mean.json", "command=teach"]
    cli.main()
    assert len(list((tmp_path / ".valora").glob("teach-cat-*[0-9a-f]/mean.json"))) == 2


@pytest.mark.parametrize(
    ("kind", "weights", "options", "task", "message"),
    [
        ("oracle", "x", {}, Task.DETECTION,
         "unknown teacher kind 'oracle': choose one of function, huggingface, in_context, "
         "mean_box, small, yolo, yolo_world"),
        ("mean_box", "x", {"seed": 1}, Task.DETECTION,
         "unknown option seed of teacher mean_box: expected scale"),
        ("in_context", "x", {"max_tokens": "many"}, Task.CONTEXT,
         "teacher.options.max_tokens='many' is not possible: Input should be a valid integer"),
        ("yolo", "x", {"size": 100}, Task.DETECTION, "size=100 .* a multiple of 32"),
        ("small", "x", {"names": ["a"]}, Task.VIDEO, "teacher.options.names=.'a'. is no mapping"),
        ("yolo", "x.pt", {}, Task.CAPTION, "a YOLO gives no answers for task caption"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(kind, weights, options, task, message, installed):
    installed("valora.teachers", "mean_box", EXAMPLE)
    with pytest.raises(TeacherError, match=message):
        load_teacher(kind, weights, ["cat"], options, task)


def test_classes_are_found_whatever_their_case():
    def found(labels, names=None):
        teacher = make_teacher("yolo", Task.DETECTION, labels, {"names": names})
        teacher.match_classes("m", {0: "License Plate", 1: "sign", 2: "other"})
        return teacher.label_of

    assert found(["license_plate", "sign"]) == {0: "license_plate", 1: "sign"}
    assert found(["a"], {"sign": "a", "other": "a"}) == {1: "a", 2: "a"}
    for names in (None, {"crow": "fox"}):
        with pytest.raises(TeacherError, match=r"m has no class '(fox|crow)', only License Plate,"):
            found(["fox"], names)
