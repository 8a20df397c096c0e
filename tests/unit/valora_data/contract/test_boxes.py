"""Boxes of visual tokens: their code, non-maximum suppression, votes for their place."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from valora_data.contract import boxes


def test_a_box_by_hand():
    # Cell 5 of a 2 × 4 grid is row 1, column 1: centre (0.375, 0.75).
    raw = torch.zeros(8, 4)
    raw[5] = torch.tensor([0.5, -0.25, 0.0, torch.log(torch.tensor(0.5))])
    x0, y0, x1, y1 = boxes.decode(raw, (2, 4))[5].tolist()
    assert (x0, x1) == pytest.approx((0.5 - 0.125, 0.5 + 0.125))
    assert (y0, y1) == pytest.approx((0.625 - 0.125, 0.625 + 0.125))
    assert boxes.decode(torch.full((1, 4), 3.0), (1, 1)).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_the_surest_boxes_of_a_class_are_kept():
    edges = torch.tensor([[0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [50, 50, 60, 60.0]])
    scores = torch.tensor([0.6, 0.9, 0.5, 0.2])
    classes = torch.tensor([0, 0, 1, 0])
    kept = boxes.suppress(edges, scores, classes, 0.5, 0.1, 10)
    assert kept.tolist() == [1, 2, 3]
    assert boxes.suppress(edges, scores, classes, 0.5, 0.3, 10).tolist() == [1, 2]
    assert boxes.suppress(edges, scores, classes, 0.5, 0.1, 1).tolist() == [1]
    raw = torch.tensor([[1.2, 0, 0, 0, 0, 0.1, 2.0, -1.0]])  # objectness, box, classes
    _, score, label = boxes.read_detections(
        raw, (1, 1), torch.tensor([1.0, 0.0]), nms_iou=0.5, min_score=0.0, most=5
    )
    assert label.tolist() == [1]
    torch.testing.assert_close(score[0], torch.sigmoid(raw[0, 0]) * raw[0, 5:].softmax(0)[1])


@given(st.integers(1, 30), st.sampled_from([0.01, 0.05, 1.0]), st.integers(0, 2**31))
def test_boxes_are_placed_by_votes_of_their_class(count, sigma, seed):
    """Compared with votes box by box, in float64."""
    random = np.random.default_rng(seed)
    low = random.uniform(0, 0.3, (count, 2))
    edges = np.concatenate([low, low + random.uniform(0.1, 0.4, (count, 2))], 1)
    scores, classes = random.uniform(0.01, 1, count), random.integers(0, 2, count)
    kept = random.permutation(count)[: 1 + count // 3]
    found = boxes.vote(
        torch.tensor(edges, dtype=torch.float32), torch.tensor(scores, dtype=torch.float32).log(),
        torch.tensor(classes), torch.tensor(kept), sigma,
    )  # fmt: skip
    areas = np.prod(edges[:, 2:] - edges[:, :2], 1)
    for box, one in zip(found.numpy(), kept, strict=True):
        low, high = np.maximum(edges[one], edges)[:, :2], np.minimum(edges[one], edges)[:, 2:]
        shared = np.prod(np.clip(high - low, 0, None), 1)
        overlap = shared / (areas[one] + areas - shared)
        votes = scores * np.exp(-((1 - overlap) ** 2) / sigma)
        votes *= (overlap > 0) & (classes == classes[one])
        np.testing.assert_allclose(box, votes @ edges / votes.sum(), atol=2e-5)


def test_where_a_box_lies_depends_on_no_threshold_and_no_calibration():
    raw = torch.randn(64, 5 + 2, generator=torch.Generator().manual_seed(1))
    raw[:, 3:5] += 1  # boxes of some cells, which overlap
    options = {"grid": (8, 8), "calibration": torch.tensor([1.7, -0.4]), "nms_iou": 0.4, "most": 64}
    every, confidence, _ = boxes.read_detections(raw, **options, min_score=0.0, vote_sigma=0.05)
    some, sure, _ = boxes.read_detections(raw, **options, min_score=0.4, vote_sigma=0.05)
    assert 3 < len(some) < len(every)
    torch.testing.assert_close(some, every[: len(some)])
    torch.testing.assert_close(sure, confidence[: len(some)])
    plain, unmoved, _ = boxes.read_detections(raw, **options, min_score=0.0)
    torch.testing.assert_close(unmoved, confidence)
    assert (plain - every).abs().amax() > 0.01
    options |= {"calibration": torch.tensor([1.0, 0.0]), "vote_sigma": 0.05}
    same, certain, _ = boxes.read_detections(raw, **options, min_score=0.0)
    torch.testing.assert_close(same, every)
    torch.testing.assert_close(confidence.logit(), 1.7 * certain.logit() - 0.4)
