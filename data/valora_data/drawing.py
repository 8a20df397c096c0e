"""Draws samples for people: images with boxes, captions below them, tiles side by side on a sheet.

Boxes and their labels are drawn by supervision, which the training extra installs; nothing that
serves imports this module.
"""

from __future__ import annotations

import textwrap
import warnings
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Box

MAX_FRAMES = 4
LETTER_WIDTH, ROW_HEIGHT = 6, 12  # pixels of Pillow's default font


def fit_into_tile(
    images: Sequence[Image.Image], side: int, background: str
) -> tuple[Image.Image, float]:
    """Fit an image, or some frames of a video, into a square tile without distorting them.

    Args:
        images: The image, or the frames; at most four frames are shown, the first and the last
            among them.
        side: Width and height of the tile in pixels.
        background: Colour of what the images leave free.

    Returns:
        The tile, and the scale at which the first image, in the upper left corner, is shown.
    """
    count = min(MAX_FRAMES, len(images))
    shown = [images[round(i * (len(images) - 1) / max(1, count - 1))] for i in range(count)]
    across = 1 if count == 1 else 2
    cell = side // across
    tile = Image.new("RGB", (side, side), background)
    for place, image in enumerate(shown):
        fitted = ImageOps.contain(image.convert("RGB"), (cell, cell))
        tile.paste(fitted, (place % across * cell, place // across * cell))
    return tile, cell / max(shown[0].size)


def draw_boxes(
    tile: Image.Image,
    boxes: Sequence[Box],
    scale: float,
    colours: Sequence[str],
    labels: Sequence[str] | None = None,
) -> Image.Image:
    """Draw boxes on an image.

    Args:
        tile: The image to draw on.
        boxes: Boxes in pixels of the image before it was scaled.
        scale: Factor by which the image was scaled.
        colours: Colour of each box.
        labels: Text above each box; None for no text.

    Returns:
        The image with the boxes.
    """
    if not boxes:
        return tile
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OpenCV .* is not installed")
        import supervision as sv

    detections = sv.Detections(
        xyxy=np.array([box.xyxy for box in boxes], dtype=np.float64) * scale,
        class_id=np.arange(len(boxes)),
    )
    palette = sv.ColorPalette.from_hex(list(colours))
    drawn = sv.BoxAnnotator(palette, thickness=2).annotate(tile, detections)
    if labels is not None:
        annotator = sv.RichLabelAnnotator(
            palette, text_color=sv.Color.BLACK, font_size=10, text_padding=1
        )
        drawn = annotator.annotate(drawn, detections, labels=list(labels))
    return drawn


def add_caption(
    tile: Image.Image,
    lines: Sequence[tuple[str, str]],
    rows: int,
    background: str,
    rows_per_line: int = 1,
) -> Image.Image:
    """Put lines of text below an image; what does not fit is cut with an ellipsis.

    Args:
        tile: The image.
        lines: Text and colour of each line.
        rows: Rows of text that there is space for.
        background: Colour behind the text.
        rows_per_line: Rows that a line may be wrapped to.
    """
    width = tile.width // LETTER_WIDTH
    wrapped = [
        (row, colour)
        for text, colour in lines
        for row in textwrap.wrap(text, width, max_lines=rows_per_line, placeholder="…")
    ]
    taller = Image.new("RGB", (tile.width, tile.height + ROW_HEIGHT * rows), background)
    taller.paste(tile)
    draw, font = ImageDraw.Draw(taller), ImageFont.load_default()
    for number, (row, colour) in enumerate(wrapped[:rows]):
        draw.text((2, tile.height + ROW_HEIGHT * number), row, fill=colour, font=font)
    return taller


def arrange(tiles: Sequence[Image.Image], columns: int, gap: int, background: str) -> Image.Image:
    """Arrange tiles of one size row by row on a sheet.

    Args:
        tiles: At least one.
        columns: Tiles per row.
        gap: Pixels between tiles and around the sheet.
        background: Colour of the gaps.
    """
    width, height = tiles[0].width + gap, tiles[0].height + gap
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * width + gap, rows * height + gap), background)
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (gap + place % columns * width, gap + place // columns * height))
    return sheet
