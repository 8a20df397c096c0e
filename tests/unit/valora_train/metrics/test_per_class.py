"""Metrics of chosen labels against scikit-learn; `test_evaluate` has those of detections."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from valora_train.metrics.per_class import choice_report


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
    for label, row in zip(labels, zip(*expected, strict=True), strict=True):
        assert list(report.figures()[label].values()) == pytest.approx(row)


def test_answers_outside_the_labels_are_counted_apart():
    report = choice_report(["1", None, "7"], ["1", "1", "9"], ["0", "1"])
    names, counts = report.used()
    assert names == ["0", "1", "other"]
    assert counts.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert report.figures()["1"]["recall"] == 0.5
