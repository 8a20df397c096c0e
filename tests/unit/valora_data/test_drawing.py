"""Drawing: nothing is distorted, boxes are where they belong, text is cut where it must be."""

import numpy as np
import pytest
from PIL import Image

from valora_data.drawing import draw_boxes, show_photograph, widen
from valora_data.schema import Box

GREEN, RED = (0, 255, 0), (255, 0, 0)


def new(size, colour="black"):
    return Image.new("RGB", size, colour)


def bounds(image, colour):
    """Left, top, right and bottom of the pixels of a colour."""
    rows, columns = np.nonzero((np.asarray(image) == colour).all(axis=2))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_boxes_are_drawn_to_scale_with_their_labels_above():
    boxes = [Box(10, 20, 30, 40, "cat"), Box(50, 50, 90, 80, "dog")]
    drawn = draw_boxes(new((200, 200)), boxes, 2.0, ["#00ff00", "#ff0000"])
    assert np.abs(np.subtract(bounds(drawn, GREEN), (20, 40, 60, 80))).max() <= 2
    assert np.abs(np.subtract(bounds(drawn, RED), (100, 100, 180, 160))).max() <= 2
    colours, labels = ["#00ff00", "#ff0000"], ["0.91", "0.42"]
    assert bounds(draw_boxes(new((200, 200)), boxes, 2.0, colours, labels), RED)[1] < 95
    long, cut = (
        draw_boxes(new((60, 200)), [Box(5, 50, 50, 150, "x")], 1.0, ["#00ff00"], [text])
        for text in ("0.93 a_very_long_name_of_a_class", "0.93 a_v…")
    )
    assert long.tobytes() == cut.tobytes()


@pytest.mark.parametrize("size", [(500, 3000), (3000, 500), (640, 480), (8, 8), (20, 4000)])
def test_photographs_of_any_shape_are_large_and_not_distorted(size):
    shown, scale = show_photograph([new(size)], 256)
    assert np.abs(np.subtract(shown.size, np.multiply(size, scale))).max() <= 0.5
    assert max(shown.size) <= 3 * 256
    if max(size) / min(size) < 9:
        assert shown.width * shown.height == pytest.approx(256 * 256, rel=0.03)
        assert min(shown.size) > 100
    assert widen(shown, 300, "black").width == max(300, shown.width)
