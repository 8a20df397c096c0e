"""The box code of visual tokens: round trips, resizing, non-maximum suppression."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from valora_data.contract import boxes


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 2**31))
def test_decode_inverts_encode(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(rows * columns, 2, generator=generator) * 0.6
    size = 0.02 + torch.rand(rows * columns, 2, generator=generator) * 0.35
    edges = torch.cat([low, low + size], dim=1)
    cells = torch.arange(rows * columns)
    raw = boxes.encode(edges, cells, (rows, columns))
    # The code reaches twenty cells at most; boxes beyond are clamped.
    inside = (raw[:, 2:] < boxes.LOG_SIZE[1]).all(1) & (raw[:, 2:] > boxes.LOG_SIZE[0]).all(1)
    torch.testing.assert_close(
        boxes.decode(raw, (rows, columns))[inside], edges[inside], atol=2e-5, rtol=0
    )


def test_a_box_by_hand():
    # Cell 5 of a 2 × 4 grid is row 1, column 1: centre (0.375, 0.75).
    raw = torch.zeros(8, 4)
    raw[5] = torch.tensor([0.5, -0.25, 0.0, torch.log(torch.tensor(0.5))])
    x0, y0, x1, y1 = boxes.decode(raw, (2, 4))[5].tolist()
    assert (x0, x1) == pytest.approx((0.5 - 0.125, 0.5 + 0.125))
    assert (y0, y1) == pytest.approx((0.625 - 0.125, 0.625 + 0.125))


def test_boxes_are_clipped_to_the_image():
    raw = torch.full((1, 4), 3.0)
    assert boxes.decode(raw, (1, 1)).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_suppression_keeps_the_surest_of_a_class():
    edges = torch.tensor([[0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [50, 50, 60, 60.0]])
    scores = torch.tensor([0.6, 0.9, 0.5, 0.2])
    classes = torch.tensor([0, 0, 1, 0])
    kept = boxes.suppress(edges, scores, classes, 0.5, 0.1, 10)
    assert kept.tolist() == [1, 2, 3]
    assert boxes.suppress(edges, scores, classes, 0.5, 0.3, 10).tolist() == [1, 2]
    assert boxes.suppress(edges, scores, classes, 0.5, 0.1, 1).tolist() == [1]


def test_class_scores_multiply_objectness():
    raw = torch.zeros(1, 5 + 3)
    raw[0, 0] = 1.2
    raw[0, 5:] = torch.tensor([0.1, 2.0, -1.0])
    _, score, label = boxes.read_detections(
        raw, (1, 1), torch.tensor([1.0, 0.0]), nms_iou=0.5, min_score=0.0, most=5
    )
    expected = torch.sigmoid(raw[0, 0]) * raw[0, 5:].softmax(0)[1]
    assert label.tolist() == [1]
    torch.testing.assert_close(score[0], expected)


def places_by_hand(edges, scores, classes, kept, sigma):
    """Votes box by box, in float64."""
    found = []
    for one in kept:
        total, weight = np.zeros(4), 0.0
        for other in range(len(edges)):
            low = np.maximum(edges[one][:2], edges[other][:2])
            high = np.minimum(edges[one][2:], edges[other][2:])
            shared = np.prod(np.clip(high - low, 0, None))
            area = [np.prod(edges[box][2:] - edges[box][:2]) for box in (one, other)]
            overlap = 1.0 if other == one else shared / (sum(area) - shared)
            if overlap > 0 and classes[one] == classes[other]:
                vote = scores[other] * np.exp(-((1 - overlap) ** 2) / sigma)
                total, weight = total + vote * edges[other], weight + vote
        found.append(total / weight)
    return np.array(found)


@given(st.integers(1, 30), st.sampled_from([0.01, 0.05, 1.0]), st.integers(0, 2**31))
def test_boxes_are_placed_by_votes_of_their_class(count, sigma, seed):
    random = np.random.default_rng(seed)
    low = random.uniform(0, 0.3, (count, 2))
    edges = np.concatenate([low, low + random.uniform(0.1, 0.4, (count, 2))], 1)
    scores, classes = random.uniform(0.01, 1, count), random.integers(0, 2, count)
    kept = random.permutation(count)[: 1 + count // 3]
    found = boxes.vote(
        torch.tensor(edges, dtype=torch.float32), torch.tensor(scores, dtype=torch.float32).log(),
        torch.tensor(classes), torch.tensor(kept), sigma,
    )  # fmt: skip
    expected = places_by_hand(edges, scores, classes, kept, sigma)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)


def test_a_box_without_area_or_neighbours_stays_where_it_is():
    edges = torch.tensor([[0.2, 0.2, 0.2, 0.6], [0.2, 0.2, 0.2, 0.6], [0.7, 0.7, 0.9, 0.8]])
    scores = torch.tensor([-90.0, -0.1, -200.0])  # whose exponentials may be 0
    found = boxes.vote(edges, scores, torch.zeros(3), torch.tensor([0, 2]), 0.05)
    torch.testing.assert_close(found, edges[[0, 2]])


def test_where_a_box_lies_does_not_depend_on_the_least_confidence():
    raw = torch.randn(64, 5 + 2, generator=torch.Generator().manual_seed(1))
    raw[:, 3:5] += 1  # boxes of some cells, which overlap
    platt = torch.tensor([1.7, -0.4])

    def read(least, vote_sigma=0.05):
        return boxes.read_detections(
            raw, (8, 8), platt, nms_iou=0.4, min_score=least, most=64, vote_sigma=vote_sigma
        )

    (every, confidence, _), (some, sure, _) = read(0.0), read(0.4)
    assert 3 < len(some) < len(every)
    torch.testing.assert_close(some, every[: len(some)])
    torch.testing.assert_close(sure, confidence[: len(some)])
    plain, unmoved, _ = read(0.0, None)
    torch.testing.assert_close(unmoved, confidence)
    assert (plain - every).abs().amax() > 0.01
