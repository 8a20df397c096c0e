"""Standard metrics against hand-made cases and formulas."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valora_data.errors import DataError
from valora_data.schema import Answer, Box
from valora_train.metrics.measures import (
    box_accuracy,
    calibration_error,
    cider,
    exact_counts,
    normalized,
    top1,
    vqa,
    vqa_score,
)

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
        vqa([Answer(answers=("a",))], [Answer()])


def test_top1_counts_and_within_one():
    said = [Answer(count=n) for n in (1, 2, 3, 5)]
    truth = [Answer(count=n) for n in (1, 3, 5, 5)]
    scores = exact_counts(said, truth)
    assert scores.mean == 0.5
    assert scores.details == {"within_one": 0.75, "mae": 0.75}
    labels = [Answer(label=name) for name in ("a", "b", "c")]
    other = [Answer(label=name) for name in ("a", "c", "c")]
    assert top1(labels, other).mean == pytest.approx(2 / 3)
    assert top1([Answer()], [Answer(label="a")]).mean == 0.0


def test_grounding_at_iou_one_half():
    truth = [Answer((Box(0, 0, 10, 10, "a"),))] * 4
    said = [
        Answer((Box(0, 0, 10, 5.1, "a"),)), Answer((Box(0, 0, 10, 4.9, "a"),)),
        Answer((Box(20, 20, 30, 30, "a"), Box(0, 0, 10, 10, "a"))),  # the first counts
        Answer(),
    ]  # fmt: skip
    scores = box_accuracy(said, truth)
    assert scores.each.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert scores.details["mean_iou"] == pytest.approx((0.51 + 0.49) / 4)


def test_cider_in_closed_form():
    # With four words of its own, each caption has one n-gram of each weight with its image.
    references = [("a red star there", "the old red star"), ("two blue rings touch",),
                  ("some key at night",)]  # fmt: skip
    said = [("A red star, there!",), ("two blue rings touch",), ()]
    found = cider(said, references).each
    # Half of what the first gets is from its twin, the rest from the words and pairs that it has in
    # common with the other reference: ("red", "star") of 4, ("red star") of 3 n-grams.
    assert found == pytest.approx([(10 + (2 / 4 + 1 / 3) / 4 * 10) / 2, 10, 0])
    with pytest.raises(DataError, match="a sample of task caption has no answer"):
        cider(said, [(), *references[1:]])


def test_calibration_error_needs_probabilities():
    sure = [Answer(label="a", soft=(0.9, 0.1)), Answer(label="b", soft=(0.3, 0.7))]
    truth = [Answer(label="a"), Answer(label="a")]
    assert calibration_error(sure, truth) == pytest.approx((0.1 + 0.7) / 2)
    assert calibration_error([Answer(label="a")], truth[:1]) is None
    assert calibration_error([], []) is None
