"""Copies of a picture: equal, resized, recompressed or mirrored; and what is none."""

import io
from contextlib import nullcontext

import pytest
from PIL import Image, ImageOps

from tests.support.data_sets import check_no_leak, natural_picture
from valora_data.duplicates import Duplicates, Pair, groups_of
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Split


def sample(name, level):
    return Sample(name, Image.new("RGB", (4, 4), (level, 0, 0)), Answer())


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([sample("a", 1), sample("b", 2)], [sample("c", 3)], None),
        ([sample("a", 1), sample("b", 1)], [], None),
        ([sample("a", 1)], [sample("a", 2)], "1 sample leaks .*id a is in train and val"),
        ([sample("a", 1)], [sample("b", 1)], "the image of a in train is that of b in val.*keep"),
        ([sample(str(i), i) for i in range(14)],) * 2 + ("14 samples leak .*; and 4 more",),
    ],
)
def test_equal_images_and_ids_in_two_splits(train, val, message):
    with pytest.raises(DataError, match=message) if message else nullcontext() as caught:
        check_no_leak({Split.TRAIN: train, Split.VAL: val})
    assert caught is None or str(caught.value).count("is in train and val") <= 10


def pairs(*samples):
    found = Duplicates()
    for one in samples:
        found.add("all", one)
    return found.pairs()


def test_a_fixed_camera_is_no_copy():
    """What moves in front of it differs."""
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


@pytest.mark.parametrize("flip", [False, True])
def test_a_copy_with_other_labels_is_a_copy(flip):
    """The same photograph, recompressed, that another person labelled."""
    image = natural_picture(5).resize((200, 100))
    one = Sample("one", image, Answer((Box(10, 20, 50, 60, "cat"), Box(90, 5, 120, 30, "dog"))))
    file = io.BytesIO()
    (ImageOps.mirror(image) if flip else image).save(file, "JPEG", quality=80)
    two = Sample("two", Image.open(file).convert("RGB"), Answer((Box(60, 50, 99, 95, "cat"),)))
    assert len(pairs(one, two)) == 1


def test_pairs_chain_to_groups():
    keys = [("all", name) for name in ("a#0", "b", "c#1", "d", "e")]
    equal = [Pair(keys[0], keys[1], equal=True), Pair(keys[1], keys[2], equal=False)]
    groups = groups_of([*equal, Pair(keys[3], keys[4], equal=False)])
    expected = {"a": "a", "b": "a", "c": "a", "d": "d", "e": "d"}
    assert groups == {("all", one): ("all", other) for one, other in expected.items()}
