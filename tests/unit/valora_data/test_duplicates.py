"""Copies of a picture: equal, resized, recompressed or mirrored; and what is none."""

from tests.support.data_sets import natural_picture
from valora_data.duplicates import Duplicates, Pair, groups_of
from valora_data.schema import Answer, Box, Sample


def pairs(*samples):
    found = Duplicates()
    for one in samples:
        found.add("all", one)
    return found.pairs()


def test_a_fixed_camera_is_no_copy():
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
