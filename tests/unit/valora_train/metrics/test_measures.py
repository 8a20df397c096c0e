"""Metrics and speed against hand-made cases, formulas and scikit-learn."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample
from valora_train.metrics import measures
from valora_train.metrics.measures import normalized, vqa_score
from valora_train.metrics.per_class import choice_report
from valora_train.metrics.speed import Pace, machine, measure_speed

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
