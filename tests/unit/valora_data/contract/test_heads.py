"""Heads on disk and their answers: files, what is refused, golden comparison, text, boxes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.special import logit
from torchvision.ops import batched_nms

from tests.support.serve_helpers import make_box_head, make_label_head
from valora_data.contract import boxes as box_code
from valora_data.contract import results
from valora_data.contract.heads import read_head, write_head
from valora_data.contract.label_head import places_of
from valora_data.errors import BundleError

WIDTH = 20
SAME = 1 - results.CONFIDENCE_TOLERANCE


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
    for file in (label_file, box_file):
        write_head(tmp_path / "again.safetensors", read_head(file, WIDTH))
        (facts, tensors), (again, others) = map(contents, (file, tmp_path / "again.safetensors"))
        assert facts == again
        torch.testing.assert_close(tensors, others, atol=0, rtol=0)
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
    found = tuple(results.Detection(label, c, (1.0 + shift, 2.0, right, 20.0)) for c in confidences)
    return results.BoxesResult(kind="detection", detections=(found,))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (boxes(0.9), boxes(0.9), True), (boxes(), boxes(), True),
        (boxes(0.9, shift=results.PIXEL_TOLERANCE), boxes(0.9 * SAME), True),
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
    assert results.BoxesResult.matches(found.golden(), expected.golden(), 0.5) is same


def test_golden_answers_of_16_bits_may_differ_by_more():
    for shift, sure, same in ((1.4, 0.9, True), (0.0, 0.88, True), (1.6, 0.9, False)):
        found, expected = boxes(sure, shift=shift).golden(), boxes(0.9).golden()
        with results.computed_in("bfloat16"):
            assert results.BoxesResult.matches(found, expected, 0.5) is same
        assert not results.BoxesResult.matches(found, expected, 0.5)


def test_golden_labels_and_texts():
    found = {"label": "yes", "confidence": 0.8}
    for expected, same in (
        (found, True), ("yes", True), ("no", False), ({"label": "yes"}, True),
        ({"label": "yes", "confidence": 0.807}, True), ({"label": "yes", "confidence": 0.7}, False),
        ({"label": "no", "confidence": 0.8}, False),
    ):  # fmt: skip
        assert results.LabelResult.matches(found, expected, 0.0) is same
    for expected, same in (
        ({"text": "a cat"}, True), ("a cat", True), ({"text": "a dog"}, False),
        ({"label": "a cat"}, False),
    ):  # fmt: skip
        assert results.text_matches(" a cat\n", expected) is same


def test_answers_as_text_and_as_fields():
    label = results.LabelResult(kind="counting", label="3", confidences={"2": 0.1, "3": 0.9})
    assert label.text([]) == "3"
    fields = {"label": "3", "confidence": 0.9, "confidences": {"2": 0.1, "3": 0.9}}
    assert label.image_fields(0) == label.prompt_fields([(40, 20)]) == fields
    found = (results.Detection("car", 0.5, (0.0, 5.0, 20.0, 20.0)),)
    both = results.BoxesResult(kind="detection", detections=(found, ()))
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


def test_a_box_by_hand():
    # Cell 5 of a 2 × 4 grid is row 1, column 1: centre (0.375, 0.75).
    raw = torch.zeros(8, 4)
    raw[5] = torch.tensor([0.5, -0.25, 0.0, torch.log(torch.tensor(0.5))])
    x0, y0, x1, y1 = box_code.decode(raw, (2, 4))[5].tolist()
    assert (x0, x1) == pytest.approx((0.5 - 0.125, 0.5 + 0.125))
    assert (y0, y1) == pytest.approx((0.625 - 0.125, 0.625 + 0.125))
    assert box_code.decode(torch.full((1, 4), 3.0), (1, 1)).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    raw = 5 * torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        box_code.decode(raw.numpy(), (2, 4)), box_code.decode(raw, (2, 4)), rtol=1e-6
    )


def kept(edges, scores, classes, iou, low, most):
    """Indices of the boxes that non-maximum suppression keeps, the surest first."""
    sure = np.flatnonzero(scores >= low)
    sure = sure[np.argsort(-scores[sure], kind="stable")]
    overlap = box_code.overlaps(edges, classes, sure)[:, sure]
    return sure[box_code.suppress(overlap, iou, most)].tolist()


def test_the_surest_boxes_of_a_class_are_kept():
    edges = np.float32([[0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [50, 50, 60, 60]])
    scores = np.float32([0.6, 0.9, 0.5, 0.2])
    classes = np.array([0, 0, 1, 0])
    assert kept(edges, scores, classes, 0.5, 0.1, 10) == [1, 2, 3]
    assert kept(edges, scores, classes, 0.5, 0.3, 10) == [1, 2]
    assert kept(edges, scores, classes, 0.5, 0.1, 1) == [1]
    raw = torch.tensor([[1.2, 0, 0, 0, 0, 0.1, 2.0, -1.0]])  # objectness, box, classes
    _, score, label = box_code.read_detections(
        raw.numpy(), (1, 1), (1.0, 0.0), nms_iou=0.5, min_score=0.0, most=5
    )
    assert label.tolist() == [1]
    expected = torch.sigmoid(raw[0, 0]) * raw[0, 5:].softmax(0)[1]
    assert score[0] == pytest.approx(expected.item(), rel=1e-6)


@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 2**31))
def test_boxes_are_suppressed_as_torchvision_does(count, iou, seed):
    random = np.random.default_rng(seed)
    low = random.uniform(0, 0.6, (count, 2))
    edges = np.float32(np.concatenate([low, low + random.uniform(0, 0.4, (count, 2))], 1))
    scores, classes = np.float32(random.uniform(0, 1, count)), random.integers(0, 3, count)
    expected = batched_nms(*map(torch.tensor, (edges, scores, classes)), iou)
    expected = [one for one in expected.tolist() if scores[one] >= 0.3][:20]
    assert kept(edges, scores, classes, iou, 0.3, 20) == expected


@given(st.integers(1, 30), st.sampled_from([0.01, 0.05, 1.0]), st.integers(0, 2**31))
def test_boxes_are_placed_by_votes_of_their_class(count, sigma, seed):
    """Compared with votes box by box, in float64."""
    random = np.random.default_rng(seed)
    low = random.uniform(0, 0.3, (count, 2))
    edges = np.concatenate([low, low + random.uniform(0.1, 0.4, (count, 2))], 1)
    scores, classes = random.uniform(0.01, 1, count), random.integers(0, 2, count)
    chosen = random.permutation(count)[: 1 + count // 3]
    boxes = edges.astype(np.float32)
    overlap = box_code.overlaps(boxes, classes, chosen)
    found = box_code.vote(boxes, np.log(scores, dtype=np.float32), overlap, sigma)
    areas = np.prod(edges[:, 2:] - edges[:, :2], 1)
    for box, one in zip(found, chosen, strict=True):
        low, high = np.maximum(edges[one], edges)[:, :2], np.minimum(edges[one], edges)[:, 2:]
        shared = np.prod(np.clip(high - low, 0, None), 1)
        overlap = shared / (areas[one] + areas - shared)
        votes = scores * np.exp(-((1 - overlap) ** 2) / sigma)
        votes *= (overlap > 0) & (classes == classes[one])
        np.testing.assert_allclose(box, votes @ edges / votes.sum(), atol=2e-5)


def test_where_a_box_lies_depends_on_no_threshold_and_no_calibration():
    raw = torch.randn(64, 5 + 2, generator=torch.Generator().manual_seed(1))
    raw[:, 3:5] += 1  # boxes of some cells, which overlap
    raw = raw.numpy()
    options = {"grid": (8, 8), "calibration": (1.7, -0.4), "nms_iou": 0.4, "most": 64}
    every, confidence, _ = box_code.read_detections(raw, **options, min_score=0.0, vote_sigma=0.05)
    some, sure, _ = box_code.read_detections(raw, **options, min_score=0.4, vote_sigma=0.05)
    assert 3 < len(some) < len(every)
    np.testing.assert_allclose(some, every[: len(some)], rtol=1e-5)
    np.testing.assert_allclose(sure, confidence[: len(some)], rtol=1e-5)
    plain, unmoved, _ = box_code.read_detections(raw, **options, min_score=0.0)
    np.testing.assert_allclose(unmoved, confidence, rtol=1e-5)
    assert np.abs(plain - every).max() > 0.01
    options |= {"calibration": (1.0, 0.0), "vote_sigma": 0.05}
    same, certain, _ = box_code.read_detections(raw, **options, min_score=0.0)
    np.testing.assert_allclose(same, every, rtol=1e-5)
    np.testing.assert_allclose(logit(confidence), 1.7 * logit(certain) - 0.4, rtol=1e-4, atol=1e-4)
