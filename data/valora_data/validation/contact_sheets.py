"""Pictures of samples with what is known about them, side by side on one sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont, ImageOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Sample
    from valora_data.validation.inspection import Leak

CELL = 192
TEXT = 13
LINES = 3
MARGIN = 8
FRAMES = 4
"""Frames of a sample that are shown at most."""
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def contact_sheet(samples: Sequence[Sample], columns: int = 6) -> Image.Image:
    """A sheet of samples: frames in one cell, boxes drawn, question and answer below.

    Args:
        samples: What to show, at least one.
        columns: Cells per row.
    """
    cells = [_cell(sample) for sample in samples]
    return _grid(cells, min(columns, len(cells)))


def leak_sheet(leaks: Sequence[Leak]) -> Image.Image:
    """Pairs of pictures that two splits share, at least one of them with pictures."""
    cells = []
    for leak in leaks:
        if leak.pictures is None:
            continue
        cell = Image.new("RGB", (CELL, CELL + LINES * (TEXT + 3)), "white")
        for place, picture in enumerate(leak.pictures):
            half = ImageOps.contain(picture, (CELL // 2 - 2, CELL))
            cell.paste(half, (place * CELL // 2, 0))
        how = "equal" if leak.exact else "look the same"
        _write(cell, [f"{split}: {name}" for split, name in (leak.first, leak.second)] + [how])
        cells.append(cell)
    return _grid(cells, min(6, len(cells)))


def answer_text(sample: Sample) -> str:
    """What is known about a sample in one line."""
    answer = sample.answer
    if answer.choice is not None:
        share = max(answer.soft, default=None) if answer.soft else None
        return answer.choice if share is None else f"{answer.choice} ({share:.2f})"
    if answer.captions:
        return answer.captions[0]
    if answer.boxes:
        labels = [box.label for box in answer.boxes]
        return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))
    return "–"


def _cell(sample: Sample) -> Image.Image:
    cell = Image.new("RGB", (CELL, CELL + LINES * (TEXT + 3)), "white")
    shown = sample.images[:FRAMES]
    across = 1 if len(shown) == 1 else 2
    side = CELL // across
    for place, image in enumerate(shown):
        picture = ImageOps.contain(image.convert("RGB"), (side, side))
        corner = (place % across * side, place // across * side)
        cell.paste(picture, corner)
        if place == 0:
            _boxes(cell, sample, corner, picture.width / image.width)
    lines = [sample.id, *([sample.prompt] if sample.prompt else [])]
    if {box.label for box in sample.answer.boxes} != {sample.prompt}:
        lines.append(answer_text(sample))
    _write(cell, lines)
    return cell


def _boxes(cell: Image.Image, sample: Sample, corner: tuple[int, int], scale: float) -> None:
    pen = ImageDraw.Draw(cell)
    labels = list(dict.fromkeys(box.label for box in sample.answer.boxes))
    for box in sample.answer.boxes:
        x0, y0, x1, y1 = (edge * scale for edge in box.xyxy)
        edges = (corner[0] + x0, corner[1] + y0, corner[0] + x1 - 1, corner[1] + y1 - 1)
        pen.rectangle(edges, outline=COLOURS[labels.index(box.label) % len(COLOURS)], width=2)


def _write(cell: Image.Image, lines: Sequence[str]) -> None:
    pen, font = ImageDraw.Draw(cell), ImageFont.load_default(TEXT)
    for place, line in enumerate(lines[:LINES]):
        text = line
        while text and pen.textlength(text, font) > CELL - 4:
            text = text[:-2].rstrip("…") + "…"
        pen.text((2, CELL + place * (TEXT + 3)), text, fill="black", font=font)


def _grid(cells: Sequence[Image.Image], columns: int) -> Image.Image:
    width, height = cells[0].size
    rows = -(-len(cells) // columns)
    size = (columns * (width + MARGIN) + MARGIN, rows * (height + MARGIN) + MARGIN)
    sheet = Image.new("RGB", size, "#dddddd")
    for place, cell in enumerate(cells):
        x, y = place % columns, place // columns
        sheet.paste(cell, (MARGIN + x * (width + MARGIN), MARGIN + y * (height + MARGIN)))
    return sheet
