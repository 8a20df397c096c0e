"""Pictures for people: images with boxes, the accuracy heat map, the packing timeline."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from valora_data.schema import Answer, Box, Domain, Sample
    from valora_train.fusion.decision import Decision

SCALE = 2
TILE = 192  # pixels
LINE, MOST_LINES, LETTERS = 12, 5, 32  # of text below a tile
MARK = {"committed": "#2e7d32", "rolled back": "#c62828", "unreachable": "#6a1b9a"}


def contact_sheet(
    samples: Sequence[Sample], found: Sequence[Sequence[Box]], threshold: float, columns: int = 4
) -> Image.Image:
    """Images side by side: the truth in white, what was found in green with its confidence.

    Args:
        samples: Images with the truth.
        found: Detections of each.
        threshold: Confidence from which a detection is drawn.
        columns: Images per row.
    """
    tiles = []
    for sample, boxes in zip(samples, found, strict=True):
        tile = sample.image.resize((sample.image.width * SCALE, sample.image.height * SCALE))
        draw = ImageDraw.Draw(tile)
        for box in sample.answer.boxes:
            draw.rectangle([edge * SCALE for edge in box.xyxy], outline="white")
        for box in boxes:
            if box.confidence >= threshold:
                draw.rectangle([edge * SCALE for edge in box.xyxy], outline="#00e676", width=2)
                corner = (box.x0 * SCALE + 3, box.y0 * SCALE + 1)
                draw.text(corner, f"{box.confidence:.2f}", fill="#00e676", stroke_width=1,
                          stroke_fill="black")  # fmt: skip
        tiles.append(tile)
    return _sheet(tiles, columns)


def answer_sheet(
    samples: Sequence[Sample], said: Sequence[Answer], domain: Domain, columns: int = 4
) -> Image.Image:
    """Images side by side, with what was asked and answered; what is wrong also with the truth.

    Args:
        samples: Images or frames with the truth.
        said: The answer to each.
        domain: Says what was asked.
        columns: Images per row.
    """
    tiles = []
    for sample, answer in zip(samples, said, strict=True):
        strip = _strip(sample)
        draw = ImageDraw.Draw(strip)
        scale = strip.height / sample.image.height
        for boxes, colour in ((sample.answer.boxes, "white"), (answer.boxes[:1], "#00e676")):
            for box in boxes:
                draw.rectangle([edge * scale for edge in box.xyxy], outline=colour, width=2)
        lines = [(domain.question(sample), "white")] if sample.prompt is not None else []
        given, true = _words(answer), _words(sample.answer)
        right = _right(answer, sample.answer)
        lines.append((given or "–", "#00e676" if right else "#ff5252"))
        lines += [] if right else [(true, "#b0b0b0")]
        tiles.append(_with_lines(strip, lines))
    return _sheet(tiles, columns)


def _strip(sample: Sample) -> Image.Image:
    """An image, or up to four frames in a square."""
    images = sample.images
    side = TILE if len(images) == 1 else TILE // 2
    shown = [images[round(i * (len(images) - 1) / max(1, min(4, len(images)) - 1))]
             for i in range(min(4, len(images)))]  # fmt: skip
    strip = Image.new("RGB", (TILE, TILE), "#202020")
    for place, image in enumerate(shown):
        strip.paste(image.resize((side, side)), (place % 2 * side, place // 2 * side))
    return strip


def _words(answer: Answer) -> str:
    boxes = "".join(f"({b.x0:.0f}, {b.y0:.0f}, {b.x1:.0f}, {b.y1:.0f})" for b in answer.boxes[:1])
    return answer.choice or next(iter(answer.captions), "") or boxes


def _right(answer: Answer, truth: Answer) -> bool:
    if not truth.boxes:
        return _words(answer) == _words(truth) or _words(answer) in truth.captions
    found, meant = answer.boxes[:1], truth.boxes[0]
    return any(_overlap(box, meant) >= 0.5 for box in found)


def _overlap(one: Box, other: Box) -> float:
    """Intersection over union."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (one.area + other.area - shared)


def _with_lines(tile: Image.Image, lines: Sequence[tuple[str, str]]) -> Image.Image:
    """A tile with a few lines of text below it."""
    rows = [(part, colour) for text, colour in lines for part in wrap(text, LETTERS)[:2]]
    taller = Image.new("RGB", (tile.width, tile.height + LINE * MOST_LINES), "#202020")
    taller.paste(tile)
    draw = ImageDraw.Draw(taller)
    for number, (text, colour) in enumerate(rows[:MOST_LINES]):
        draw.text((2, tile.height + LINE * number), text, fill=colour)
    return taller


def _sheet(tiles: Sequence[Image.Image], columns: int) -> Image.Image:
    width, height = tiles[0].size
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + 4)), "#202020")
    for index, tile in enumerate(tiles):
        at = (index % columns * (width + 4) + 2, index // columns * (height + 4) + 2)
        sheet.paste(tile.resize((width, height)), at)
    return sheet


def heat_map(decisions: Sequence[Decision], required: Mapping[str, float]) -> Figure:
    """Accuracy of every domain after every attempt, minus its requirement."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    names = list(required)
    margin = np.full((len(names), len(decisions)), np.nan)
    figure = Figure(figsize=(2.6 + 0.95 * len(decisions), 1.4 + 0.55 * len(names)), dpi=110)
    axes = figure.add_subplot()
    for column, decision in enumerate(decisions):
        for name, accuracy in decision.accuracy.items():
            row = names.index(name)
            margin[row, column] = accuracy - required[name]
            weight = "bold" if name in decision.below else "normal"
            axes.text(column, row, f"{accuracy:.3f}", ha="center", va="center", weight=weight)
    norm = TwoSlopeNorm(0.0, vmin=-0.15, vmax=0.15)
    picture = axes.imshow(margin, cmap="RdYlGn", norm=norm, aspect="auto")
    axes.set_yticks(range(len(names)), [f"{name} ≥ {required[name]:.2f}" for name in names])
    axes.set_xticks(
        range(len(decisions)),
        [
            f"{decision.attempt.number:02d} {decision.attempt.domain}\n"
            f"→ {decision.attempt.adapter}\n{decision.verdict}"
            for decision in decisions
        ],
        fontsize=7,
    )
    for tick, decision in zip(axes.get_xticklabels(), decisions, strict=True):
        tick.set_color(MARK[decision.verdict])
    axes.set_title("Validation accuracy after each attempt (colour: above or below requirement)")
    figure.colorbar(picture, ax=axes, label="accuracy − required")
    figure.tight_layout()
    return figure


def packing_timeline(decisions: Sequence[Decision], seconds: Sequence[float]) -> Figure:
    """Which adapter was trained when, on what, and how that ended."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    adapters = sorted({decision.attempt.adapter for decision in decisions}, reverse=True)
    figure = Figure(figsize=(11, 1.6 + 0.7 * len(adapters)), dpi=110)
    axes = figure.add_subplot()
    start = 0.0
    for decision, took in zip(decisions, seconds, strict=True):
        row = adapters.index(decision.attempt.adapter)
        axes.barh(row, took, left=start, color=MARK[decision.verdict], edgecolor="white")
        axes.text(start + took / 2, row, decision.attempt.domain, ha="center", va="center",
                  color="white", fontsize=8, rotation=20)  # fmt: skip
        start += took
    axes.set_yticks(range(len(adapters)), adapters)
    axes.set_xlabel("seconds of fusion")
    axes.set_title("Packing timeline")
    axes.legend(
        handles=[Patch(color=color, label=verdict) for verdict, color in MARK.items()],
        loc="upper left", bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
    figure.tight_layout()
    return figure
