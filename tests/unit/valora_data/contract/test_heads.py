"""Heads on disk and their answers: the file format, what is refused, golden comparison, text."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.serve_helpers import make_box_head, make_label_head
from valora_data.contract.heads import read_head, write_head
from valora_data.contract.label_head import Pooling
from valora_data.contract.results import (
    CONFIDENCE_TOLERANCE,
    PIXEL_TOLERANCE,
    BoxesResult,
    Detection,
    LabelResult,
    text_matches,
)
from valora_data.errors import BundleError

WIDTH = 20


def detection(folder, labels, seed):
    return make_box_head(folder / f"{seed}.safetensors", WIDTH, labels, (3, 4), seed=seed)


def linear(folder, count, seed, **options):
    labels = [f"label {n}" for n in range(count)]
    return make_label_head(folder / f"{seed}.safetensors", WIDTH, labels, seed=seed, **options)


def contents(file):
    with safe_open(file, "pt") as parts:
        return parts.metadata(), {name: parts.get_tensor(name) for name in parts.keys()}  # noqa: SIM118


@pytest.mark.parametrize("pooling", [*Pooling, None])
def test_a_head_is_written_as_it_was_read(pooling, tmp_path):
    if pooling is None:
        file = detection(tmp_path, ["a", "b"], 3)
    else:
        file = linear(tmp_path, 3, 1, pooling=pooling, temperature=1.7)
    head = read_head(file, WIDTH)
    assert (head.reads_visual, head.reads_places) == (pooling != "last", pooling == "grid")
    write_head(tmp_path / "again.safetensors", head)
    (metadata, tensors), (again, others) = contents(file), contents(tmp_path / "again.safetensors")
    assert metadata == again
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    if pooling is None:
        assert metadata == {
            "kind": "detection", "labels": '["a", "b"]', "grid": "[3, 4]", "nms_iou": "0.5",
            "most": "32", "vote_sigma": "0.05",
        }  # fmt: skip
        assert tensors.keys() == {"weight", "bias", "calibration", "threshold"}


def test_only_heads_that_say_so_let_boxes_vote(tmp_path):
    file = detection(tmp_path, ["a"], 3)
    damage(file, vote_sigma=None)
    plain = read_head(file, WIDTH)
    assert plain.vote_sigma is None  # as in bundles of earlier versions
    logits = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    (kept,) = plain.interpret(logits, [(40, 30)], 0.0).detections
    (voted,) = replace(plain, vote_sigma=0.07).interpret(logits, [(40, 30)], 0.0).detections
    assert [one.confidence for one in voted] == [one.confidence for one in kept]
    assert any(one.box != other.box for one, other in zip(voted, kept, strict=True))


def test_the_threshold_of_the_manifest_counts(tmp_path):
    head = read_head(detection(tmp_path, ["a"], 3), WIDTH)
    assert head.configured({}).threshold == pytest.approx(0.2)
    assert head.configured({"threshold": 0.4}).threshold == 0.4


def boxes(*confidences, label="car", shift=0.0, right=30.0):
    found = tuple(Detection(label, c, (1.0 + shift, 2.0, right, 20.0)) for c in confidences)
    return BoxesResult(kind="detection", detections=(found,))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (boxes(0.9), boxes(0.9), True),
        (boxes(0.9, shift=PIXEL_TOLERANCE), boxes(0.9 - 0.9 * CONFIDENCE_TOLERANCE), True),
        (boxes(0.9, shift=0.6), boxes(0.9), False),
        # 300 pixels wide: a hundredth of that, which is more
        (boxes(0.9, shift=2.9, right=301.0), boxes(0.9, right=301.0), True),
        (boxes(0.9, shift=3.1, right=301.0), boxes(0.9, right=301.0), False),
        (boxes(0.9), boxes(0.88), False),
        (boxes(0.9, label="bus"), boxes(0.9), False),
        (boxes(0.9, 0.7), boxes(0.7, 0.9), True),
        (boxes(0.9, 0.505), boxes(0.9), True),  # close to the threshold: either may lack it
        (boxes(0.9), boxes(0.9, 0.505), True),
        (boxes(0.9), boxes(0.9, 0.52), False),
        (boxes(0.9, 0.52), boxes(0.9), False),
        (boxes(), boxes(), True),
    ],
)
def test_golden_boxes(found, expected, same):
    assert BoxesResult.matches(found.golden(), expected.golden(), 0.5) is same


def test_golden_labels_and_texts():
    found = LabelResult(kind="yes_no", label="yes", confidences={"no": 0.2, "yes": 0.8}).golden()
    assert found == {"label": "yes", "confidence": 0.8}
    for expected, same in (
        (found, True), ("yes", True), ("no", False), ({"label": "yes"}, True),
        ({"label": "yes", "confidence": 0.807}, True), ({"label": "yes", "confidence": 0.7}, False),
        ({"label": "no", "confidence": 0.8}, False),
    ):  # fmt: skip
        assert LabelResult.matches(found, expected, 0.0) is same
    assert text_matches(" a cat\n", {"text": "a cat"})
    assert text_matches("a cat", "a cat")
    assert not text_matches("a cat", {"text": "a dog"})
    assert not text_matches("a cat", {"label": "a cat"})


def test_answers_as_text_and_as_fields():
    label = LabelResult(kind="counting", label="3", confidences={"2": 0.1, "3": 0.9})
    assert label.text([]) == "3"
    fields = {"label": "3", "confidence": 0.9, "confidences": {"2": 0.1, "3": 0.9}}
    assert label.image_fields(0) == label.prompt_fields([(40, 20)]) == fields
    found = (Detection("car", 0.5, (0.0, 5.0, 20.0, 20.0)),)
    both = BoxesResult(kind="detection", detections=(found, ()))
    assert both.text([(40, 20), (8, 8)]) == "<ref>car</ref><box>(0,250),(500,1000)</box>"
    row = {"label": "car", "box": [0.0, 5.0, 20.0, 20.0], "confidence": 0.5}
    assert both.image_fields(0) == {"detections": [row]}
    assert both.image_fields(1) == both.image_fields(7) == {"detections": []}
    assert both.prompt_fields([(40, 20), (8, 8)])["images"] == [
        {"width": 40, "height": 20, "detections": [row]},
        {"width": 8, "height": 8, "detections": []},
    ]


def damage(file, **change):
    """Write a head's file with other metadata or tensors; None removes an entry."""
    metadata, tensors = contents(file)
    for name, value in change.items():
        known = tensors if torch.is_tensor(value) or name in tensors else metadata
        known[name] = value
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, file,
        {name: value for name, value in metadata.items() if value is not None},
    )  # fmt: skip


LABEL = [
    ({"kind": "poetry"}, "'poetry': choose one of action, classification, counting, detection"),
    ({"kind": None}, "lacks 'kind'"),
    ({"kind": "x" * 10**5}, "choose one of"),
    ({"labels": None}, "lacks 'labels'"),
    ({"labels": "{"}, "is no JSON"),
    ({"labels": "[" * 10**5}, "nested more than 64"),
    ({"labels": '["a", "b"]'}, "3 outputs, 2 labels"),
    ({"labels": '["a", "b", "a"]'}, "different names"),
    ({"labels": "[1, 2, 3]"}, "list of names"),
    ({"pooling": "max"}, "max"),
    ({"pooling": None}, "lacks 'pooling'"),
    ({"pooling": "attention"}, "lacks 'query'"),
    ({"pooling": "attention", "query": torch.ones(3)}, r"query: expected shape \(20,\)"),
    ({"bias": None}, "lacks 'bias'"),
    ({"bias": torch.ones(4)}, r"bias: expected shape \(3,\), got \(4,\)"),
    ({"weight": torch.ones(3, 21)}, r"weight: expected shape \(3, 20\), got \(3, 21\)"),
    ({"weight": torch.full((3, 20), math.nan)}, "weight reaches nan"),
    (
        {"weight": torch.full((3, 20), 1e30)},
        r"weight reaches 1e\+30, expected .* 1e\+06",
    ),
    ({"weight": torch.ones(3, 20, dtype=torch.complex64)}, "weight is complex"),
    ({"temperature": torch.tensor([1e-30])}, "temperature: expected at least 1e-06"),
    ({"temperature": torch.tensor([0.0])}, "temperature"),
    ({"temperature": torch.tensor([1.0, 2.0])}, "does not fit"),
]
BOXES = [
    ({"grid": "[0, 4]"}, "grid"),
    ({"grid": "[4]"}, "does not fit"),
    ({"grid": "[true, 4]"}, "grid: expected rows and columns"),
    ({"grid": "[3.5, 4]"}, "grid: expected rows and columns"),
    ({"grid": "[" * 10**5}, "nested more than 64"),
    ({"nms_iou": "nan"}, "expected nms_iou from 0 to 1"),
    ({"nms_iou": "much"}, "does not fit"),
    ({"vote_sigma": "nan"}, "expected vote_sigma above 0"),
    ({"vote_sigma": "0"}, "expected vote_sigma above 0 and up to 1, got '0'"),
    ({"vote_sigma": "1.5"}, "expected vote_sigma above 0"),
    ({"vote_sigma": "wide"}, "does not fit"),
    ({"most": "0"}, "expected most from 1 to 10000"),
    ({"most": "9" * 5000}, "does not fit"),
    ({"most": None}, "lacks 'most'"),
    ({"labels": '["a"]'}, "expected 5 outputs for 1 label, got 7"),
    ({"calibration": torch.ones(3)}, "calibration"),
    ({"threshold": None}, "lacks 'threshold'"),
]


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [*((False, *row) for row in LABEL), *((True, *row) for row in BOXES)],
)
def test_heads_that_do_not_fit(made, change, message, tmp_path):
    file = detection(tmp_path, ["a", "b"], 2) if made else linear(tmp_path, 3, 2)
    damage(file, **change)
    with pytest.raises(BundleError, match=message) as caught:
        read_head(file, WIDTH)
    assert str(file) in str(caught.value)


def test_damaged_files(tmp_path):
    file = linear(tmp_path, 3, 2)
    whole = file.read_bytes()
    for size in (0, 7, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(BundleError, match="is damaged"):
            read_head(file, WIDTH)
    with pytest.raises(BundleError, match="is damaged"):
        read_head(tmp_path / "none.safetensors", WIDTH)
    save_file({"weight": torch.ones(3, WIDTH)}, file)
    with pytest.raises(BundleError, match="lacks 'kind'"):
        read_head(file, WIDTH)
