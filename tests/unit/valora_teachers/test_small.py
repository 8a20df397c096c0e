"""The small classifier, and what holds for all teachers that are trained here."""

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import valora_data.checkpoint
from tests.unit.valora_teachers import test_yolo as yolo
from valora_data.checkpoint import Checkpoint
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.scenes.builtin import builtin_domain, builtin_samples
from valora_teachers.base import CHECKPOINT, TeacherError
from valora_teachers.registry import load_teacher, make_teacher

QUICK = {"size": 32, "width": 8, "epochs": 8, "batch": 16, "lr": 6e-3}
WAYS = ("left", "right")


def clip(seed):
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


CLIPS = [clip(seed) for seed in range(18)]


def train(folder, samples, task=Task.VIDEO, labels=WAYS, *more, **options):
    folder.mkdir(exist_ok=True)
    return make_teacher("small", task, labels, QUICK | options).train(samples, folder, *more)


def accuracy(teacher, samples):
    pairs = zip(teacher.answer(samples), samples, strict=True)
    return sum(answer.choice == one.answer.choice for answer, one in pairs) / len(samples)


def test_it_learns_digits_and_opens_as_any_image_classifier(tmp_path):
    labels = builtin_domain(Task.CLASSIFICATION, "digits").labels
    samples, test = (
        list(builtin_samples(Task.CLASSIFICATION, "digits", split, count))
        for split, count in ((Split.TRAIN, 400), (Split.TEST, 80))
    )
    calls = []
    report = train(tmp_path, samples, Task.CLASSIFICATION, labels, lambda *args: calls.append(args))
    assert [(epoch, count) for epoch, count, *_ in calls] == [(i, 8) for i in range(1, 9)]
    rates = [figures["lr"] for *_, figures in calls]
    assert 10 * rates[-1] < max(rates) <= QUICK["lr"]
    assert calls[-1][2] == report["loss"] < calls[0][2] / 2
    teacher = load_teacher("small", tmp_path / "teacher", labels, QUICK, Task.CLASSIFICATION)
    assert accuracy(teacher, test) > 0.9
    pipeline = transformers.pipeline("image-classification", str(tmp_path / "teacher"), top_k=10)
    for sample, answer in zip(test[:5], teacher.answer(test[:5]), strict=True):
        theirs = {entry["label"]: entry["score"] for entry in pipeline(sample.image)}
        assert answer.soft == pytest.approx([theirs[label] for label in labels], abs=0.02)
        assert labels[int(np.argmax(answer.soft))] == answer.label


def test_it_learns_what_moves_where(tmp_path):
    """One frame does not tell; the others come as further channels."""
    train(tmp_path, [clip(i) for i in range(96)], shift=0.05)
    teacher = load_teacher("small", tmp_path / "teacher", WAYS, task=Task.VIDEO)
    assert accuracy(teacher, [clip(1000 + i) for i in range(60)]) > 0.9


def test_soft_labels_are_learnt(tmp_path):
    """Always 3 : 1, whatever the picture: that is what it says afterwards."""
    answer = Answer(label="left", soft=(0.75, 0.25))
    samples = [replace(clip(i), answer=answer, rest=()) for i in range(64)]
    train(tmp_path, samples, Task.CLASSIFICATION, epochs=20)
    teacher = load_teacher("small", tmp_path / "teacher", WAYS, task=Task.CLASSIFICATION)
    mean = np.mean([answer.soft[0] for answer in teacher.answer(samples)])
    assert mean == pytest.approx(0.75, abs=0.07)


def same(first, second):
    one, other = (load_file(at / "teacher" / "model.safetensors") for at in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_validation_samples_draw_a_curve_and_change_nothing(tmp_path):
    before = torch.get_rng_state()
    strange = [replace(one, answer=Answer(label="sideways")) for one in CLIPS[:4]]
    seen = {"a": [], "b": []}
    for name, looks in (("a", [clip(seed) for seed in range(18, 30)]), ("b", strange)):
        note = lambda *one, to=seen[name]: to.append(set(one[3]))  # noqa: E731
        train(tmp_path / name, CLIPS, Task.VIDEO, WAYS, note, looks, epochs=3, batch=5)
    assert seen["a"] == [{"lr", "validation loss", "validation accuracy"}] * 3
    assert seen["b"] == [{"lr"}] * 3  # unknown answers are left out
    assert same(tmp_path / "a", tmp_path / "b")
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(TeacherError, match="holds no small classifier that was trained here"):
        load_teacher("small", tmp_path / "nowhere", WAYS, task=Task.VIDEO)


SCENES = yolo.SCENES[:4]
ODD = [*SCENES, Sample("odd", SCENES[0].image, Answer((Box(0, 0, 9, 9, "cone"),)))]


@pytest.mark.parametrize(
    ("kind", "samples", "options"),
    [(yolo, yolo.SCENES[:18], {}), (sys.modules[__name__], CLIPS, {"batch": 5, "size": 16})],
    ids=["yolo", "small"],
)
def test_a_training_that_was_killed_continues_to_the_bit(
    kind, samples, options, tmp_path, monkeypatch
):
    loss = kind.train(tmp_path / "whole", samples, epochs=2, **options)["loss"]
    monkeypatch.setattr(valora_data.checkpoint, "SECONDS", 0)
    save = Checkpoint.save

    def kill(self, *arguments):  # after each epoch but the last
        save(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", kill)
    with pytest.raises(KeyboardInterrupt):
        kind.train(tmp_path / "killed", samples, epochs=2, **options)
    assert (tmp_path / "killed" / CHECKPOINT).is_file()
    torch.manual_seed(77)
    random.seed(77)
    # The first is not trained again: it would be saved, and killed.
    assert kind.train(tmp_path / "killed", samples, epochs=2, **options)["loss"] == loss
    assert kind.same(tmp_path / "whole", tmp_path / "killed")
    assert not (tmp_path / "killed" / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("kind", "task", "labels", "samples", "message"),
    [
        ("huggingface", Task.CLASSIFICATION, WAYS, CLIPS, "is not trained here: name a"),
        ("yolo", Task.VIDEO, yolo.LABELS, SCENES, "trained here for detection only, not for video"),
        ("yolo", Task.DETECTION, yolo.LABELS, SCENES[:1], "needs at least 2 samples, got 1"),
        ("yolo", Task.DETECTION, yolo.LABELS, [replace(s, answer=Answer()) for s in SCENES],
         "no training image has a box"),
        ("yolo", Task.DETECTION, yolo.LABELS, ODD,
         "sample odd has label 'cone', which is none of ball, box"),
        ("small", Task.VQA, WAYS, CLIPS, "cannot do task vqa: let labels stand in"),
        ("small", Task.VIDEO, ("left", "up"), CLIPS,
         "sample c1 has label 'right', which is none of left, up"),
    ],
)  # fmt: skip
def test_what_none_can_learn(kind, task, labels, samples, message, tmp_path):
    with pytest.raises(TeacherError, match=message):
        make_teacher(kind, task, labels).train(samples, tmp_path)
