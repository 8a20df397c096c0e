"""The small classifier: learns from pictures and clips, keeps probabilities, opens elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.scenes.builtin import builtin_domain, builtin_samples
from valora_teachers.base import TeacherError
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
        for split, count in ((Split.TRAIN, 500), (Split.TEST, 150))
    )
    calls = []
    report = train(tmp_path, samples, Task.CLASSIFICATION, labels, lambda *args: calls.append(args))
    assert [(epoch, count) for epoch, count, *_ in calls] == [(i, 8) for i in range(1, 9)]
    rates = [figures["lr"] for *_, figures in calls]
    assert max(rates) <= QUICK["lr"]
    assert rates[-1] < 0.1 * max(rates)
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
    train(tmp_path, [clip(i) for i in range(160)], shift=0.05)
    teacher = load_teacher("small", tmp_path / "teacher", WAYS, task=Task.VIDEO)
    assert accuracy(teacher, [clip(1000 + i) for i in range(60)]) > 0.9


def test_soft_labels_are_learnt(tmp_path):
    """Always 3 : 1, whatever the picture: that is what it says afterwards."""
    samples = [
        replace(clip(i), answer=Answer(label="left", soft=(0.75, 0.25)), rest=()) for i in range(64)
    ]
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
