"""Heads on disk and their answers: the file format, what is refused, golden comparison, text."""

import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.serve_helpers import make_box_head, make_label_head
from valora_data.contract.heads import read_head, write_head
from valora_data.contract.label_head import places_of
from valora_data.contract.results import (
    CONFIDENCE_TOLERANCE,
    PIXEL_TOLERANCE,
    BoxesResult,
    Detection,
    LabelResult,
    computed_in,
    text_matches,
)
from valora_data.errors import BundleError

WIDTH = 20


@pytest.fixture
def box_file(tmp_path):
    return make_box_head(tmp_path / "box.safetensors", WIDTH, ["a", "b"], (3, 4), seed=3)


@pytest.fixture
def label_file(tmp_path):
    file = tmp_path / "label.safetensors"
    more = {"seed": 2, "pooling": "attention", "temperature": 1.7}
    return make_label_head(file, WIDTH, ["x", "y", "z"], **more)


def contents(file):
    with safe_open(file, "pt") as parts:
        return parts.metadata(), {name: parts.get_tensor(name) for name in parts.keys()}  # noqa: SIM118


def damage(file, **change):
    """Write a head's file with other metadata or tensors; None removes an entry."""
    metadata, tensors = contents(file)
    for name, value in change.items():
        (tensors if torch.is_tensor(value) or name in tensors else metadata)[name] = value
    kept = [{k: v for k, v in part.items() if v is not None} for part in (tensors, metadata)]
    save_file(kept[0], file, kept[1])


def test_a_head_is_written_as_it_was_read(box_file, label_file, tmp_path):
    for file, names in (
        (label_file, {"weight", "bias", "temperature", "query"}),
        (box_file, {"weight", "bias", "calibration", "threshold"}),
    ):
        write_head(tmp_path / "again.safetensors", read_head(file, WIDTH))
        (facts, tensors), (again, others) = map(contents, (file, tmp_path / "again.safetensors"))
        assert facts == again
        assert tensors.keys() == others.keys() == names
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert facts == {
        "kind": "detection", "labels": '["a", "b"]', "grid": "[3, 4]", "nms_iou": "0.5",
        "most": "32", "vote_sigma": "0.05",
    }  # fmt: skip
    head = read_head(box_file, WIDTH)
    assert head.configured({}).threshold == pytest.approx(0.2)
    assert head.configured({"threshold": 0.4}).threshold == 0.4


def test_places_part_an_image_evenly():
    assert places_of(4, 8).tolist() == [
        row * 4 + column for row in range(4) for column in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert places_of(2, 3).tolist() == [0, 1, 2, 8, 9, 10]  # fewer tokens than places
    assert places_of(1, 1, images=3).tolist() == [0, 0, 0]


def boxes(*confidences, label="car", shift=0.0, right=30.0):
    found = tuple(Detection(label, c, (1.0 + shift, 2.0, right, 20.0)) for c in confidences)
    return BoxesResult(kind="detection", detections=(found,))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (boxes(0.9), boxes(0.9), True), (boxes(), boxes(), True),
        (boxes(0.9, shift=PIXEL_TOLERANCE), boxes(0.9 - 0.9 * CONFIDENCE_TOLERANCE), True),
        (boxes(0.9, shift=0.6), boxes(0.9), False),
        # 300 pixels wide: a hundredth of that, which is more
        (boxes(0.9, shift=2.9, right=301.0), boxes(0.9, right=301.0), True),
        (boxes(0.9, shift=3.1, right=301.0), boxes(0.9, right=301.0), False),
        (boxes(0.9), boxes(0.88), False), (boxes(0.9, label="bus"), boxes(0.9), False),
        (boxes(0.9, 0.7), boxes(0.7, 0.9), True),
        # close to the threshold: either may lack it
        (boxes(0.9, 0.505), boxes(0.9), True), (boxes(0.9), boxes(0.9, 0.505), True),
        (boxes(0.9), boxes(0.9, 0.52), False), (boxes(0.9, 0.52), boxes(0.9), False),
    ],
)  # fmt: skip
def test_golden_boxes(found, expected, same):
    assert BoxesResult.matches(found.golden(), expected.golden(), 0.5) is same


def test_golden_answers_of_16_bits_may_differ_by_more():
    for shift, sure, same in ((1.4, 0.9, True), (0.0, 0.88, True), (1.6, 0.9, False)):
        found, expected = boxes(sure, shift=shift).golden(), boxes(0.9).golden()
        with computed_in("bfloat16"):
            assert BoxesResult.matches(found, expected, 0.5) is same
        assert not BoxesResult.matches(found, expected, 0.5)


def test_golden_labels_and_texts():
    found = {"label": "yes", "confidence": 0.8}
    for expected, same in (
        (found, True), ("yes", True), ("no", False), ({"label": "yes"}, True),
        ({"label": "yes", "confidence": 0.807}, True), ({"label": "yes", "confidence": 0.7}, False),
        ({"label": "no", "confidence": 0.8}, False),
    ):  # fmt: skip
        assert LabelResult.matches(found, expected, 0.0) is same
    for expected, same in (
        ({"text": "a cat"}, True), ("a cat", True), ({"text": "a dog"}, False),
        ({"label": "a cat"}, False),
    ):  # fmt: skip
        assert text_matches(" a cat\n", expected) is same


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


LABEL = [
    ({"kind": "poetry"}, "'poetry': choose one of action, classification, counting, detection"),
    ({"kind": None}, "lacks 'kind'"), ({"kind": "x" * 10**5}, "choose one of"),
    ({"labels": None}, "lacks 'labels'"), ({"labels": "{"}, "is no JSON"),
    ({"labels": "[" * 10**5}, "nested more than 64"), ({"labels": "[1, 2, 3]"}, "different names"),
    ({"labels": '["a", "b"]'}, r"weight: expected shape \(2, 20\)"),
    ({"labels": '["a", "b", "a"]'}, "different names"),
    ({"pooling": "max"}, "max"), ({"pooling": None}, "lacks 'pooling'"),
    ({"query": torch.ones(3)}, r"query: expected shape \(20,\)"),
    ({"query": None}, "lacks 'query'"), ({"bias": None}, "lacks 'bias'"),
    ({"bias": torch.ones(4)}, r"bias: expected shape \(3,\), got \(4,\)"),
    ({"weight": torch.ones(3, 21)}, r"weight: expected shape \(3, 20\), got \(3, 21\)"),
    ({"weight": torch.full((3, 20), math.nan)}, "weight: expected .* got nan"),
    ({"weight": torch.full((3, 20), 1e30)}, r"numbers up to 1e\+06, got 1.*e\+30"),
    ({"weight": torch.ones(3, 20, dtype=torch.complex64)}, "expected real numbers"),
    ({"temperature": torch.tensor([1e-30])}, "temperature: expected at least 1e-06"),
    ({"temperature": torch.tensor([1.0, 2.0])}, "does not fit"),
]  # fmt: skip
BOXES = [
    ({"grid": "[0, 4]"}, "grid"), ({"grid": "[4]"}, "does not fit"),
    ({"grid": "[true, 4]"}, "rows and columns"), ({"grid": "[3.5, 4]"}, "rows and columns"),
    ({"grid": "[" * 10**5}, "nested more than 64"), ({"nms_iou": "much"}, "does not fit"),
    ({"nms_iou": "nan"}, "nms_iou: expected 0 to 1"), ({"vote_sigma": "wide"}, "does not fit"),
    *(({"vote_sigma": value}, "vote_sigma: expected above 0") for value in ("nan", "0", "1.5")),
    ({"most": "0"}, "most: expected 1 to 10000"), ({"most": "9" * 5000}, "does not fit"),
    ({"most": None}, "lacks 'most'"), ({"labels": '["a"]'}, r"shape \(5, 20\), got \(7, 20\)"),
    ({"calibration": torch.ones(3)}, "calibration"), ({"threshold": None}, "lacks 'threshold'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [*(("label_file", *row) for row in LABEL), *(("box_file", *row) for row in BOXES)],
)
def test_heads_that_do_not_fit(kind, change, message, request):
    file = request.getfixturevalue(kind)
    damage(file, **change)
    with pytest.raises(BundleError, match=message) as caught:
        read_head(file, WIDTH)
    assert str(file) in str(caught.value)
