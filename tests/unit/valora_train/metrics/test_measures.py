"""Standard metrics against hand-made cases and formulas."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valora_data.errors import DataError
from valora_data.schema import Answer, Box
from valora_train.metrics.measures import (
    box_accuracy,
    cider,
    exact_counts,
    normalized,
    top1,
    vqa,
    vqa_score,
)

WORDS = st.sampled_from(["red", "blue", "2", "two", "yes"])


@pytest.mark.parametrize(
    ("agree", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)]
)
def test_vqa_score_of_ten_annotators(agree, score):
    # The well-known table of VQA's evaluation.
    answers = ["red"] * agree + ["blue"] * (10 - agree)
    assert vqa_score("Red!", answers) == pytest.approx(score)


@given(WORDS, st.lists(WORDS, min_size=4, max_size=10))
def test_vqa_score_is_the_mean_over_those_left_out(said, answers):
    parts = []
    for others in itertools.combinations(range(len(answers)), len(answers) - 1):
        same = sum(normalized(answers[i]) == normalized(said) for i in others)
        parts.append(min(same / 3, 1.0))
    assert vqa_score(said, answers) == pytest.approx(sum(parts) / len(parts))


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
        Answer((Box(0, 0, 10, 5.1, "a"),)),
        Answer((Box(0, 0, 10, 4.9, "a"),)),
        Answer((Box(20, 20, 30, 30, "a"), Box(0, 0, 10, 10, "a"))),  # the first counts
        Answer(),
    ]
    scores = box_accuracy(said, truth)
    assert scores.each.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert scores.details["mean_iou"] == pytest.approx((0.51 + 0.49) / 4)


def _cider(candidate, references, corpus):
    """CIDEr-D as the paper has it, for one image, slowly."""

    def grams(text, n):
        words = text.split()
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    total = 0.0
    for n in range(1, 5):
        seen = [set().union(*(grams(ref, n) for ref in refs)) for refs in corpus]

        def vector(text, n=n, seen=seen):
            found = grams(text, n)
            return {
                gram: found.count(gram)
                * (math.log(len(corpus)) - math.log(max(1, sum(gram in one for one in seen))))
                for gram in set(found)
            }

        mine = vector(candidate)
        for reference in references:
            theirs = vector(reference)
            dot = sum(min(mine.get(gram, 0.0), w) * w for gram, w in theirs.items())
            norm = math.sqrt(sum(v * v for v in mine.values())) * math.sqrt(
                sum(v * v for v in theirs.values())
            )
            gap = len(grams(candidate, 2)) - len(grams(reference, 2))  # as pycocoevalcap counts
            if norm:
                total += dot / norm * math.exp(-(gap**2) / 72) / len(references)
    return total / 4 * 10


def test_cider_is_that_of_the_paper():
    references = [
        ("a red star at the top", "there is a red star at the top"),
        ("two blue rings", "two rings"),
        ("a key and a sun at night", "a key and a sun in the dark"),
    ]
    said = ["A red star, at the top", "two blue stars", "a key at night"]
    scores = cider([(text,) for text in said], references)
    plain = ["a red star at the top", "two blue stars", "a key at night"]
    for each, text, refs in zip(scores.each, plain, references, strict=True):
        assert each == pytest.approx(_cider(text, refs, references), rel=1e-6)
    assert scores.each[0] > 2 * scores.each[1]
    assert cider([()] * 3, references).mean == 0.0


def test_intervals_hold_the_mean():
    scores = top1(
        [Answer(label="a")] * 50,
        [Answer(label="a" if n % 5 else "b") for n in range(50)],
    )
    low, high = scores.interval()
    assert low < scores.mean == 0.8 < high
    # About the normal approximation.
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.8 * 0.2 / 50), rel=0.15)
