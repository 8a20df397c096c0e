"""Draws samples for people: images with boxes, captions, sheets of tiles."""

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from valora_data.schema import Answer, Box, Sample

TILE = 192
CAPTION_ROWS, GAP = 3, 8
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")
MAX_FRAMES = 4
MAX_STRETCH = 3  # longest side of a photograph, in sides of a square of the same area
LETTER_WIDTH, ROW_HEIGHT = 6, 12  # of Pillow's default font
LABEL_SIZE = 12


def show_photograph(images: Sequence[Image.Image], side: int) -> tuple[Image.Image, float]:
    """An image, or up to four frames, at the area of a square, and the scale of the first."""
    if len(images) == 1:
        width, height = images[0].size
        scale = min(side / math.sqrt(width * height), MAX_STRETCH * side / max(width, height))
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        return images[0].convert("RGB").resize(size, Image.Resampling.LANCZOS), scale
    count = min(MAX_FRAMES, len(images))
    shown = [images[round(i * (len(images) - 1) / (count - 1))] for i in range(count)]
    cell = side // 2
    tile = Image.new("RGB", (side, side), "black")
    for index, image in enumerate(shown):
        fitted = ImageOps.contain(image.convert("RGB"), (cell, cell))
        tile.paste(fitted, (index % 2 * cell, index // 2 * cell))
    return tile, cell / max(shown[0].size)


def widen(tile: Image.Image, width: int, background: str) -> Image.Image:
    """Give a narrow image a border on the right, so that text below it has room."""
    return ImageOps.expand(tile, (0, 0, max(0, width - tile.width), 0), background)


def draw_boxes(
    tile: Image.Image, boxes: Sequence[Box], scale: float, colours: Sequence[str],
    labels: Sequence[str] | None = None, *, below: bool = False,
) -> Image.Image:  # fmt: skip
    """Draw boxes of the unscaled image with a dark edge, and labels that stay inside it."""
    drawn, font = tile.copy(), ImageFont.load_default(LABEL_SIZE)
    draw = ImageDraw.Draw(drawn)
    edges = [tuple(edge * scale for edge in box.xyxy) for box in boxes]
    for x0, y0, x1, y1 in edges:  # a dark edge makes light boxes visible on light photographs
        draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline="black", width=4)
    for box, colour in zip(edges, colours, strict=True):
        draw.rectangle(box, outline=colour, width=2)
    for (x0, y0, _, y1), colour, text in zip(edges, colours, labels or (), strict=False):
        cut = _cut(text, tile.width - 2)
        x = max(0.0, min(x0, tile.width - font.getlength(cut) - 1))
        y = max(0.0, min(y1 if below else y0 - LABEL_SIZE - 3, tile.height - LABEL_SIZE - 3.0))
        draw.rectangle((x, y, x + font.getlength(cut), y + LABEL_SIZE + 2), fill=colour)
        draw.text((x, y), cut, "black", font)
    return drawn


def _cut(text: str, room: int) -> str:
    font = ImageFont.load_default(LABEL_SIZE)
    shorter = (f"{text[:end]}…" for end in range(len(text) - 1, -1, -1))
    return next((cut for cut in (text, *shorter) if font.getlength(cut) <= room), "…")


def add_caption(
    tile: Image.Image, lines: Sequence[tuple[str, str]], rows: int, background: str,
    rows_per_line: int = 1,
) -> Image.Image:  # fmt: skip
    """Put lines of text and their colours below an image, cut to some rows each and in all."""
    width = tile.width // LETTER_WIDTH
    wrapped = [
        (row, colour)
        for text, colour in lines
        for row in textwrap.wrap(text, width, max_lines=rows_per_line, placeholder="…")
    ]
    taller = ImageOps.expand(tile, (0, 0, 0, ROW_HEIGHT * rows), background)
    draw, font = ImageDraw.Draw(taller), ImageFont.load_default()
    for number, (row, colour) in enumerate(wrapped[:rows]):
        draw.text((2, tile.height + ROW_HEIGHT * number), row, fill=colour, font=font)
    return taller


def arrange(tiles: Sequence[Image.Image], columns: int, gap: int, background: str) -> Image.Image:
    """Arrange tiles row by row on a sheet, `columns` of the narrowest in a row."""
    narrowest, widest = (pick(tile.width for tile in tiles) for pick in (min, max))
    width = max(columns * (narrowest + gap), widest + gap) + gap
    corners, left, top, tallest = [], gap, gap, 0
    for tile in tiles:
        if left > gap and left + tile.width + gap > width:
            left, top, tallest = gap, top + tallest + gap, 0
        corners.append((left, top))
        left, tallest = left + tile.width + gap, max(tallest, tile.height)
    sheet = Image.new("RGB", (width, top + tallest + gap), background)
    for tile, corner in zip(tiles, corners, strict=True):
        sheet.paste(tile, corner)
    return sheet


def contact_sheet(samples: Sequence[Sample]) -> Image.Image:
    """A sheet of samples: image or frames with the true boxes, question and answer below."""
    labels = sorted({box.label for sample in samples for box in sample.answer.boxes})
    colours = dict(zip(labels, itertools.cycle(COLOURS), strict=False))
    tiles = []
    for sample in samples:
        tile, scale = show_photograph(sample.images or (sample.image,), TILE)
        boxes, lines = sample.answer.boxes, [sample.id, *filter(None, [sample.prompt])]
        if {box.label for box in boxes} != {sample.prompt}:
            lines.append(_answer_text(sample.answer))
        tile = draw_boxes(tile, boxes, scale, [colours[box.label] for box in boxes])
        captions = [(line, "black") for line in lines]
        tiles.append(add_caption(widen(tile, TILE, "white"), captions, CAPTION_ROWS, "white"))
    sheet = arrange(tiles, min(6, len(tiles)), GAP, "#dddddd")
    if len(colours) > len(COLOURS):  # phrases instead of classes
        return sheet
    return add_caption(sheet, list(colours.items()), len(colours), "white")


def _answer_text(answer: Answer) -> str:
    if answer.choice is not None:
        return answer.choice + (f" ({max(answer.soft):.2f})" if answer.soft else "")
    counts = Counter(box.label for box in answer.boxes)
    words = [*answer.captions[:1], *(f"{count} {label}" for label, count in counts.items())]
    return ", ".join(words) or "–"
