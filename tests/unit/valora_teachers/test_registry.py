"""Teacher kinds by name: one of another package, from training to distilled labels."""

import json
import sys

import pytest

from tests.unit.valora_train.test_cli import write_coco
from valora_data import shards
from valora_data.schema import Task
from valora_teachers.base import TeacherError
from valora_teachers.registry import KINDS, load_teacher, train_teacher
from valora_train import cli

EXAMPLE = '''
import json

from valora_data.schema import Answer
from valora_teachers.base import BatchTeacher, TeacherKind


class MeanBox(BatchTeacher):
    """Answers every image with the mean box of the training samples."""

    def __init__(self, task, labels, box):
        super().__init__(task, labels)
        self.box = box

    def _answer_batch(self, samples):
        from valora_data.schema import Box

        return [Answer((Box(*self.box, self.labels[0], confidence=0.75),)) for _ in samples]


class MeanBoxKind(TeacherKind):
    artefact = "mean.json"
    trainable = True

    def options(self):
        return ("scale",)

    def load(self, weights, task, labels, names, options, prompt):
        return MeanBox(task, labels, json.loads(open(weights).read()))

    def train(self, samples, task, labels, folder, options, on_epoch):
        folder.mkdir(parents=True, exist_ok=True)
        boxes = [box.xyxy for sample in samples for box in sample.answer.boxes]
        mean = [options.get("scale", 1) * sum(edge) / len(boxes) for edge in zip(*boxes)]
        (folder / self.artefact).write_text(json.dumps(mean))
        return {"boxes": len(boxes)}


extension = MeanBoxKind
'''


def test_a_kind_of_another_package_is_trained_and_labels(installed, tmp_path, monkeypatch, capfd):
    installed("valora.teachers", "mean_box", EXAMPLE)
    monkeypatch.chdir(tmp_path)
    data = write_coco(tmp_path / "cats")
    arguments = ["valora-train", *data, "teacher=own", "teacher.kind=mean_box",
                 "+teacher.options.scale=1", "domains.cat.teacher=train",
                 "command=distill"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    cli.main()
    (taught,) = (tmp_path / ".valora").glob("teach-cat-*[0-9a-f]")
    assert json.loads((taught / "report.json").read_text())["boxes"] > 0
    box = json.loads((taught / "mean.json").read_text())
    (distilled,) = (tmp_path / ".valora").glob("distill-cat-*[0-9a-f]")
    samples = shards.read(distilled / "taught")
    assert len(samples) > 5
    for sample in samples:
        (found,) = sample.answer.boxes
        assert found.xyxy == pytest.approx(box) and found.confidence == 0.75
    # A trained model is copied into its stage, and used from there.
    place = arguments.index("domains.cat.teacher=train")
    arguments[place] = f"domains.cat.teacher={taught}/mean.json"
    capfd.readouterr()
    cli.main()
    assert len(list((tmp_path / ".valora").glob("teach-cat-*[0-9a-f]/mean.json"))) == 2


def test_unknown_names_list_what_there_is(tmp_path, installed):
    installed("valora.teachers", "mean_box", EXAMPLE)
    known = "function, huggingface, in_context, mean_box, small, yolo, yolo_world"
    with pytest.raises(TeacherError, match=f"unknown teacher kind 'oracle': choose one of {known}"):
        load_teacher("oracle", tmp_path, ["cat"])
    with pytest.raises(TeacherError, match=r"unknown option seed of teacher mean_box: .* scale"):
        train_teacher("mean_box", [], ["cat"], tmp_path, {"seed": 1})
    with pytest.raises(TeacherError, match=r"huggingface is not trained here: .* choose .*yolo or"):
        train_teacher("huggingface", [], ["cat"], tmp_path, task=Task.CLASSIFICATION)


@pytest.mark.parametrize("name", ["function", "huggingface", "small", "yolo", "yolo_world"])
def test_builtin_kinds_declare_themselves_without_their_libraries(name):
    kind = KINDS[name]
    assert kind.trainable == (type(kind()).train is not KINDS["function"].train)
    assert (kind.artefact is None) == (name in ("function", "huggingface"))
