"""From a source to splits on disk: whole, apart, streamed, without copies or answers to learn."""

import io
import logging
from functools import partial

import pytest
from PIL import Image, ImageOps

from tests.support.data_sets import natural_picture
from valora_data import shards
from valora_data.duplicates import Duplicates, Pair, groups_of
from valora_data.errors import DataError
from valora_data.images import decode_image
from valora_data.prepare import TRUTH, prepare, split_of
from valora_data.schema import Answer, Box, Sample, Split

SHARES = {Split.TRAIN: 0.4, Split.UNLABELLED: 0.2, Split.VAL: 0.2, Split.TEST: 0.2}
LABELS = ("even", "odd")


def stream(start, count, labelled=True):
    for i in range(start, start + count):
        image = Image.new("RGB", (4, 4), (i % 256, i // 256, 7))
        yield Sample(f"s{i}", image, Answer(label=LABELS[i % 2]) if labelled else Answer())


def test_a_set_in_one_piece(tmp_path):
    seen = []
    whole = {None: partial(stream, 0, 300)}
    counts = prepare(whole, LABELS, SHARES, tmp_path, on_sample=seen.append)
    assert seen == list(range(1, 301))
    assert sum(counts.values()) == 300
    assert [counts[s] for s in Split] == pytest.approx([120, 60, 60, 60], abs=25)
    found = {split: shards.read(tmp_path / split) for split in Split}
    assert {split: len(part) for split, part in found.items()} == counts
    assert {s.id for part in found.values() for s in part} == {f"s{i}" for i in range(300)}
    # What is to be labelled by a teacher has no answer; the truth lies beside it.
    assert {s.answer for s in found[Split.UNLABELLED]} == {Answer()}
    truth = shards.read(tmp_path / TRUTH)
    for one, other in zip(truth, found[Split.UNLABELLED], strict=True):
        assert (one.id, one.image.tobytes()) == (other.id, other.image.tobytes())
    assert all(s.answer.label == LABELS[int(s.id[1:]) % 2] for s in truth)


LEAKING = {split: partial(stream, 0, 5) for split in Split}
NO_TEST = {split: partial(stream, 10 * i, 5) for i, split in enumerate(Split)}
del NO_TEST[Split.TEST]
WHOLE = {None: partial(stream, 0, 50)}


@pytest.mark.parametrize(
    ("splits", "labels", "shares", "message"),
    [
        (LEAKING, LABELS, SHARES, r"15 samples leak .*s0 is in train and unlabelled.*and 5 more"),
        (NO_TEST, LABELS, SHARES, "there are no test samples"),
        ({None: partial(stream, 0, 2)}, LABELS, SHARES, r"there are no .* samples: add some"),
        (WHOLE, ("even", "none"), SHARES, "label 'odd' is not one of even, none"),
        (WHOLE, LABELS, dict.fromkeys(Split, 0.0),
         "the fractions of train, unlabelled, val, test are zero"),
    ],
)  # fmt: skip
def test_nothing_is_left_of_what_cannot_be(splits, labels, shares, message, tmp_path):
    with pytest.raises(DataError, match=message):
        prepare(splits, labels, shares, tmp_path)
    assert list(tmp_path.iterdir()) == []


def scenes(*numbers, change=lambda image: image):
    """A stream of drawn pictures; samples are named after their numbers and the change."""

    def stream():
        for number in numbers:
            picture, answer = change(natural_picture(number)), Answer(label=LABELS[number % 2])
            yield Sample(f"{number}-{picture.width}-{change.__name__}", picture, answer)

    return stream


def smaller(image):
    return image.resize((70, 70))


def where(folder):
    return {s.id: split for split in Split for s in shards.read(folder / split)}


def test_copies_of_a_picture_go_to_one_split(tmp_path):
    """Equal, resized and mirrored ones, which hashes of their ids would divide."""

    def stream():
        for change in (lambda image: image, smaller, ImageOps.mirror, ImageOps.exif_transpose):
            for sample in scenes(*range(12), change=change)():
                yield Sample(f"{change.__name__}/{sample.id}", sample.image, sample.answer)

    counts = prepare({None: stream}, LABELS, SHARES, tmp_path)
    assert sum(counts.values()) == 48
    splits = {}
    for name, split in where(tmp_path).items():
        splits.setdefault(name.split("/")[1].split("-")[0], set()).add(split)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == set(Split)


def leaking():
    """Pictures 0 and 1 are in training and test, 2 in validation and, smaller, in training."""
    train = scenes(*range(10))
    return {
        Split.TRAIN: train,
        Split.UNLABELLED: scenes(20, 21, 22),
        Split.VAL: scenes(30, 2, change=smaller),
        Split.TEST: lambda: iter(
            [*scenes(40, 41)(), *(Sample(f"t{s.id}", s.image, s.answer) for s in scenes(0, 1)())]
        ),
    }


def test_leaks_of_given_splits_are_named_or_left_out(tmp_path, caplog):
    with pytest.raises(DataError, match=r"2 samples leak .*0-96-.*in train is that of t0-96-"):
        prepare(leaking(), LABELS, SHARES, tmp_path / "no")
    with caplog.at_level(logging.WARNING):
        prepare(leaking(), LABELS, SHARES, tmp_path / "test", leaks="keep_test")
        prepare(leaking(), LABELS, SHARES, tmp_path / "train", leaks="keep_train")
    assert caplog.text.count("3 samples left out") == 2
    names = [{n.split("-")[0] for n in where(tmp_path / kept)} for kept in ("test", "train")]
    both = {str(i) for i in (*range(2, 10), 20, 21, 22, 30, 40, 41)}
    assert names == [both | {"t0", "t1"}, both | {"0", "1"}]


def test_a_picture_with_two_labels_is_a_warning(tmp_path, caplog):
    """Such a pair teaches nothing: it is named, also within a split."""

    def stream():
        yield from scenes(*range(20))()
        for sample in scenes(3, 4)():  # which are odd and even
            yield Sample(f"again-{sample.id}", sample.image, Answer(label="odd"))

    prepare({None: stream}, LABELS, SHARES, tmp_path)
    (record,) = caplog.records
    assert record.message.startswith("1 image has two labels (the image of 4-96-")


def test_pictures_that_are_only_alike_are_a_warning(tmp_path, caplog):
    splits = leaking() | {Split.TEST: scenes(40, 41)}
    prepare(splits, LABELS, SHARES, tmp_path / "set")
    (record,) = caplog.records
    said = "1 sample looks like one of another split (2-96-<lambda> in train looks like"
    assert said in record.message
    caplog.clear()
    prepare(splits, LABELS, SHARES, tmp_path / "drawn", near=False)
    assert not caplog.records


def test_files_are_kept_as_they_are(tmp_path):
    contents = []

    def stream():
        for number in range(30):
            buffer = io.BytesIO()
            exif = Image.Exif()
            exif[0x0112] = 1 + number % 8
            natural_picture(number).save(buffer, "JPEG", quality=80, exif=exif)
            contents.append(buffer.getvalue())
            image = decode_image(buffer.getvalue())
            yield Sample(f"{number}", image, Answer(label=LABELS[number % 2]))

    prepare({None: stream}, LABELS, SHARES, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.arrow"))
    assert size < 1.2 * sum(map(len, contents)) + 30_000
    for split in Split:
        shard = shards.open_shard(tmp_path / split)
        for place, sample in enumerate(shard):
            content = contents[int(sample.id)]
            assert shard.row(place)["images"][0]["bytes"] == content
            assert sample.image.tobytes() == decode_image(content).tobytes()


def test_the_division_is_by_id_and_stable():
    """And all questions about one image are in one split."""
    names = [f"s{i}" for i in range(600)]
    shares = {Split.TRAIN: 0.5, Split.UNLABELLED: 0.0, Split.VAL: 0.3, Split.TEST: 0.2}
    divided = [split_of(name, shares) for name in names]
    counts = [divided.count(split) for split in shares]
    assert counts == pytest.approx([300, 0, 180, 120], abs=40)
    assert [split_of(f"{name}#{i}", shares) for i, name in enumerate(names)] == divided
    assert [split_of(name, shares, seed=1) for name in names] != divided


def test_a_fixed_camera_is_no_copy():
    def pairs(*samples):
        found = Duplicates()
        for one in samples:
            found.add("all", one)
        return found.pairs()

    ground = natural_picture(3).resize((320, 240))

    def frame(number, x, side):
        image = ground.copy()
        image.paste((200, 40, 40), (x, 100, x + side, 100 + side))
        return Sample(f"frame{number}", image, Answer((Box(x, 100, x + side, 100 + side, "cat"),)))

    small = [frame(i, 10 + 24 * i, 16) for i in range(12)]
    assert pairs(*small) == []
    assert pairs(*(frame(i, 10 + 70 * i, 60) for i in range(4))) == []
    copy = Sample("copy", small[3].image.resize((160, 120)), Answer())
    assert [pair.first[1] for pair in pairs(*small, copy)] == ["frame3"]


def test_pairs_chain_to_groups():
    keys = [("all", name) for name in ("a#0", "b", "c#1", "d", "e")]
    equal = [Pair(keys[0], keys[1], equal=True), Pair(keys[1], keys[2], equal=False)]
    groups = groups_of([*equal, Pair(keys[3], keys[4], equal=False)])
    expected = {"a": "a", "b": "a", "c": "a", "d": "d", "e": "d"}
    assert groups == {("all", one): ("all", other) for one, other in expected.items()}
