"""Metrics of detection against a plain greedy matcher; `test_per_class` has pycocotools."""

import numpy as np
import pytest

from valora_data.schema import Box
from valora_train.metrics.evaluate import match

LABELS = ["cat", "dog"]


def random_split(seed, images=60):
    rng = np.random.default_rng(seed)

    def box(confidence=1.0):
        x, y = rng.uniform(0, 60, 2)
        w, h = rng.uniform(8, 36, 2)
        return Box(x, y, x + w, y + h, LABELS[rng.integers(2)], confidence)

    truth = [[box() for _ in range(rng.integers(0, 4))] for _ in range(images)]
    found = []
    for boxes in truth:
        near = [
            Box(b.x0 + rng.normal(0, 4), b.y0, b.x1 + rng.normal(0, 4), b.y1, b.label, rng.random())
            for b in boxes
        ]
        found.append(near + [box(rng.uniform(0, 0.7)) for _ in range(rng.integers(0, 3))])
    return found, truth


def iou(a, b):
    w = min(a.x1, b.x1) - max(a.x0, b.x0)
    h = min(a.y1, b.y1) - max(a.y0, b.y0)
    inner = max(w, 0) * max(h, 0)
    return inner / (a.area + b.area - inner)


def greedy_f1(found, truth, threshold):
    hits = count = 0
    for boxes, objects in zip(found, truth, strict=True):
        left = list(objects)
        for box in sorted(boxes, key=lambda b: -b.confidence):
            if box.confidence < threshold:
                continue
            count += 1
            near = [o for o in left if o.label == box.label and iou(o, box) >= 0.5]
            if near:
                hits += 1
                left.remove(max(near, key=lambda o: iou(o, box)))
    return 2 * hits / (count + sum(map(len, truth)))


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.62])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_f1_equals_a_plain_greedy_matcher(seed, threshold):
    found, truth = random_split(seed)
    assert match(found, truth, LABELS).f1(threshold) == pytest.approx(
        greedy_f1(found, truth, threshold), abs=1e-9
    )


def test_best_threshold_beats_every_other():
    found, truth = random_split(5)
    matches = match(found, truth, LABELS)
    best = matches.f1(matches.best_threshold())
    assert all(best >= matches.f1(t) for t in np.linspace(0, 1, 301))


def test_interval_holds_the_truth_about_95_times_in_100():
    # The F1 of a large population against intervals of small samples of it.
    found, truth = random_split(6, images=3000)
    whole = match(found, truth, LABELS).f1(0.4)
    held = 0
    for start in range(0, 3000, 100):
        part = match(found[start : start + 100], truth[start : start + 100], LABELS)
        low, high = part.f1_interval(0.4, seed=start)
        held += low <= whole <= high
    assert held >= 25  # of 30; 28.5 expected


def test_calibration_error_of_a_known_case():
    # Ten boxes at 0.9 of which seven hit, ten at 0.3 of which three hit: (0.2 + 0.0) / 2.
    object_ = Box(0, 0, 10, 10, "cat")
    found = [[Box(0, 0, 10, 10, "cat", c)] for c in [0.9] * 10 + [0.3] * 10]
    hits = [True] * 7 + [False] * 3 + [True] * 3 + [False] * 7
    truth = [[object_] if hit else [] for hit in hits]
    assert match(found, truth, LABELS).calibration_error() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("found", [[[], []], [[], [Box(0, 0, 5, 5, "dog", 0.4)]]])
@pytest.mark.parametrize("truth", [[[], []], [[Box(0, 0, 9, 9, "cat")], []]])
def test_nothing_found_or_nothing_there(found, truth):
    matches = match(found, truth, LABELS)
    assert matches.f1(0.1) == 0.0
    assert matches.map == 0.0
    assert matches.best_threshold() == 0.5
    matches.calibration_error()
    matches.f1_interval(0.5)


def test_a_label_matches_only_itself_and_numbers_of_images_agree():
    assert match([[Box(0, 0, 9, 9, "dog", 0.9)]], [[Box(0, 0, 9, 9, "cat")]], LABELS).f1(0.5) == 0.0
    with pytest.raises(ValueError, match="expected detections of 2 images, got 1"):
        match([[]], [[], []], LABELS)
