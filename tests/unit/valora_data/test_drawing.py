"""Drawing: nothing is distorted, boxes are where they belong, text is cut where it must be."""

import numpy as np
from PIL import Image

from valora_data.drawing import add_caption, arrange, draw_boxes, fit_into_tile
from valora_data.schema import Box


def bounds(image, colour):
    """Left, top, right and bottom of the pixels of a colour."""
    rows, columns = np.nonzero((np.asarray(image) == colour).all(axis=2))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_an_image_is_fitted_without_distortion():
    tile, scale = fit_into_tile([Image.new("RGB", (120, 60), "red")], 240, "black")
    assert scale == 2
    assert bounds(tile, (255, 0, 0)) == (0, 0, 240, 120)


def test_of_a_video_the_first_and_the_last_frame_are_shown():
    frames = [Image.new("RGB", (40, 40), (50 * n, 0, 255)) for n in range(6)]
    tile, scale = fit_into_tile(frames, 80, "black")
    assert scale == 1
    assert bounds(tile, (0, 0, 255)) == (0, 0, 40, 40)
    assert bounds(tile, (250, 0, 255)) == (40, 40, 80, 80)
    pair, _ = fit_into_tile(frames[:2], 80, "black")
    assert bounds(pair, (50, 0, 255)) == (40, 0, 80, 40)


def test_boxes_are_drawn_to_scale_with_their_labels_above():
    boxes = [Box(10, 20, 30, 40, "cat"), Box(50, 50, 90, 80, "dog")]
    tile = Image.new("RGB", (200, 200), "black")
    drawn = draw_boxes(tile, boxes, 2.0, ["#00ff00", "#ff0000"])
    assert np.abs(np.subtract(bounds(drawn, (0, 255, 0)), (20, 40, 60, 80))).max() <= 2
    assert np.abs(np.subtract(bounds(drawn, (255, 0, 0)), (100, 100, 180, 160))).max() <= 2
    with_text = draw_boxes(tile, boxes, 2.0, ["#00ff00", "#ff0000"], ["0.91", "0.42"])
    assert bounds(with_text, (255, 0, 0))[1] < 95
    assert draw_boxes(tile, [], 2.0, []) is tile


def test_a_caption_keeps_to_its_rows():
    tile = Image.new("RGB", (96, 96), "black")
    long = "what is the animal on the left of the tree doing"
    one = add_caption(tile, [(long, "#ff0000"), ("yes", "#00ff00")], 2, "black")
    assert one.size == (96, 96 + 2 * 12)

    green = np.asarray(one)[..., 1] > 128
    assert not green[: 96 + 12].any()
    assert green[96 + 12 :].any()
    wrapped = add_caption(tile, [(long, "#ff0000"), ("yes", "#00ff00")], 2, "black", 2)
    assert not (np.asarray(wrapped)[..., 1] > 128).any()  # the first line fills both rows


def test_tiles_are_arranged_row_by_row():
    tiles = [Image.new("RGB", (10, 20), colour) for colour in ("red", "lime", "blue")]
    sheet = arrange(tiles, 2, 4, "black")
    assert sheet.size == (2 * 14 + 4, 2 * 24 + 4)
    assert bounds(sheet, (0, 255, 0)) == (18, 4, 28, 24)
    assert bounds(sheet, (0, 0, 255)) == (4, 28, 14, 48)
