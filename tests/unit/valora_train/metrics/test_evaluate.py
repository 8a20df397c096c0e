"""Metrics against pycocotools, scikit-learn, closed forms and cases by hand; speed."""

import contextlib
import io
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from tests.support import detection_sets as sets
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample
from valora_train.metrics import measures
from valora_train.metrics.evaluate import match
from valora_train.metrics.measures import normalized, vqa_score
from valora_train.metrics.per_class import choice_report, detection_report
from valora_train.metrics.speed import Pace, machine, measure_speed

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
    """pycocotools' evaluation."""
    page = Image.new("RGB", (99, 99))
    all_truth, all_found = (
        sets.coco(
            {n: (page, [(b.label, b.xyxy) for b in boxes]) for n, boxes in enumerate(images)},
            LABELS,
        )
        for images in (truth, found)
    )
    pairs = zip(all_found["annotations"], itertools.chain(*found), strict=True)
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = all_truth | {"info": {}}
        reference.createIndex()
        scored = reference.loadRes([row | {"score": box.confidence} for row, box in pairs])
        evaluation = COCOeval(reference, scored, "bbox")
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
    expected = all_hits / boxes, all_hits / objects
    assert matches.precision_recall(threshold) == pytest.approx(expected)
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
    whole = match(found, truth, LABELS).f1(0.4)
    parts = [slice(n, n + 50) for n in range(0, 1500, 50)]
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


WORDS = st.sampled_from(["red", "blue", "2", "two", "yes"])


@given(WORDS, st.lists(WORDS, min_size=4, max_size=10))
def test_vqa_score_is_the_mean_over_those_left_out(said, answers):
    parts = []
    for others in itertools.combinations(range(len(answers)), len(answers) - 1):
        same = sum(normalized(answers[i]) == normalized(said) for i in others)
        parts.append(min(same / 3, 1.0))
    assert vqa_score(said, answers) == pytest.approx(sum(parts) / len(parts))
    # The well-known table of VQA's evaluation.
    found = [vqa_score("Red!", ["red"] * n + ["blue"] * (10 - n)) for n in (0, 1, 2, 3, 4, 10)]
    assert found == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.0, 1.0])


def test_few_annotators_and_answers_that_count_as_one():
    assert vqa_score("yes", ["Yes."]) == vqa_score("yes", ["yes", "yes"]) == 1.0
    assert vqa_score("no", ["yes"]) == 0.0
    pairs = ("The red car.", "red car"), ("two", "2"), ("3.5", "3.5"), ("top-left", "top left")
    assert all(normalized(one) == normalized(other) for one, other in pairs)
    with pytest.raises(DataError, match="no answer to compare with"):
        measures.vqa([Answer(answers=("a",))], [Answer()])


def test_top1_counts_and_within_one():
    said = [Answer(count=n) for n in (1, 2, 3, 5)]
    truth = [Answer(count=n) for n in (1, 3, 5, 5)]
    scores = measures.exact_counts(said, truth)
    assert scores.mean == 0.5
    assert scores.details == {"within_one": 0.75, "mae": 0.75}
    labels = [Answer(label=name) for name in ("a", "b", "c")]
    other = [Answer(label=name) for name in ("a", "c", "c")]
    assert measures.top1(labels, other).mean == pytest.approx(2 / 3)
    assert measures.top1([Answer()], [Answer(label="a")]).mean == 0.0


def test_grounding_at_iou_one_half():
    truth = [Answer((Box(0, 0, 10, 10, "a"),))] * 4
    said = [
        Answer((Box(0, 0, 10, 5.1, "a"),)), Answer((Box(0, 0, 10, 4.9, "a"),)),
        Answer((Box(20, 20, 30, 30, "a"), Box(0, 0, 10, 10, "a"))),  # the first counts
        Answer(),
    ]  # fmt: skip
    scores = measures.box_accuracy(said, truth)
    assert scores.each.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert scores.details["mean_iou"] == pytest.approx((0.51 + 0.49) / 4)


def test_cider_in_closed_form():
    # With four words of its own, each caption has one n-gram of each weight with its image.
    references = [("a red star there", "the old red star"), ("two blue rings touch",),
                  ("some key at night",)]  # fmt: skip
    said = [("A red star, there!",), ("two blue rings touch",), ()]
    found = measures.cider(said, references).each
    # Half of what the first gets is from its twin, the rest from the words and pairs that it has in
    # common with the other reference: ("red", "star") of 4, ("red star") of 3 n-grams.
    assert found == pytest.approx([(10 + (2 / 4 + 1 / 3) / 4 * 10) / 2, 10, 0])
    with pytest.raises(DataError, match="a sample of task caption has no answer"):
        measures.cider(said, [(), *references[1:]])


def test_calibration_error_needs_probabilities():
    sure = [Answer(label="a", soft=(0.9, 0.1)), Answer(label="b", soft=(0.3, 0.7))]
    truth = [Answer(label="a"), Answer(label="a")]
    assert measures.calibration_error(sure, truth) == pytest.approx((0.1 + 0.7) / 2)
    assert measures.calibration_error([Answer(label="a")], truth[:1]) is None
    assert measures.calibration_error([], []) is None


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


def samples(count, frames=1):
    image = Image.new("RGB", (4, 4))
    return [
        Sample(str(number), image, Answer(), None, (image,) * (frames - 1))
        for number in range(count)
    ]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_median_batch_counts(clock):
    took = iter([0.0625, 0.5, 0.25, 0.5, 1.0, 7.0])
    asked = []

    def answer(batch):
        asked.append(len(batch))
        clock[0] += next(took)

    found = measure_speed(answer, samples(50, frames=3))
    assert asked == [1] + [32] * 4  # after the fourth batch, two seconds are over
    assert found == {"images_per_second": 32 * 3 / 0.5, "machine": machine()}


@pytest.mark.parametrize(("each", "sizes"), [(0.25, [1, 8]), (1.5, [1, 1, 1]), (40.0, [1])])
def test_a_slow_model_is_asked_less(clock, each, sizes):
    asked = []

    def answer(batch):
        asked.append(len(batch))
        clock[0] += each * len(batch)

    assert measure_speed(answer, samples(50))["images_per_second"] == pytest.approx(1 / each)
    assert asked == sizes
    asked.clear()
    measure_speed(answer, samples(4), alone=False)  # others must ask as often
    assert asked == [4, 4]


def test_a_pace_leaves_out_the_batch_in_which_a_model_warms_up(clock):
    pace = Pace()
    assert pace.facts() == {}
    for split in (samples(20), samples(10, frames=2)):
        pace.start(split)
        for done in range(10, len(split) + 1, 10):
            clock[0] += 5.0 if clock[0] == 0.0 else 0.5
            pace.on_batch(done)
        pace.on_batch(len(split))  # the end is told twice
    # 10 images in 5 s to warm up; 10 in 0.5 s; 20 in 0.5 s.
    assert pace.facts()["images_per_second"] == pytest.approx(30)
    pace = Pace()  # a single batch counts
    pace.start(samples(6))
    clock[0] += 2.0
    pace.on_batch(6)
    assert pace.facts() == {"images_per_second": 3, "machine": machine()}
    assert "cores" in machine()
    assert len(machine()) > len("1 cores")
