"""Copies of a picture: equal, resized, recompressed or mirrored; and what is none."""

import io

import pytest
from PIL import Image, ImageOps

from tests.support.data_sets import natural_picture
from valora_data.duplicates import Duplicates, Pair, groups_of
from valora_data.schema import Answer, Box, Sample


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
