"""Metrics of single classes against scikit-learn and pycocotools."""

import contextlib
import io

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from tests.unit.valora_train.metrics.test_evaluate import LABELS, random_split
from valora_data.schema import Box
from valora_train.metrics.evaluate import match
from valora_train.metrics.per_class import choice_report, detection_report


def test_choices_equal_scikit_learn():
    rng = np.random.default_rng(1)
    labels = ["red", "green", "blue", "never"]
    truth = rng.choice(labels[:3], 200, p=[0.6, 0.3, 0.1]).tolist()
    predicted = [t if rng.uniform() < 0.7 else rng.choice(labels[:3]) for t in truth]
    report = choice_report(predicted, truth, labels)
    names, counts = report.used()
    assert names == labels
    assert np.array_equal(counts, confusion_matrix(truth, predicted, labels=labels))
    expected = precision_recall_fscore_support(truth, predicted, labels=labels, zero_division=0)
    for place, label in enumerate(labels):
        found = report.figures()[label]
        got = [found[key] for key in ("precision", "recall", "f1", "support")]
        assert got == pytest.approx([row[place] for row in expected])
    assert "ap" not in report.figures()["red"]


def test_answers_outside_the_labels_are_counted_apart():
    report = choice_report(["1", None, "7"], ["1", "1", "9"], ["0", "1"])
    names, counts = report.used()
    assert names == ["0", "1", "other"]
    assert counts.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert report.figures()["1"]["recall"] == 0.5


def coco(found, truth, iou):
    """pycocotools' evaluation at one IoU."""
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
    return evaluation


@pytest.mark.parametrize("threshold", [0.0, 0.35, 0.7])
@pytest.mark.parametrize("seed", [1, 2])
def test_classes_of_detections_equal_pycocotools(seed, threshold):
    found, truth = random_split(seed)
    matches = match(found, truth, LABELS)
    report = detection_report(found, truth, LABELS, threshold, matches.ap)
    sure = [[b for b in boxes if b.confidence >= threshold] for boxes in found]
    at_half = coco(sure, truth, np.array([0.5]))
    ranges = coco(found, truth, np.linspace(0.5, 0.95, 10))
    for place, label in enumerate(LABELS):
        figures = report.figures()[label]
        objects = sum(b.label == label for boxes in truth for b in boxes)
        boxes = sum(b.label == label for boxes in sure for b in boxes)
        recall = at_half.eval["recall"][0, place, 0, -1]
        assert figures["support"] == objects
        assert figures["recall"] == pytest.approx(recall)
        assert figures["precision"] == pytest.approx(recall * objects / boxes)
        assert figures["f1"] == pytest.approx(2 * recall * objects / (boxes + objects))
        precision = ranges.eval["precision"][:, :, place, 0, -1]
        assert figures["ap"] == pytest.approx(precision.mean(), abs=1e-9)
    precision = ranges.eval["precision"][..., 0, -1]
    assert matches.map == pytest.approx(precision[precision > -1].mean(), abs=1e-9)
    # Every object is in one row, every detection in one column.
    assert report.matrix[:-1].sum() == sum(map(len, truth))
    assert report.matrix[:, :-1].sum() == sum(map(len, sure))
    assert report.matrix[-1, -1] == 0
    hits = np.trace(report.matrix)
    total = sum(map(len, truth)) + sum(map(len, sure))
    assert matches.f1(threshold) == pytest.approx(2 * hits / total)


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


@pytest.mark.parametrize("found", [[[]], [[Box(0, 0, 9, 9, "dog", 0.9)]]])
@pytest.mark.parametrize("truth", [[[]], [[Box(50, 0, 59, 9, "cat")]]])
def test_nothing_found_or_nothing_there(found, truth):
    report = detection_report(found, truth, LABELS, 0.5, match(found, truth, LABELS).ap)
    assert report.matrix.sum() == len(found[0]) + len(truth[0])
    assert all(f["f1"] == 0 for f in report.figures().values())
