"""Contact sheets: samples with their true answers, and pairs that two splits share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.drawing import add_caption, add_legend, arrange, draw_boxes, show_photograph, widen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from PIL.Image import Image

    from valora_data.duplicates import Key, Pair
    from valora_data.schema import Sample

TILE = 192  # pixels
PAIR_TILE = 480  # pixels: large enough to judge whether two pictures are the same
CAPTION_ROWS = 3
GAP = 8  # pixels
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def contact_sheet(samples: Sequence[Sample], columns: int = 6) -> Image:
    """A sheet of samples: image or frames with the true boxes, question and answer below."""
    colour_of = _colours(samples)
    tiles = [_tile(sample, colour_of) for sample in samples]
    return _with_legend(arrange(tiles, min(columns, len(tiles)), GAP, "#dddddd"), colour_of)


def pair_sheet(pairs: Sequence[Pair], samples: Mapping[Key, Sample]) -> Image | None:
    """A sheet of pairs of pictures that look the same, one pair per row, with their boxes.

    Pairs without their samples are left out; None if none is left.
    """
    tiles = []
    colour_of = _colours(samples.values())
    for number, pair in enumerate(pairs, start=1):
        if pair.first in samples and pair.second in samples:
            for split, name in (pair.first, pair.second):
                titles = [f"pair {number}, {pair.likeness}", f"{split}: {name}"]
                tiles.append(_tile(samples[split, name], colour_of, PAIR_TILE, titles))
    if not tiles:
        return None
    # Tiles of a pair may differ in width, and two narrow ones must not share a row with others.
    width = max(tile.width for tile in tiles)
    tiles = [widen(tile, width, "#dddddd") for tile in tiles]
    return _with_legend(arrange(tiles, 2, GAP, "#dddddd"), colour_of)


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


def _colours(samples: Iterable[Sample]) -> dict[str, str]:
    """A colour for each label of the boxes, in the order of the labels."""
    labels = sorted({box.label for sample in samples for box in sample.answer.boxes})
    return {label: COLOURS[place % len(COLOURS)] for place, label in enumerate(labels)}


def _with_legend(sheet: Image, colour_of: Mapping[str, str]) -> Image:
    if not 0 < len(colour_of) <= len(COLOURS):  # no boxes, or phrases instead of classes
        return sheet
    return add_legend(sheet, list(colour_of.items()), "white", "black")


def _tile(
    sample: Sample,
    colour_of: Mapping[str, str],
    side: int = TILE,
    titles: Sequence[str] | None = None,
) -> Image:
    tile, scale = show_photograph(sample.images or (sample.image,), side)
    boxes = sample.answer.boxes
    colours = [colour_of[box.label] for box in boxes]
    lines = [sample.id] if titles is None else list(titles)
    lines += [sample.prompt] if sample.prompt else []
    if {box.label for box in boxes} != {sample.prompt}:
        lines.append(answer_text(sample))
    drawn = widen(draw_boxes(tile, boxes, scale, colours), side, "white")
    return add_caption(drawn, [(line, "black") for line in lines], CAPTION_ROWS, "white")
