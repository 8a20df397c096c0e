"""The small classifier: learns from pictures and clips, keeps probabilities, opens elsewhere."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.scenes.builtin import builtin_labels, builtin_samples
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, train_teacher
from valora_teachers.small import SmallSettings, SmallTeacher, train_small

QUICK = SmallSettings(size=32, width=8, epochs=8, batch=16, lr=6e-3)
WAYS = ("left", "right")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def clip(seed: int) -> Sample:
    """A bright bar that goes left or right over four frames."""
    rng = np.random.default_rng(seed)
    label, row = WAYS[seed % 2], int(rng.integers(4, 24))
    frames = []
    for step in range(4):
        pixels = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
        x = 4 + 6 * (step if label == "right" else 3 - step)
        pixels[row : row + 6, x : x + 5] = 230
        frames.append(Image.fromarray(pixels))
    return Sample(f"c{seed}", frames[0], Answer(label=label), rest=tuple(frames[1:]))


def accuracy(teacher: SmallTeacher, samples: list[Sample]) -> float:
    answers = teacher.answer(samples)
    return sum(a.choice == s.answer.choice for a, s in zip(answers, samples, strict=True)) / len(
        samples
    )


def test_it_learns_digits_and_opens_as_any_image_classifier(tmp_path: Path) -> None:
    labels = builtin_labels(Task.CLASSIFICATION, "digits")
    train, test = (
        list(builtin_samples(Task.CLASSIFICATION, "digits", split, count))
        for split, count in ((Split.TRAIN, 500), (Split.TEST, 150))
    )
    calls: list[tuple[int, int, float, Mapping[str, float]]] = []
    report = train_small(
        train, Task.CLASSIFICATION, labels, tmp_path,
        settings=QUICK, on_epoch=lambda *args: calls.append(args),
    )  # fmt: skip
    assert [(epoch, count) for epoch, count, *_ in calls] == [(i, 8) for i in range(1, 9)]
    rates = [figures["lr"] for *_, figures in calls]
    assert max(rates) <= QUICK.lr
    assert rates[-1] < 0.1 * max(rates)
    assert calls[-1][2] == report.loss < calls[0][2] / 2
    teacher = SmallTeacher.load(tmp_path / "teacher", Task.CLASSIFICATION, labels)
    assert accuracy(teacher, test) > 0.9
    for answer in teacher.answer(test[:20]):
        assert len(answer.soft) == 10
        assert labels[int(np.argmax(answer.soft))] == answer.label
    pipeline = transformers.pipeline("image-classification", str(tmp_path / "teacher"), top_k=10)
    for sample, answer in zip(test[:5], teacher.answer(test[:5]), strict=True):
        theirs = {entry["label"]: entry["score"] for entry in pipeline(sample.image)}
        assert answer.soft == pytest.approx([theirs[label] for label in labels], abs=0.02)
    reverse = SmallTeacher.load(tmp_path / "teacher", Task.COUNTING, labels[::-1])
    for a, b in zip(reverse.answer(test[:5]), teacher.answer(test[:5]), strict=True):
        assert a.soft == pytest.approx(b.soft[::-1], abs=1e-5)
        assert a.count == int(b.label)


def test_it_learns_what_moves_where(tmp_path: Path) -> None:
    """One frame does not tell; the others come as further channels."""
    train = [clip(i) for i in range(160)]
    train_small(train, Task.VIDEO, WAYS, tmp_path, settings=replace(QUICK, shift=0.05))
    teacher = SmallTeacher.load(tmp_path / "teacher", Task.VIDEO, WAYS)
    assert accuracy(teacher, [clip(1000 + i) for i in range(60)]) > 0.9


def test_training_is_repeatable_and_leaves_global_state_alone(tmp_path: Path) -> None:
    train = [clip(i) for i in range(20)]
    settings = replace(QUICK, epochs=1)
    before = torch.get_rng_state()
    for name in "ab":
        train_small(train, Task.VIDEO, WAYS, tmp_path / name, settings=settings)
    assert torch.equal(before, torch.get_rng_state())
    a, b = (
        SmallTeacher.load(tmp_path / name / "teacher", Task.VIDEO).answer(train) for name in "ab"
    )
    assert a == b


def test_soft_labels_are_learnt(tmp_path: Path) -> None:
    """Always 3 : 1, whatever the picture: that is what it says afterwards."""
    train = [
        replace(clip(i), answer=Answer(label="left", soft=(0.75, 0.25)), rest=()) for i in range(64)
    ]
    settings = replace(QUICK, epochs=20)
    train_small(train, Task.CLASSIFICATION, WAYS, tmp_path, settings=settings)
    teacher = SmallTeacher.load(tmp_path / "teacher", Task.CLASSIFICATION, WAYS)
    mean = np.mean([answer.soft[0] for answer in teacher.answer(train)])
    assert mean == pytest.approx(0.75, abs=0.07)


def test_the_registry_trains_and_loads_it(tmp_path: Path) -> None:
    train = [clip(i) for i in range(20)]
    options = {"size": 32, "width": 8, "epochs": 1, "batch": 8}
    report = train_teacher("small", train, WAYS, tmp_path, options, task=Task.VIDEO)
    assert (report["images"], report["epochs"]) == (20, 1)
    teacher = load_teacher("small", tmp_path / "teacher", WAYS, options, Task.VIDEO)
    assert (teacher.task, teacher.labels) == (Task.VIDEO, WAYS)


def test_what_it_cannot_learn(tmp_path: Path) -> None:
    some = [clip(i) for i in range(4)]
    with pytest.raises(TeacherError, match=r"cannot do task vqa: let labels stand in"):
        train_small(some, Task.VQA, WAYS, tmp_path)
    with pytest.raises(TeacherError, match="sample c1: label 'right' is not one of left, up"):
        train_small(some, Task.VIDEO, ("left", "up"), tmp_path)
    with pytest.raises(TeacherError, match="needs at least 2 samples, got 1"):
        train_small(some[:1], Task.VIDEO, WAYS, tmp_path)
    with pytest.raises(TeacherError, match="epochs >= 1, batch >= 2"):
        SmallSettings(epochs=0)
    with pytest.raises(TeacherError, match="holds no small classifier that was trained here"):
        SmallTeacher.load(tmp_path / "nowhere", Task.VIDEO)
