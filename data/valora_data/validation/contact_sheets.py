"""Contact sheets: samples with their true answers, and pairs that two splits share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.drawing import add_caption, arrange, draw_boxes, fit_into_tile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from valora_data.duplicates import Key, Pair
    from valora_data.schema import Sample

TILE = 192  # pixels
PAIR_TILE = 480  # pixels: large enough to judge whether two pictures are the same
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


def pair_sheet(pairs: Sequence[Pair], samples: Mapping[Key, Sample]) -> Image | None:
    """A sheet of pairs of pictures that look the same, one pair per row, with their boxes.

    Args:
        pairs: The pairs.
        samples: Samples by split and id; pairs without their samples are left out.

    Returns:
        The sheet; None if no pair has its samples.
    """
    tiles = []
    for number, pair in enumerate(pairs, start=1):
        if pair.first in samples and pair.second in samples:
            for split, name in (pair.first, pair.second):
                title = f"pair {number}, {pair.likeness}"
                tiles.append(_tile(samples[split, name], PAIR_TILE, [title, f"{split}: {name}"]))
    return arrange(tiles, 2, GAP, "#dddddd") if tiles else None


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


def _tile(sample: Sample, side: int = TILE, titles: Sequence[str] | None = None) -> Image:
    tile, scale = fit_into_tile(sample.images, side, "white")
    boxes = sample.answer.boxes
    labels = list(dict.fromkeys(box.label for box in boxes))
    colours = [COLOURS[labels.index(box.label) % len(COLOURS)] for box in boxes]
    lines = [sample.id] if titles is None else list(titles)
    lines += [sample.prompt] if sample.prompt else []
    if {box.label for box in boxes} != {sample.prompt}:
        lines.append(answer_text(sample))
    return _with_lines(draw_boxes(tile, boxes, scale, colours), lines)


def _with_lines(tile: Image, lines: Sequence[str]) -> Image:
    return add_caption(tile, [(line, "black") for line in lines], CAPTION_ROWS, "white")
