"""Boxes as text survive resizing, in both conventions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valora_data.schema import Box
from valora_train.tasks.language import read_boxes, write_box

SIDES = st.integers(28, 2000)


@given(SIDES, SIDES, SIDES, SIDES, st.data())
def test_round_trip_through_resizing(width, height, seen_width, seen_height, data):
    size, seen = (width, height), (seen_width, seen_height)
    x0 = data.draw(st.floats(0, width * 0.6))
    y0 = data.draw(st.floats(0, height * 0.6))
    x1, y1 = x0 + width * 0.3, y0 + height * 0.35
    box = Box(x0, y0, x1, y1, "a red thing")
    for convention, grid in (("grid1000", (1000, 1000)), ("pixels", seen)):
        text = write_box(box, size, seen, convention)
        (back,) = read_boxes(f"see {text} there", size, seen, convention)
        assert back.label == "a red thing"
        for edge, other, full, cells in zip(
            back.xyxy, box.xyxy, (*size, *size), (*grid, *grid), strict=True
        ):
            assert abs(edge - other) <= 0.5 * full / cells + 1e-6


@pytest.mark.parametrize(
    ("size", "seen", "convention", "step", "expected"),
    [
        (100, (50, 50), "grid1000", 1, "(120,80),(360,300)"),
        (100, (50, 200), "pixels", 1, "(6,16),(18,60)"),
        (97, (50, 50), "grid1000", 10, "(120,80),(370,310)"),
    ],
)
def test_as_qwen_writes_it(size, seen, convention, step, expected):
    text = write_box(Box(12, 8, 36, 30, "cat"), (size, size), seen, convention, step)
    assert text == f"<ref>cat</ref><box>{expected}</box>"


def test_what_is_no_box_is_left_out_and_what_is_outside_brought_inside():
    for bad in ("", "no box", "<box>(1,2)</box>", "<box>(300,1),(200,9)</box>", "<box>(a,b),(c,d)"):
        assert read_boxes(bad, (100, 100), (100, 100), "grid1000") == []
    (box,) = read_boxes("<box>(-5,0),(2000,500)</box>", (80, 40), (1, 1), "grid1000")
    assert (box.xyxy, box.label) == ((0, 0, 80, 20), "")
