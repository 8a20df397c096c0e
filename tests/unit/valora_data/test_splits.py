"""Splits: nothing in two of them, and a division that stays as a set grows."""

import pytest
from PIL import Image

from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.splits import content_hash, split_of

HALVES = {Split.TRAIN: 0.5, Split.VAL: 0.5}


def sample(name: str, level: int) -> Sample:
    return Sample(name, Image.new("RGB", (4, 4), (level, 0, 0)), Answer())


def test_distinct_samples_pass() -> None:
    check_no_leak({Split.TRAIN: [sample("a", 1), sample("b", 2)], Split.VAL: [sample("c", 3)]})


def test_same_id_in_two_splits() -> None:
    with pytest.raises(DataError, match=r"1 samples leak .*id a is in train and test"):
        check_no_leak({Split.TRAIN: [sample("a", 1)], Split.TEST: [sample("a", 2)]})


def test_same_image_under_another_name() -> None:
    with pytest.raises(DataError, match=r"the image of a in train is that of b in val.*keep each"):
        check_no_leak({Split.TRAIN: [sample("a", 1)], Split.VAL: [sample("b", 1)]})


def test_only_some_examples_are_shown() -> None:
    many = [sample(str(i), i) for i in range(9)]
    with pytest.raises(DataError, match="9 samples leak") as caught:
        check_no_leak({Split.TRAIN: many, Split.VAL: many})
    assert str(caught.value).count("is in train and val") == 3


def test_twins_in_one_split_are_no_leak() -> None:
    check_no_leak({Split.TRAIN: [sample("a", 1), sample("b", 1)]})


def test_hash_sees_pixels_and_shape_alone() -> None:
    assert content_hash(sample("a", 1)) == content_hash(sample("b", 1))
    assert content_hash(sample("a", 1)) != content_hash(sample("a", 2))
    flat = Sample("a", Image.new("RGB", (2, 8), (1, 0, 0)), Answer())
    assert content_hash(flat) != content_hash(sample("a", 1))


def test_division_is_by_id_and_stable() -> None:
    names = [f"s{i}" for i in range(600)]
    shares = {Split.TRAIN: 0.5, Split.UNLABELLED: 0.0, Split.VAL: 0.3, Split.TEST: 0.2}
    divided = [split_of(name, shares) for name in names]
    counts = [divided.count(split) for split in shares]
    assert counts == pytest.approx([300, 0, 180, 120], abs=40)
    assert [split_of(name, shares) for name in names] == divided
    assert [split_of(name, shares, seed=1) for name in names] != divided


@pytest.mark.parametrize("shares", [{Split.TRAIN: 0.9}, {Split.TRAIN: 1.2, Split.VAL: -0.2}])
def test_fractions_that_are_no_shares(shares: dict[Split, float]) -> None:
    with pytest.raises(DataError, match=r"must add up to 1, got train"):
        split_of("a", shares)


def test_frames_count_too() -> None:
    def clip(name: str, *levels: int) -> Sample:
        first, *rest = (Image.new("RGB", (4, 4), (level, 0, 0)) for level in levels)
        return Sample(name, first, Answer(), rest=tuple(rest))

    check_no_leak({Split.TRAIN: [clip("a", 1, 2)], Split.VAL: [clip("b", 1, 3)]})
    with pytest.raises(DataError, match="the image of a in train is that of b in val"):
        check_no_leak({Split.TRAIN: [clip("a", 1, 2)], Split.VAL: [clip("b", 1, 2)]})


def test_questions_about_one_image_stay_together() -> None:
    splits = [{split_of(f"image{i}#{q}", HALVES) for q in range(3)} for i in range(60)]
    assert all(len(parts) == 1 for parts in splits)
    assert set.union(*splits) == set(HALVES)
