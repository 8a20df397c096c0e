"""Draws samples for people: images with boxes, captions below them, tiles side by side on a sheet.

Boxes and their labels are drawn by supervision, which the training extra installs; nothing that
serves imports this module. Sizes are in pixels.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Box

MAX_FRAMES = 4
MAX_STRETCH = 3  # longest side of a photograph, in sides of a square of the same area
LETTER_WIDTH, ROW_HEIGHT = 6, 12  # of Pillow's default font
LABEL_SIZE, LABEL_PADDING = 12, 2
LEGEND_ROW, LEGEND_GAP = 18, 8


def show_photograph(images: Sequence[Image.Image], side: int) -> tuple[Image.Image, float]:
    """Scale an image to the area of a square, so that panoramas and portraits stay readable.

    Of a video's frames up to four are shown in a square, the first and the last among them.

    Returns:
        The picture, and the scale at which the image, or the first frame, is shown in its upper
        left corner.
    """
    if len(images) == 1:
        width, height = images[0].size
        scale = min(side / math.sqrt(width * height), MAX_STRETCH * side / max(width, height))
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        return images[0].convert("RGB").resize(size, Image.Resampling.LANCZOS), scale
    count = min(MAX_FRAMES, len(images))
    shown = [images[round(i * (len(images) - 1) / (count - 1))] for i in range(count)]
    cell = side // 2
    tile = Image.new("RGB", (side, side), "black")
    for place, image in enumerate(shown):
        fitted = ImageOps.contain(image.convert("RGB"), (cell, cell))
        tile.paste(fitted, (place % 2 * cell, place // 2 * cell))
    return tile, cell / max(shown[0].size)


def widen(tile: Image.Image, width: int, background: str) -> Image.Image:
    """Give a narrow image a border on the right, so that text below it has room."""
    wider = Image.new("RGB", (max(width, tile.width), tile.height), background)
    wider.paste(tile)
    return wider


def draw_boxes(
    tile: Image.Image,
    boxes: Sequence[Box],
    scale: float,
    colours: Sequence[str],
    labels: Sequence[str] | None = None,
    *,
    below: bool = False,
) -> Image.Image:
    """Draw boxes with a dark edge on an image, and labels that stay inside the image.

    Args:
        tile: The image to draw on.
        boxes: Boxes in pixels of the image before it was scaled.
        scale: Factor by which the image was scaled.
        colours: Colour of each box.
        labels: Text above each box, cut to the width of the image; None for no text.
        below: Whether the text is below each box instead.
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
    # A dark edge makes light boxes visible on light photographs.
    drawn = sv.BoxAnnotator(sv.Color.BLACK, thickness=4).annotate(tile.copy(), detections)
    drawn = sv.BoxAnnotator(palette, thickness=2).annotate(drawn, detections)
    if labels is not None:
        annotator = sv.RichLabelAnnotator(
            palette,
            text_color=sv.Color.BLACK,
            font_size=LABEL_SIZE,
            text_padding=LABEL_PADDING,
            text_position=sv.Position.BOTTOM_LEFT if below else sv.Position.TOP_LEFT,
            smart_position=True,  # inside the image, and apart from each other
        )
        room = tile.width - 2 * LABEL_PADDING - 1
        drawn = annotator.annotate(drawn, detections, [_cut(text, room) for text in labels])
    return drawn


def _cut(text: str, room: int) -> str:
    """Shorten a label to a width."""
    font = ImageFont.load_default(LABEL_SIZE)
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}…") > room:
        text = text[:-1]
    return f"{text}…"


def add_legend(
    sheet: Image.Image, entries: Sequence[tuple[str, str]], background: str, text: str
) -> Image.Image:
    """Put a legend above a sheet: a coloured square for each meaning and colour, then the words."""
    font = ImageFont.load_default(LABEL_SIZE)
    places, left, row = [], LEGEND_GAP, 0
    for meaning, _ in entries:
        wide = LEGEND_ROW + int(font.getlength(meaning)) + LEGEND_GAP
        if left > LEGEND_GAP and left + wide > sheet.width:
            left, row = LEGEND_GAP, row + 1
        places.append((left, LEGEND_GAP // 2 + row * LEGEND_ROW))
        left += wide + LEGEND_GAP
    height = LEGEND_GAP + (row + 1) * LEGEND_ROW
    taller = Image.new("RGB", (sheet.width, sheet.height + height), background)
    taller.paste(sheet, (0, height))
    draw = ImageDraw.Draw(taller)
    for (x, y), (meaning, colour) in zip(places, entries, strict=True):
        square = LEGEND_ROW - 6
        draw.rectangle((x, y + 2, x + square, y + 2 + square), fill=colour, outline="black")
        draw.text((x + LEGEND_ROW, y), meaning, fill=text, font=font)
    return taller


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
    """Arrange tiles row by row on a sheet, `columns` of the narrowest in a row."""
    narrowest, widest = (pick(tile.width for tile in tiles) for pick in (min, max))
    width = max(columns * (narrowest + gap), widest + gap) + gap
    places, left, top, tallest = [], gap, gap, 0
    for tile in tiles:
        if left > gap and left + tile.width + gap > width:
            left, top, tallest = gap, top + tallest + gap, 0
        places.append((left, top))
        left, tallest = left + tile.width + gap, max(tallest, tile.height)
    sheet = Image.new("RGB", (width, top + tallest + gap), background)
    for tile, place in zip(tiles, places, strict=True):
        sheet.paste(tile, place)
    return sheet
