"""Teachers by name: a kind of another package, from training to labels; any Python callable."""

import json

import pytest
from PIL import Image

from tests.support.detection_sets import coco_domain
from tests.support.stores import new_store
from valora_data import shards
from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher

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


def test_a_kind_of_another_package_is_trained_and_labels(installed, tmp_path, valora_train):
    installed("valora.teachers", "mean_box", EXAMPLE)
    new_store(tmp_path)
    arguments = [*coco_domain(tmp_path / "cats", count=30), "teacher=own",
                 "teacher.kind=mean_box", "+teacher.options.scale=1", "command=distill",
                 "domains.cat.teacher=train"]  # fmt: skip
    assert valora_train(*arguments)[0] == 0
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
    given = f"domains.cat.teacher={trained}/mean.json"
    assert valora_train(*arguments, given, "command=teach")[0] == 0
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


LABELS = ("cat", "dog")
SAMPLES = [
    Sample(name, Image.new("RGB", (8, 6), "white"), Answer()) for name in ("cat1", "dog1", "cat2")
]
HERE = __name__
NAN = float("nan")
SAID = []


def by_name(samples):
    """Reads the label off the id; found by its name below."""
    return [sample.id[:3] for sample in samples]


def say(samples):
    return SAID


def answers(task, labels, said, names=None, samples=SAMPLES[:1]):
    SAID[:] = said
    return load_teacher("function", f"{HERE}:say", labels, {"names": names}, task).answer(samples)


def test_an_entry_point():
    teacher = load_teacher("function", f"{HERE}:by_name", LABELS, {"batch": 2}, Task.CLASSIFICATION)
    done = []
    found = teacher.answer(SAMPLES, lambda *args: done.append(args))
    assert [answer.label for answer in found] == ["cat", "dog", "cat"]
    assert done == [(2, 3), (3, 3)]
    with pytest.raises(TeacherError, match="gave 1 answer for 3 samples: return one for each"):
        answers(Task.CLASSIFICATION, LABELS, ["cat"], samples=SAMPLES)
    with pytest.raises(TeacherError, match="clear gave 0 answers for 3 samples"):  # but None
        load_teacher("function", "builtins:list.clear", LABELS, {}, Task.COUNTING).answer(SAMPLES)


@pytest.mark.parametrize(
    ("task", "labels", "said", "answer"),
    [
        (Task.CLASSIFICATION, LABELS, "dog", Answer(label="dog")),
        (Task.CLASSIFICATION, LABELS, {"cat": 3.0, "dog": 1.0},
         Answer(label="cat", soft=(0.75, 0.25))),
        (Task.VQA, ("dog", "cat"), {"kitten": 0.25, "tom": 0.25, "dog": 0.5},
         Answer(answers=("dog",), soft=(0.5, 0.5))),
        (Task.VIDEO, LABELS, Answer(label="cat"), Answer(label="cat")),
        (Task.COUNTING, ("0", "1", "2"), 2, Answer(count=2)),
        (Task.VQA, (), "blue", Answer(answers=("blue",))),
        (Task.CLASSIFICATION, LABELS, {"cat": 0.0}, Answer()),  # which must not be a sure cat
        (Task.CAPTION, (), ["a cat", "one cat"], Answer(captions=("a cat", "one cat"))),
        (Task.GROUNDING, (), Box(0, 0, 2, 2, "it", 0.5), Answer((Box(0, 0, 2, 2, "it", 0.5),))),
        (Task.DETECTION, LABELS, [Box(0, 0, 2, 2, "tom", 0.5), Box(1, 1, 3, 3, "dog", 0.75)],
         Answer((Box(1, 1, 3, 3, "dog", 0.75), Box(0, 0, 2, 2, "cat", 0.5)))),
        (Task.DETECTION, LABELS, None, Answer()),
        (Task.DETECTION, LABELS, [Box(-1, 2, 99, 4, "cat"), Box(9, 7, 10, 8, "cat")],
         Answer((Box(0, 2, 8, 4, "cat"),))),
        (Task.CAPTION, (), ["", " ", "a cat"], Answer(captions=("a cat",))),
    ],
)  # fmt: skip
def test_what_a_function_may_say(task, labels, said, answer):
    assert answers(task, labels, [said], {"kitten": "cat", "tom": "cat"}) == [answer]


@pytest.mark.parametrize(
    ("task", "labels", "said", "message"),
    [
        (Task.CLASSIFICATION, LABELS, "fox", r"says 'fox', which is not one of cat, dog: name"),
        (Task.CLASSIFICATION, LABELS, ["cat", "dog"], r"says \['cat', 'dog'\] of sample cat1, w"),
        (Task.CLASSIFICATION, LABELS, Answer(label="cat", soft=(1.0,)), "gave 1 soft label "),
        (Task.COUNTING, ("0", "1"), "many", "is no answer for task counting"),
        (Task.DETECTION, LABELS, [Box(0, 0, 1, 1, "fox")], r"'fox', which .* \(sample cat1\)"),
        (Task.DETECTION, LABELS, ["cat"], "expected boxes"),
        (Task.DETECTION, LABELS, Box(5, 2, 3, 4, "cat"), "a box has x0 < x1, y0 < y1"),
        (Task.DETECTION, LABELS, Box(1, 2, NAN, 4, "cat"), "a box has x0 < x1, y0 < y1"),
        (Task.DETECTION, LABELS, Box(1, 2, 3, 4, "cat", NAN), "a confidence from 0 to 1"),
        (Task.CLASSIFICATION, LABELS, {"cat": NAN, "dog": 0.2}, "must add up to 1, got a sum of n"),
        (Task.CAPTION, (), {"cat": 1.0}, "no answer for task caption"),
    ],
)
def test_what_it_may_not_say(task, labels, said, message):
    with pytest.raises(TeacherError, match=message):
        answers(task, labels, [said])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_name", "'by_name' names no function: write package"),
        ("no.such:thing", r"function no\.such:thing cannot be loaded"),
        (f"{HERE}:nothing", r"cannot be loaded .*has no attribute 'nothing'"),
        (f"{HERE}:LABELS", "is no function but a tuple"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(TeacherError, match=message):
        load_teacher("function", name, LABELS, task=Task.CLASSIFICATION)
