"""Detectors: a YOLO learns, is saved, loads again and refuses; others beside Ultralytics' own."""

import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torchvision.ops import box_iou

from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers import yolo
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, make_teacher

TINY = {"size": 64, "width": 0.0625, "epochs": 2, "batch": 8, "seed": 3}
LABELS = ("ball", "box")


def scene(index, size=(64, 64)):
    """A red disc or a blue square on grey, somewhere."""
    rng = random.Random(index)
    image = Image.new("RGB", size, (120, 120, 120))
    x, y, side = rng.randint(2, size[0] - 30), rng.randint(2, size[1] - 30), rng.randint(16, 28)
    pen, place = ImageDraw.Draw(image), (x, y, x + side - 1, y + side - 1)
    if index % 2:
        pen.ellipse(place, fill=(210, 30, 30))
    else:
        pen.rectangle(place, fill=(30, 30, 210))
    box = Box(x, y, x + side, y + side, LABELS[1 - index % 2])
    return Sample(f"s{index}", image, Answer((box,)))


SCENES = [scene(i) for i in range(32)]


def train(folder, samples=SCENES[:18], on_epoch=None, validation=(), **options):
    folder.mkdir(exist_ok=True)
    teacher = make_teacher("yolo", Task.DETECTION, LABELS, TINY | options)
    return teacher.train(samples, folder, on_epoch, validation)


def same(first, second):
    one, other = (
        torch.load(folder / "teacher.pt", weights_only=False)["model"].state_dict()
        for folder in (first, second)
    )
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A YOLO that has learned enough to be recognised; a third of its images are wide."""
    out = tmp_path_factory.mktemp("teacher")
    scenes = [scene(1000 + i, (64, 64) if i % 3 else (96, 64)) for i in range(40)]
    wanted = {"epochs": 10, "width": 0.125, "lr": 2e-2, "batch": 4, "jitter": 0.1, "shift": 0.05}
    report = train(out, scenes, scale=0.1, **wanted)
    assert (report["epochs"], report["images"]) == (10, 40)
    assert set(report) == {"loss", "epochs", "images", "seconds"}
    return out / "teacher.pt"


def test_finds_objects_with_labels_and_confidences(trained):
    teacher = load_teacher("yolo", trained, LABELS)
    scenes, right = SCENES + [scene(index, (96, 64)) for index in range(12)], 0
    for sample, output in zip(scenes, teacher.answer(scenes), strict=True):
        confidences = [box.confidence for box in output.boxes]
        assert confidences == sorted(confidences, reverse=True)
        assert all(0 < c <= 1 for c in confidences)
        width, height = sample.image.size
        assert all(0 <= b.x0 < b.x1 <= width and 0 <= b.y0 < b.y1 <= height for b in output.boxes)
        (truth,) = sample.answer.boxes
        first = [box.xyxy for box in output.boxes[:1] if box.label == truth.label]
        right += bool(first) and float(box_iou(*map(torch.tensor, (first, [truth.xyxy])))) > 0.5
    assert right >= 0.75 * len(scenes)
    renamed = load_teacher("yolo", trained, ["sphere"], {"names": {"ball": "sphere"}, "epochs": 9})
    assert {box.label for out in renamed.answer(SCENES) for box in out.boxes} == {"sphere"}


@pytest.mark.parametrize(
    ("side", "box", "least", "expected"),
    [(96, 8, 96, 96), (384, 8, 96, 384), (384, 24, 96, 192), (384, 100, 96, 96), (64, 4, 32, 64)],
)
def test_images_are_large_enough_for_their_boxes(side, box, least, expected):
    large, boxes = Box(0, 0, side, side, "box"), (Box(0, 0, box, side, "box"),) * 4
    images = [Image.new("RGB", (side, side // 2)), Image.new("RGB", (side // 2, side))]
    samples = [Sample("a", one, Answer((*boxes, large))) for one in images]
    assert yolo.image_size([*samples, Sample("b", images[0], Answer())], least) == expected


def test_agrees_with_ultralytics_own_prediction(trained):
    """The file is an ordinary one, and our wrapper changes nothing but names and order."""
    from ultralytics import YOLO

    results = YOLO(str(trained)).predict(
        [sample.image for sample in SCENES[:3]], conf=0.01, iou=0.5, verbose=False
    )
    answers = load_teacher("yolo", trained, LABELS).answer(SCENES[:3])
    for result, output in zip(results, answers, strict=True):
        order = result.boxes.conf.argsort(descending=True, stable=True)
        assert [box.confidence for box in output.boxes] == pytest.approx(
            result.boxes.conf[order].tolist(), abs=1e-5
        )
        edges = torch.tensor([box.xyxy for box in output.boxes])
        assert torch.allclose(edges, result.boxes.xyxy[order].clamp(0, 64), atol=1e-3)


def test_training_is_repeatable_and_leaves_the_process_alone(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    calls = []

    def state():
        numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1][0]]
        flags = [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()]
        return [*numbers, *flags, dict(yolo.os.environ)]

    yolo.load_ultralytics()
    before = state()
    train(tmp_path / "a", on_epoch=lambda *args: calls.append(args), validation=SCENES[18:30])
    assert state() == before
    assert [(epoch, count) for epoch, count, *_ in calls] == [(1, 2), (2, 2)]
    for _, _, loss, figures in calls:
        assert loss > 0 and set(figures) == {"lr", "validation loss"} and 0 < figures["lr"] <= 3e-3
    train(tmp_path / "b")  # validation samples change nothing
    train(tmp_path / "c", seed=4, epochs=1)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["teacher.pt"]
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"teacher .*x\.pt does not exist: check the path"),
        (b"not a model", r"x\.pt is no YOLO that .* corrupted \(Unpickl"),
        (pickle.dumps([1, 2, 3]), r"x\.pt is no YOLO"),
        ({"weights": torch.zeros(3)}, r"x\.pt is no YOLO"),
    ],
)
def test_loading_refuses(content, message, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / "x.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "x.pt")
    with pytest.raises(TeacherError, match=message):
        load_teacher("yolo", tmp_path / "x.pt", LABELS)


def test_ultralytics_missing_names_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"")
    yolo.load_ultralytics.cache_clear()
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(TeacherError, match=r"not installed .* run pip install 'valora\[yolo\]'"):
        load_teacher("yolo", tmp_path / "x.pt", LABELS)
    yolo.load_ultralytics.cache_clear()


@pytest.mark.slow
def test_importing_ultralytics_leaves_the_environment_alone(tmp_path):
    """In a fresh process: no settings of the user are written, no variable stays but offline."""
    code = (
        "import os, torch\n"
        "from pathlib import Path\n"
        "from valora_teachers import yolo\n"
        "before = dict(os.environ)\n"
        "yolo.load_ultralytics()\n"
        "ours = [k for k in os.environ if k.startswith('YOLO_') or k == 'OMP_NUM_THREADS']\n"
        "changed = [k for k in ours if os.environ[k] != before.get(k)]\n"
        "print(sorted(changed), [p.name for p in Path.home().rglob('*Ultralytics*')])"
    )
    drop = ("YOLO_CONFIG_DIR", "YOLO_OFFLINE", "OMP_NUM_THREADS")
    known = {k: v for k, v in yolo.os.environ.items() if k not in drop} | {"HOME": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", code], env=known, text=True)
    assert said.strip().splitlines()[-1] == "['YOLO_OFFLINE'] []"
