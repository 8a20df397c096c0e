"""Detectors: a YOLO learns, is saved, loads again and refuses; others beside Ultralytics' own."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from torchvision.ops import box_iou

from tests.unit.valora_teachers.test_huggingface import CLIP, samples, word_tokenizer
from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers import yolo
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, make_teacher
from valora_teachers.yolo import image_size, load_ultralytics, text_encoder

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
    wanted = {"epochs": 30, "width": 0.125, "lr": 1e-2, "batch": 4, "jitter": 0.1, "shift": 0.05}
    report = train(out, scenes, scale=0.1, **wanted)
    assert (report["epochs"], report["images"]) == (30, 40)
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
    [
        (96, 8, 96, 96),
        (384, 8, 96, 384),
        (384, 24, 96, 192),
        (384, 100, 96, 96),
        (64, 4, 32, 64),
        (5000, 8, 96, 1280),
    ],
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


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_images_of_any_size_are_trained_on(size, tmp_path):
    box = Box(0, 0, *size, LABELS[0])
    narrow = Sample("n", Image.new("RGB", size), Answer((box,)))
    assert train(tmp_path, [*SCENES[:5], narrow], epochs=1)["images"] == 6


def test_training_is_repeatable_and_leaves_the_process_alone(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    calls = []

    def state():
        numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1][0]]
        flags = [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()]
        return [*numbers, *flags, dict(yolo.os.environ)]

    load_ultralytics()
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


class Ends:
    """Ends the process that unpickles it, as if all was well."""

    def __reduce__(self):
        return sys.exit, (0,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"teacher .*x\.pt is no file: check the path"),
        (b"not a model", r"x\.pt is no YOLO that .* corrupted \(Unpickl"),
        (pickle.dumps([1, 2, 3]), r"x\.pt is no YOLO"),
        ({"weights": torch.zeros(3)}, r"x\.pt is no YOLO"),
        (Ends(), r"x\.pt is no YOLO"),
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


NAMES = {0: "cat", 1: "dog", 2: "eel"}


def save(model, path, task, size):
    """As Ultralytics saves its own."""
    arguments = {"task": task, "imgsz": size}
    torch.save({"epoch": -1, "model": model, "ema": None, "train_args": arguments}, path)
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    load_ultralytics()
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import ClassificationModel

    torch.manual_seed(0)
    layers = {
        "nc": 3, "depth_multiple": 1.0, "width_multiple": 1.0,
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
        "head": [[-1, 1, "Classify", ["nc"]]],
    }  # fmt: skip
    model = ClassificationModel(layers, nc=3, verbose=False)
    torch.nn.init.normal_(model.model[-1].linear.weight, std=0.3)
    model.names = NAMES
    model.args = get_cfg(overrides={"task": "classify", "imgsz": 32})
    return save(model, tmp_path_factory.mktemp("cls") / "cls.pt", "classify", 32)


def test_classification_agrees_with_ultralytics(classifier):
    from ultralytics import YOLO

    some = samples(5)
    teacher = load_teacher("yolo", classifier, list(NAMES.values()), task=Task.CLASSIFICATION)
    answers = teacher.answer(some)
    results = YOLO(str(classifier)).predict([s.image for s in some], verbose=False, device="cpu")
    for answer, result in zip(answers, results, strict=True):
        assert answer.soft == pytest.approx(result.probs.data.tolist(), abs=1e-5)
        assert answer.label == NAMES[result.probs.top1]
    assert np.ptp([answer.soft[0] for answer in answers]) > 0.005


@pytest.mark.parametrize(
    ("kind", "model", "labels", "task", "message"),
    [
        ("yolo", "classifier", ["fox"], Task.CLASSIFICATION, r"no class 'fox', only cat, dog, eel"),
        ("yolo", "classifier", ["cat"], Task.DETECTION, "for 'classify', which does not"),
        ("yolo", "world", ["cat"], Task.CLASSIFICATION, "for 'detect', which does not"),
        ("yolo_world", "classifier", ["cat"], Task.DETECTION, "is a ClassificationModel, which"),
    ],
)
def test_each_model_for_its_own_task(kind, model, labels, task, message, request):
    with pytest.raises(TeacherError, match=message):
        load_teacher(kind, request.getfixturevalue(model), labels, task=task)


def test_the_image_size_comes_from_the_boxes():
    """Nine in ten get at least 12 pixels, up to the images' own size and never below the option."""
    for side, wanted in ((200, 96), (40, 128), (6, 384), (1, 384)):
        boxes = (*[Box(9, 9, 9 + side, 9 + side, "a")] * 19, Box(0, 0, 1, 1, "a"))
        some = [Sample("x", Image.new("RGB", (384, 256)), Answer(boxes))]
        assert image_size(some, 96) == wanted


def test_only_boxes_are_kept(tmp_path):
    """Of a pose model, which says what it knows besides."""
    load_ultralytics()
    from ultralytics import YOLO

    model = YOLO("yolo11n-pose.yaml", task="pose")
    model.save(tmp_path / "x.pt")
    assert "keypoints" in load_teacher("yolo", tmp_path / "x.pt", [model.names[0]]).remark


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A CLIP text encoder of the true architecture and width."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(1)
    tokenizer = word_tokenizer(folder, **CLIP)
    config = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=len(tokenizer), projection_dim=512, max_position_embeddings=16,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.CLIPTextModelWithProjection(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    load_ultralytics()
    import ultralytics
    import yaml
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import WorldModel

    source = Path(ultralytics.__file__).parent / "cfg/models/v8/yolov8-worldv2.yaml"
    layers = yaml.safe_load(source.read_text())
    layers["scales"] = {"n": [0.33, 0.125, 1024]}
    layers["scale"] = "n"
    torch.manual_seed(2)
    model = WorldModel(layers, nc=3, verbose=False)
    model.names = NAMES
    model.args = get_cfg(overrides={"task": "detect", "imgsz": 64})
    # Random scores of one box in two hundred are too low to be seen: raise them all.
    for branch in model.model[-1].cv4:
        branch.bias.data.fill_(-2.0)
    return save(model, tmp_path_factory.mktemp("world") / "tiny-world.pt", "detect", 64)


def expected_boxes(world, clip, image, phrases):
    """By Ultralytics' own class, told the same embeddings."""
    from ultralytics import YOLOWorld

    model = YOLOWorld(str(world))
    model.model.get_text_pe = lambda text, **_: text_encoder(str(clip))(text)[None]
    model.set_classes(phrases)
    (result,) = model.predict(image, conf=0.01, iou=0.5, verbose=False, device="cpu")
    pairs = zip(result.boxes.conf.tolist(), result.boxes.cls.tolist(), strict=True)
    return sorted(((confidence, phrases[int(k)]) for confidence, k in pairs), reverse=True)


def test_labels_are_looked_for_together(world, clip):
    options = {"text_encoder": str(clip)}
    teacher = load_teacher("yolo_world", world, ["cat", "red_dog"], options)
    some = samples(2)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        theirs = expected_boxes(world, clip, sample.image, ["cat", "red dog"])
        assert theirs
        assert [box.confidence for box in answer.boxes] == pytest.approx(
            [confidence for confidence, _ in theirs], abs=1e-4
        )
        labels = sorted(box.label.replace("_", " ") for box in answer.boxes)
        assert labels == sorted(phrase for _, phrase in theirs)


def test_each_phrase_is_looked_for_alone(world, clip):
    some = [*samples(3, "the red"), *samples(3, "the red")]
    teacher = load_teacher("yolo_world", world, (), {"text_encoder": str(clip)}, Task.GROUNDING)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        best, phrase = expected_boxes(world, clip, sample.image, [sample.prompt])[0]
        (box,) = answer.boxes
        assert box.label == sample.prompt == phrase
        assert box.confidence == pytest.approx(best, abs=1e-4)


def test_text_features_are_those_of_transformers(clip):
    model = transformers.CLIPTextModelWithProjection.from_pretrained(clip).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip)
    found = text_encoder(str(clip))(["cat", "the red dog"])
    for row, phrase in zip(found, ["cat", "the red dog"], strict=True):
        with torch.inference_mode():
            alone = model(**tokenizer([phrase], return_tensors="pt")).text_embeds[0]
        assert row.norm().item() == pytest.approx(1.0, abs=1e-5)
        assert torch.allclose(row, alone / alone.norm(), atol=1e-5)


def test_without_its_text_encoder(world, clip, tmp_path):
    config = transformers.CLIPTextConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        vocab_size=30, projection_dim=24,
    )  # fmt: skip
    transformers.CLIPTextModelWithProjection(config).save_pretrained(tmp_path)
    word_tokenizer(tmp_path, pad_token="!", unk_token="<unk>")
    for labels, options, message in (
        (["cat"], {}, r"the text encoder openai/clip.* set teacher\.options"),
        ([], {"text_encoder": str(clip)}, "has to be told what to look for"),
        (["cat"], {"text_encoder": str(tmp_path)}, "gives 24 numbers, expected 512"),
    ):
        with pytest.raises(TeacherError, match=message):
            load_teacher("yolo_world", world, labels, options)


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
