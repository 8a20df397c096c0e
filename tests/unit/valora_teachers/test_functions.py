"""Any Python callable as a teacher, and the registry that finds teachers by name."""

from pathlib import Path

import pytest
from PIL import Image

from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers.base import TeacherError, choice_answer, map_classes
from valora_teachers.functions import FunctionTeacher, look_up
from valora_teachers.registry import load_teacher, train_teacher

LABELS = ("cat", "dog")


def sample(name: str, prompt: str | None = None) -> Sample:
    return Sample(name, Image.new("RGB", (8, 6), "white"), Answer(), prompt)


SAMPLES = [sample(name) for name in ("cat1", "dog1", "cat2")]


def by_name(samples: list[Sample]) -> list[str]:
    """Reads the label off the id; found by its name below."""
    return [sample.id[:3] for sample in samples]


class Shelter:
    """Something that can be called."""

    def __call__(self, samples: list[Sample]) -> list[dict[str, float]]:
        return [{"cat": 3.0, "dog": 1.0} for _ in samples]


shelter = Shelter()
HERE = __name__


def test_an_entry_point() -> None:
    teacher = load_teacher("function", f"{HERE}:by_name", LABELS, {"batch": 2}, Task.CLASSIFICATION)
    done: list[tuple[int, int]] = []
    answers = teacher.answer(SAMPLES, lambda *args: done.append(args))
    assert [answer.label for answer in answers] == ["cat", "dog", "cat"]
    assert done == [(2, 3), (3, 3)]
    assert (teacher.task, teacher.labels) == (Task.CLASSIFICATION, LABELS)


def test_probabilities_are_kept_and_scaled() -> None:
    teacher = FunctionTeacher(f"{HERE}:shelter", Task.CLASSIFICATION, LABELS)
    assert teacher.answer(SAMPLES[:1]) == [Answer(label="cat", soft=(0.75, 0.25))]
    named = FunctionTeacher(
        lambda samples: [{"kitten": 0.25, "tom": 0.25, "dog": 0.5} for _ in samples],
        Task.VQA, ("dog", "cat"), {"kitten": "cat", "tom": "cat"},
    )  # fmt: skip
    assert named.answer(SAMPLES[:1]) == [Answer(answers=("dog",), soft=(0.5, 0.5))]


@pytest.mark.parametrize(
    ("task", "labels", "said", "answer"),
    [
        (Task.CLASSIFICATION, LABELS, "dog", Answer(label="dog")),
        (Task.VIDEO, LABELS, Answer(label="cat"), Answer(label="cat")),
        (Task.COUNTING, ("0", "1", "2"), 2, Answer(count=2)),
        (Task.COUNTING, ("0", "1"), {"1": 1.0}, Answer(count=1, soft=(0.0, 1.0))),
        (Task.VQA, (), "blue", Answer(answers=("blue",))),
        (Task.CAPTION, (), ["a cat", "one cat"], Answer(captions=("a cat", "one cat"))),
        (Task.GROUNDING, (), Box(0, 0, 2, 2, "it", 0.5), Answer((Box(0, 0, 2, 2, "it", 0.5),))),
        (
            Task.DETECTION, LABELS, [Box(0, 0, 2, 2, "cat", 0.5), Box(1, 1, 3, 3, "dog", 0.75)],
            Answer((Box(1, 1, 3, 3, "dog", 0.75), Box(0, 0, 2, 2, "cat", 0.5))),
        ),
        (Task.DETECTION, LABELS, [], Answer()),
        (Task.DETECTION, LABELS, None, Answer()),
    ],
)  # fmt: skip
def test_what_a_function_may_say(
    task: Task, labels: tuple[str, ...], said: object, answer: Answer
) -> None:
    assert FunctionTeacher(lambda _: [said], task, labels).answer(SAMPLES[:1]) == [answer]


@pytest.mark.parametrize(
    ("task", "labels", "said", "message"),
    [
        (Task.CLASSIFICATION, LABELS, "fox", r"says 'fox', which is not one of cat, dog: name"),
        (Task.CLASSIFICATION, LABELS, {"fox": 1.0}, r"says 'fox', which is not one of cat, dog"),
        (Task.CLASSIFICATION, LABELS, ["cat", "dog"], r"says \['cat', 'dog'\] of sample cat1, w"),
        (Task.CLASSIFICATION, LABELS, Answer(label="cat", soft=(1.0,)), "gave 1 soft label "),
        (Task.COUNTING, ("0", "1"), "many", "is no answer for task counting"),
        (Task.DETECTION, LABELS, [Box(0, 0, 1, 1, "fox")], r"'fox', which .* \(sample cat1\)"),
        (Task.DETECTION, LABELS, ["cat"], "expected boxes"),
    ],
)
def test_what_it_may_not_say(
    task: Task, labels: tuple[str, ...], said: object, message: str
) -> None:
    with pytest.raises(TeacherError, match=message):
        FunctionTeacher(lambda _: [said], task, labels).answer(SAMPLES[:1])


def test_one_answer_for_each_sample() -> None:
    with pytest.raises(TeacherError, match="gave 1 answer for 3 samples: return one for each"):
        FunctionTeacher(lambda _: ["cat"], Task.CLASSIFICATION, LABELS).answer(SAMPLES)


def test_names_that_lead_nowhere() -> None:
    assert look_up(f"{HERE}:by_name") is by_name
    with pytest.raises(TeacherError, match="'by_name' names no function: write package"):
        look_up("by_name")
    with pytest.raises(TeacherError, match=r"function no\.such:thing cannot be loaded"):
        look_up("no.such:thing")
    with pytest.raises(TeacherError, match=r"cannot be loaded .*has no attribute 'nothing'"):
        look_up(f"{HERE}:nothing")
    with pytest.raises(TeacherError, match="is no function but a tuple"):
        look_up(f"{HERE}:LABELS")


def test_classes_are_found_whatever_their_case() -> None:
    classes = {0: "License Plate", 1: "sign", 2: "other"}
    assert map_classes("m", classes, ["license_plate", "sign"]) == {0: "license_plate", 1: "sign"}
    assert map_classes("m", classes, None) == classes
    assert map_classes("m", classes, ["a"], {"sign": "a", "other": "a"}) == {1: "a", 2: "a"}


def test_a_choice_without_any_probability() -> None:
    assert choice_answer(Task.CLASSIFICATION, LABELS, [0.0, 0.0]) == Answer(label="cat")


def test_the_registry_refuses(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="unknown option speed of teacher function: expected b"):
        load_teacher("function", f"{HERE}:by_name", LABELS, {"speed": 1}, Task.CLASSIFICATION)
    with pytest.raises(TeacherError, match="of kind huggingface is not trained here"):
        train_teacher("huggingface", SAMPLES, LABELS, tmp_path)
    with pytest.raises(TeacherError, match="a YOLO gives no answers for task caption"):
        load_teacher("yolo", tmp_path / "x.pt", (), task=Task.CAPTION)
    with pytest.raises(TeacherError, match="trained here for detection only, not for video"):
        train_teacher("yolo", SAMPLES, LABELS, tmp_path, task=Task.VIDEO)
    with pytest.raises(TeacherError, match="unknown option lr0 of teacher small: expected size"):
        train_teacher("small", SAMPLES, LABELS, tmp_path, {"lr0": 1}, task=Task.VIDEO)
