"""Metrics of detection against pycocotools, closed forms and cases by hand."""

import contextlib
import io
from dataclasses import replace

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from valora_data.schema import Box
from valora_train.metrics.evaluate import match
from valora_train.metrics.per_class import detection_report

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


def coco(found, truth, iou):
    """pycocotools' evaluation, with other ids than ours."""
    category = {label: 3 + 4 * place for place, label in enumerate(LABELS)}
    rows = [
        [
            {
                "image_id": image, "category_id": category[b.label], "iscrowd": 0,
                "bbox": [b.x0, b.y0, b.x1 - b.x0, b.y1 - b.y0], "area": b.area,
                "score": b.confidence,
            }
            for image, boxes in enumerate(images) for b in boxes
        ]
        for images in (truth, found)
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = {
            "info": {}, "images": [{"id": i} for i in range(len(truth))],
            "categories": [{"id": i, "name": name} for name, i in category.items()],
            "annotations": [row | {"id": n + 1} for n, row in enumerate(rows[0])],
        }  # fmt: skip
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(rows[1]), "bbox")
        evaluation.params.iouThrs = iou
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval


@pytest.mark.parametrize(("seed", "threshold"), [(1, 0.0), (2, 0.35), (1, 0.7)])
def test_figures_equal_those_of_pycocotools(seed, threshold):
    found, truth = random_split(seed)
    matches = match(found, truth, LABELS)
    report = detection_report(found, truth, LABELS, threshold, matches.ap)
    sure = [[b for b in boxes if b.confidence >= threshold] for boxes in found]
    recalls = coco(sure, truth, np.array([0.5]))["recall"][0, :, 0, -1]
    precisions = coco(found, truth, np.linspace(0.5, 0.95, 10))["precision"][..., 0, -1]
    all_hits = 0.0
    for place, label in enumerate(LABELS):
        objects = sum(b.label == label for boxes in truth for b in boxes)
        boxes = sum(b.label == label for boxes in sure for b in boxes)
        hits = recalls[place] * objects
        all_hits += hits
        assert report.figures()[label] == pytest.approx({
            "support": objects, "recall": recalls[place], "precision": hits / boxes,
            "f1": 2 * hits / (boxes + objects), "ap": precisions[:, :, place].mean(),
        })  # fmt: skip
    assert matches.map == pytest.approx(precisions[precisions > -1].mean(), abs=1e-9)
    objects, boxes = (sum(map(len, some)) for some in (truth, sure))
    assert matches.f1(threshold) == pytest.approx(2 * all_hits / (boxes + objects))
    assert matches.precision_recall(threshold) == pytest.approx(
        (all_hits / boxes, all_hits / objects)
    )
    # Every object is in one row, every detection in one column.
    assert (report.matrix[:-1].sum(), report.matrix[:, :-1].sum()) == (objects, boxes)
    assert report.matrix[-1, -1] == 0


@pytest.mark.parametrize("digits", [1, 9])  # few digits: many boxes are equally sure
def test_best_threshold_beats_every_other(digits):
    for seed in range(5, 9):
        found, truth = random_split(seed)
        found = [[replace(b, confidence=round(b.confidence, digits)) for b in f] for f in found]
        matches = match(found, truth, LABELS)
        best = matches.f1(matches.best_threshold())
        assert all(best >= matches.f1(t) for t in np.linspace(0, 1, 301))


def test_interval_holds_the_truth_about_95_times_in_100():
    # The F1 of a large population against intervals of small samples of it.
    found, truth = random_split(6, images=1500)
    whole, parts = (
        match(found, truth, LABELS).f1(0.4),
        [slice(n, n + 50) for n in range(0, 1500, 50)],
    )
    intervals = [match(found[one], truth[one], LABELS).f1_interval(0.4) for one in parts]
    assert sum(low <= whole <= high for low, high in intervals) >= 25  # of 30; 28.5 expected


@pytest.mark.parametrize("found", [[[], []], [[], [Box(0, 0, 5, 5, "dog", 0.9)]]])
@pytest.mark.parametrize(
    "truth", [[[], []], [[Box(0, 0, 9, 9, "cat")], []], [[], [Box(0, 0, 5, 5, "cat")]]]
)
def test_nothing_found_or_nothing_there_or_another_class(found, truth):
    matches = match(found, truth, LABELS)
    assert (matches.f1(0.1), matches.map, matches.best_threshold()) == (0.0, 0.0, 0.5)
    matches.calibration_error()
    matches.f1_interval(0.5)
    report = detection_report(found, truth, LABELS, 0.5, matches.ap)
    assert all(figures["f1"] == 0 for figures in report.figures().values())
    with pytest.raises(ValueError, match="expected detections of 2 images, got 1"):
        match([[]], truth, LABELS)


def test_confusions_and_the_background():
    cat, dog = Box(0, 0, 10, 10, "cat"), Box(50, 50, 60, 60, "dog")
    found = [
        Box(0, 0, 10, 10, "dog", 0.9),  # a cat taken for a dog
        Box(50, 50, 60, 60, "dog", 0.8),
        Box(51, 50, 60, 60, "cat", 0.95),  # its dog is found already
        Box(80, 80, 90, 90, "cat", 0.7),
        Box(20, 20, 30, 30, "dog", 0.2),  # not sure enough
    ]
    report = detection_report([found, []], [[cat, dog], [cat]], LABELS, 0.5)
    assert report.labels == ("cat", "dog")
    assert report.matrix.tolist() == [[0, 1, 1], [0, 1, 0], [2, 0, 0]]
    assert report.used()[0] == ["cat", "dog", "background"]
    assert report.figures()["dog"] == {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1}
