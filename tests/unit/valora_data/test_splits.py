"""Splits: a division that stays as a set grows."""

import pytest

from valora_data.errors import DataError
from valora_data.schema import Split
from valora_data.splits import split_of

HALVES = {Split.TRAIN: 0.5, Split.VAL: 0.5}


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


def test_questions_about_one_image_stay_together() -> None:
    splits = [{split_of(f"image{i}#{q}", HALVES) for q in range(3)} for i in range(60)]
    assert all(len(parts) == 1 for parts in splits)
    assert set.union(*splits) == set(HALVES)
