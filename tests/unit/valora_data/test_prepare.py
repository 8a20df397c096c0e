"""From a source to splits on disk: whole, apart, streamed, and without answers to learn from."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from valora_data import shards
from valora_data.errors import DataError
from valora_data.prepare import TRUTH, prepare
from valora_data.schema import Answer, Sample, Split

SHARES = {Split.TRAIN: 0.4, Split.UNLABELLED: 0.2, Split.VAL: 0.2, Split.TEST: 0.2}
LABELS = ("even", "odd")


def stream(start: int, count: int, labelled: bool = True) -> Iterator[Sample]:
    for i in range(start, start + count):
        image = Image.new("RGB", (4, 4), (i % 256, i // 256, 7))
        yield Sample(f"s{i}", image, Answer(label=LABELS[i % 2]) if labelled else Answer())


def test_a_set_in_one_piece(tmp_path: Path) -> None:
    seen: list[int] = []
    counts = prepare(
        {None: partial(stream, 0, 300)}, LABELS, SHARES, tmp_path, on_sample=seen.append
    )
    assert seen == list(range(1, 301))
    assert sum(counts.values()) == 300
    assert [counts[s] for s in Split] == pytest.approx([120, 60, 60, 60], abs=25)
    found = {split: shards.read(tmp_path / split) for split in Split}
    assert {split: len(part) for split, part in found.items()} == counts
    assert {s.id for part in found.values() for s in part} == {f"s{i}" for i in range(300)}
    # What is to be labelled by a teacher has no answer; the truth lies beside it.
    assert {s.answer for s in found[Split.UNLABELLED]} == {Answer()}
    truth = shards.read(tmp_path / TRUTH)
    assert [s.id for s in truth] == [s.id for s in found[Split.UNLABELLED]]
    assert all(s.answer.label == LABELS[int(s.id[1:]) % 2] for s in truth)


def test_named_splits_stay_as_they_are(tmp_path: Path) -> None:
    splits = {None: partial(stream, 0, 100), Split.TEST: partial(stream, 500, 9)}
    counts = prepare(splits, LABELS, SHARES, tmp_path)
    assert counts[Split.TEST] == 9
    assert [s.id for s in shards.read(tmp_path / "test")] == [f"s{i}" for i in range(500, 509)]
    assert sum(counts.values()) == 109


def test_images_that_nobody_labelled(tmp_path: Path) -> None:
    splits = {split: partial(stream, 100 * i, 5) for i, split in enumerate(Split)}
    splits[Split.UNLABELLED] = partial(stream, 900, 7, labelled=False)
    assert prepare(splits, LABELS, {}, tmp_path)[Split.UNLABELLED] == 7
    assert not (tmp_path / TRUTH).exists()


def test_nothing_is_left_of_what_cannot_be(tmp_path: Path) -> None:
    leaking = {split: partial(stream, 0, 5) for split in Split}
    with pytest.raises(DataError, match=r"15 samples leak .*id s0 is in train and unlabelled"):
        prepare(leaking, LABELS, SHARES, tmp_path)
    with pytest.raises(DataError, match="there are no test samples"):
        prepare({s: partial(stream, 0, 5) for s in (Split.TRAIN,)} | {
            Split.VAL: partial(stream, 10, 5), Split.UNLABELLED: partial(stream, 20, 5)
        }, LABELS, SHARES, tmp_path)  # fmt: skip
    with pytest.raises(DataError, match=r"there are no .* samples: add some"):
        prepare({None: partial(stream, 0, 2)}, LABELS, SHARES, tmp_path)
    with pytest.raises(DataError, match="label 'odd' is not one of even, none"):
        prepare({None: partial(stream, 0, 50)}, ("even", "none"), SHARES, tmp_path)
    zero = dict.fromkeys(Split, 0.0)
    with pytest.raises(DataError, match="the fractions of train, unlabelled, val, test are zero"):
        prepare({None: partial(stream, 0, 50)}, LABELS, zero, tmp_path)
    assert list(tmp_path.iterdir()) == []
