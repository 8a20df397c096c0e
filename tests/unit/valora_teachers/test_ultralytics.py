"""Ultralytics' classifiers and YOLO-World as teachers, beside Ultralytics' own predictions."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.unit.valora_teachers.test_huggingface import CLIP, samples, word_tokenizer
from valora_data.schema import Task
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher
from valora_teachers.yolo import load_ultralytics, text_encoder

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
