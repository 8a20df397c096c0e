"""Contact sheets: samples with their true answers, and pairs that two splits share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.drawing import add_caption, arrange, draw_boxes, fit_into_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from valora_data.schema import Sample
    from valora_data.validation.inspection import Leak

TILE = 192  # pixels
CAPTION_ROWS = 3
GAP = 8  # pixels
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def contact_sheet(samples: Sequence[Sample], columns: int = 6) -> Image:
    """A sheet of samples: image or frames with the true boxes, question and answer below.

    Args:
        samples: The samples to show, at least one.
        columns: Tiles per row.
    """
    tiles = [_tile(sample) for sample in samples]
    return arrange(tiles, min(columns, len(tiles)), GAP, "#dddddd")


def leak_sheet(leaks: Sequence[Leak]) -> Image:
    """A sheet of pairs of pictures that two splits share.

    Args:
        leaks: The pairs, at least one of them with pictures; pairs without are left out.
    """
    tiles = []
    for leak in leaks:
        if leak.pictures is None:
            continue
        tile, _ = fit_into_tile(leak.pictures, TILE, "white")
        how = "equal" if leak.exact else "look the same"
        lines = [f"{split}: {name}" for split, name in (leak.first, leak.second)] + [how]
        tiles.append(_with_lines(tile, lines))
    return arrange(tiles, min(6, len(tiles)), GAP, "#dddddd")


def answer_text(sample: Sample) -> str:
    """The true answer of a sample in one line."""
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


def _tile(sample: Sample) -> Image:
    tile, scale = fit_into_tile(sample.images, TILE, "white")
    boxes = sample.answer.boxes
    labels = list(dict.fromkeys(box.label for box in boxes))
    colours = [COLOURS[labels.index(box.label) % len(COLOURS)] for box in boxes]
    lines = [sample.id, *([sample.prompt] if sample.prompt else [])]
    if {box.label for box in boxes} != {sample.prompt}:
        lines.append(answer_text(sample))
    return _with_lines(draw_boxes(tile, boxes, scale, colours), lines)


def _with_lines(tile: Image, lines: Sequence[str]) -> Image:
    return add_caption(tile, [(line, "black") for line in lines], CAPTION_ROWS, "white")
