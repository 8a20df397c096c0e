"""Teachers: a YOLO learns, is saved, loads again, and refuses what it cannot do."""

import os
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torchvision.ops import box_iou

from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers import ultralytics_plugin, yolo
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, train_teacher
from valora_teachers.yolo import YoloSettings, YoloTeacher, train_yolo

TINY = YoloSettings(size=64, width=0.0625, epochs=2, batch=8, seed=3)
LABELS = ("ball", "box")


def scene(index: int, size: tuple[int, int] = (64, 64)) -> Sample:
    """A red disc or a blue square on grey, somewhere."""
    rng = random.Random(index)
    image = Image.new("RGB", size, (120, 120, 120))
    x, y, side = rng.randint(2, size[0] - 30), rng.randint(2, size[1] - 30), rng.randint(16, 28)
    pen = ImageDraw.Draw(image)
    if index % 2:
        pen.ellipse((x, y, x + side - 1, y + side - 1), fill=(210, 30, 30))
    else:
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=(30, 30, 210))
    label = LABELS[0] if index % 2 else LABELS[1]
    return Sample(f"s{index}", image, Answer((Box(x, y, x + side, y + side, label),)))


SCENES = [scene(i) for i in range(56)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model gains nothing from a second thread, and loses much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YOLO that has learned enough to be recognised."""
    out = tmp_path_factory.mktemp("teacher")
    settings = replace(TINY, epochs=18, width=0.125, lr=5e-3, jitter=0.1, shift=0.05, scale=0.1)
    scenes = [scene(1000 + i) for i in range(200)]
    report = train_yolo(scenes, LABELS, out, settings=settings)
    assert (report.epochs, report.images) == (18, 200)
    return out / "teacher.pt"


def test_finds_objects_with_labels_and_confidences(trained: Path) -> None:
    teacher = YoloTeacher.load(trained)
    assert teacher.task is Task.DETECTION
    assert teacher.labels == LABELS
    outputs = teacher.predict([sample.image for sample in SCENES[40:]])
    right = 0
    for output, sample in zip(outputs, SCENES[40:], strict=True):
        confidences = [box.confidence for box in output.boxes]
        assert confidences == sorted(confidences, reverse=True)
        assert all(0 < c <= 1 for c in confidences)
        (truth,) = sample.answer.boxes
        right += any(
            box.label == truth.label
            and box_iou(torch.tensor([box.xyxy]), torch.tensor([truth.xyxy])).item() > 0.5
            for box in output.boxes[:1]
        )
    assert right >= 12


def test_boxes_are_pixels_of_each_image(trained: Path) -> None:
    """Twice as large, and on a wide canvas: the boxes follow."""
    teacher = YoloTeacher.load(trained)
    for sample in SCENES[40:44]:
        (small,) = teacher.predict([sample.image])
        (large,) = teacher.predict([sample.image.resize((128, 128), Image.Resampling.NEAREST)])
        first, second = small.boxes[0], large.boxes[0]
        assert [v / 2 for v in second.xyxy] == pytest.approx(first.xyxy, abs=3)
        wide = Image.new("RGB", (64, 40), (120, 120, 120))
        wide.paste(sample.image.crop((0, 0, 64, 40)))
        for box in teacher.predict([wide])[0].boxes:
            assert 0 <= box.x0 < box.x1 <= 64
            assert 0 <= box.y0 < box.y1 <= 40


def test_agrees_with_ultralytics_own_prediction(trained: Path) -> None:
    """The file is an ordinary one, and our wrapper changes nothing but names and order."""
    from ultralytics import YOLO

    images = [sample.image for sample in SCENES[:3]]
    results = YOLO(str(trained)).predict(images, conf=0.01, iou=0.5, verbose=False)
    for result, output in zip(results, YoloTeacher.load(trained).predict(images), strict=True):
        expected = sorted(result.boxes.conf.tolist(), reverse=True)
        assert [box.confidence for box in output.boxes] == pytest.approx(expected, abs=1e-5)
        edges = torch.tensor([box.xyxy for box in output.boxes])
        order = result.boxes.conf.argsort(descending=True, stable=True)
        assert torch.allclose(edges, result.boxes.xyxy[order].clamp(0, 64), atol=1e-3)


def test_predicts_nothing_for_no_images(trained: Path) -> None:
    assert YoloTeacher.load(trained).predict([]) == []


def test_classes_can_be_renamed_and_left_out(trained: Path) -> None:
    teacher = YoloTeacher.load(trained, ["sphere"], names={"ball": "sphere"})
    assert teacher.labels == ("sphere",)
    found = [box.label for out in teacher.predict([s.image for s in SCENES]) for box in out.boxes]
    assert set(found) == {"sphere"}


def test_training_is_repeatable_and_leaves_global_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    deterministic = torch.are_deterministic_algorithms_enabled()
    calls: list[tuple[int, int, float, Mapping[str, float]]] = []
    train_yolo(
        SCENES[:16], LABELS, tmp_path / "a", settings=TINY,
        on_epoch=lambda *args: calls.append(args),
    )  # fmt: skip
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert [(epoch, count) for epoch, count, *_ in calls] == [(1, 2), (2, 2)]
    assert all(loss > 0 for _, _, loss, _ in calls)
    assert all(0 <= figures["lr"] <= TINY.lr for *_, figures in calls)

    train_yolo(SCENES[:16], LABELS, tmp_path / "b", settings=TINY)
    other = replace(TINY, seed=4)
    train_yolo(SCENES[:16], LABELS, tmp_path / "c", settings=other)
    a, b, c = (weights(tmp_path / name / "teacher.pt") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["teacher.pt"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=False)["model"].state_dict()
    return state


def test_training_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    train_yolo(SCENES[:8], LABELS, tmp_path / "out", settings=replace(TINY, epochs=1))
    assert list((tmp_path / "work").iterdir()) == []


def test_augmentation_moves_boxes_with_their_pixels() -> None:
    """Each batch item shows one red disc: its extent in the picture is what its box says."""
    balls = [scene(i) for i in range(1, 41, 2)]
    data = yolo._TrainingImages.of(balls, LABELS, 64)
    settings = replace(TINY, jitter=0.0)
    batch = data.augmented(torch.arange(20), settings, torch.Generator().manual_seed(0))
    assert batch["img"].shape == (20, 3, 64, 64)
    checked = 0
    for place, (cx, cy, w, h) in zip(
        batch["batch_idx"].int().tolist(), (batch["bboxes"] * 64).tolist(), strict=True
    ):
        box = torch.tensor([[cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]])
        if box.min() < 1 or box.max() > 63:
            continue  # cut by the border, where the last pixels are repeated
        red = batch["img"][place, 0] - batch["img"][place, 2] > 0.3
        ys, xs = torch.nonzero(red, as_tuple=True)
        seen = torch.tensor([[xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]]).float()
        assert box_iou(box, seen).item() > 0.8
        checked += 1
    assert checked >= 8
    assert set(batch["cls"].flatten().tolist()) == {0.0}


def test_images_of_any_shape_are_padded_to_squares() -> None:
    wide = Sample("w", Image.new("RGB", (80, 40)), Answer((Box(20, 10, 60, 30, "box"),)))
    data = yolo._TrainingImages.of([wide], LABELS, 64)
    assert data.pixels.shape == (1, 3, 64, 64)
    assert data.boxes[0].tolist() == [[0.25, 0.375, 0.75, 0.625]]
    assert data.pixels[0, :, 2, 2].tolist() == [114, 114, 114]
    assert data.pixels[0, :, 32, 32].tolist() == [0, 0, 0]
    assert data.classes[0].tolist() == [[1.0]]


def test_loading_refuses(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match=r"teacher .*gone\.pt does not exist: check the path"):
        YoloTeacher.load(tmp_path / "gone.pt")
    text = tmp_path / "text.pt"
    text.write_text("not a model")
    with pytest.raises(TeacherError, match=r"text\.pt is no YOLO that .* corrupted \(Unpickl"):
        YoloTeacher.load(text)
    other = tmp_path / "other.pt"
    torch.save({"weights": torch.zeros(3)}, other)
    with pytest.raises(TeacherError, match=r"other\.pt is no YOLO"):
        YoloTeacher.load(other)
    pickled = tmp_path / "pickled.pt"
    pickled.write_bytes(pickle.dumps([1, 2, 3]))
    with pytest.raises(TeacherError, match=r"pickled\.pt is no YOLO"):
        YoloTeacher.load(pickled)
    with pytest.raises(TeacherError, match=r"has no class 'person', only ball, box: map one"):
        YoloTeacher.load(trained, ["person"])


def test_loading_refuses_a_classifier(trained: Path, tmp_path: Path) -> None:
    from ultralytics.nn.tasks import ClassificationModel

    path = tmp_path / "classifier.pt"
    model = ClassificationModel("yolo11n-cls.yaml", nc=2, verbose=False)
    model.names = {0: "ball", 1: "box"}
    torch.save({"model": model, "train_args": {"task": "classify"}}, path)
    with pytest.raises(TeacherError, match=r"classifier\.pt is a model for 'classify'"):
        YoloTeacher.load(path, LABELS)


@pytest.mark.parametrize(
    ("train", "labels", "message"),
    [
        (SCENES[:1], LABELS, "at least 2 training images, got 1"),
        (SCENES[:4], ("ball",), "sample s0 has label 'box', which is none of ball"),
        ([replace(s, answer=Answer()) for s in SCENES[:4]], LABELS,
         "no training image has a box"),
    ],
)  # fmt: skip
def test_training_refuses(
    train: list[Sample], labels: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TeacherError, match=message):
        train_yolo(train, labels, tmp_path)


def test_settings_refuse() -> None:
    with pytest.raises(TeacherError, match="size of a YOLO must be a multiple of 16, got 100"):
        YoloSettings(size=100)
    with pytest.raises(TeacherError, match="epochs >= 1 and batch >= 2, got 0 and 16"):
        YoloSettings(epochs=0)


def test_ultralytics_missing_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    ultralytics_plugin.load_ultralytics.cache_clear()
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(TeacherError, match=r"not installed .* run pip install 'valora\[yolo\]'"):
        YoloTeacher.load(trained)
    ultralytics_plugin.load_ultralytics.cache_clear()


def test_importing_ultralytics_leaves_the_environment_alone() -> None:
    """In a fresh process: no settings of the user are written, no variable stays but offline."""
    import subprocess

    code = (
        "import os, torch\n"
        "before = dict(os.environ)\n"
        "from valora_teachers import ultralytics_plugin\n"
        "ultralytics_plugin.load_ultralytics()\n"
        "ours = [k for k in os.environ if k.startswith('YOLO_') or k == 'OMP_NUM_THREADS']\n"
        "changed = [k for k in ours if os.environ[k] != before.get(k)]\n"
        "from pathlib import Path\n"
        "print(sorted(changed), [p.name for p in Path.home().rglob('*Ultralytics*')])"
    )
    drop = ("YOLO_CONFIG_DIR", "YOLO_OFFLINE", "OMP_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        environment["HOME"] = home
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "['YOLO_OFFLINE'] []"


def test_registry(trained: Path, tmp_path: Path) -> None:
    teacher = load_teacher("yolo", trained, ["sphere"], {"names": {"ball": "sphere"}, "epochs": 9})
    assert teacher.labels == ("sphere",)
    options = {"size": 64, "width": 0.0625, "epochs": 1, "batch": 8}
    report = train_teacher("yolo", SCENES[:8], LABELS, tmp_path, options)
    assert set(report) == {"loss", "epochs", "images", "seconds"}
    assert load_teacher("yolo", tmp_path / "teacher.pt", LABELS).labels == LABELS
    with pytest.raises(TeacherError, match="unknown teacher kind 'oracle': choose one of"):
        load_teacher("oracle", trained, LABELS)
    with pytest.raises(TeacherError, match="unknown option lr0 of teacher yolo: expected size"):
        train_teacher("yolo", SCENES[:8], LABELS, tmp_path, {"lr0": 1})
