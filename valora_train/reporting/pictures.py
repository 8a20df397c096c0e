"""Pictures for people: contact sheets, the accuracy heat map, the packing timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valora_data.drawing import add_caption, arrange, draw_boxes, fit_into_tile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure
    from PIL.Image import Image

    from valora_data.schema import Answer, Box, Domain, Sample
    from valora_train.fusion.decision import AttemptDecision

TILE = 192  # pixels
CAPTION_ROWS = 5
BACKGROUND, TRUTH, RIGHT, WRONG, EXPECTED = "#202020", "#ffffff", "#00e676", "#ff5252", "#b0b0b0"
VERDICT_COLOURS = {"committed": "#2e7d32", "rolled back": "#c62828", "unreachable": "#6a1b9a"}


def contact_sheet(
    samples: Sequence[Sample], found: Sequence[Sequence[Box]], threshold: float, columns: int = 4
) -> Image:
    """Images side by side: true boxes in white, detections in green with their confidence.

    Args:
        samples: Images with their true boxes.
        found: Detections on each image.
        threshold: Confidence from which a detection is drawn.
        columns: Images per row.
    """
    tiles = []
    for sample, boxes in zip(samples, found, strict=True):
        tile, scale = fit_into_tile([sample.image], TILE, BACKGROUND)
        tile = draw_boxes(tile, sample.answer.boxes, scale, [TRUTH] * len(sample.answer.boxes))
        sure = [box for box in boxes if box.confidence >= threshold]
        labels = [f"{box.confidence:.2f}" for box in sure]
        tiles.append(draw_boxes(tile, sure, scale, [RIGHT] * len(sure), labels))
    return arrange(tiles, columns, 4, BACKGROUND)


def answer_sheet(
    samples: Sequence[Sample], answers: Sequence[Answer], domain: Domain, columns: int = 4
) -> Image:
    """Images side by side with question and answer; below a wrong answer stands the true one.

    Args:
        samples: Images or videos with their true answers.
        answers: The answer to each sample.
        domain: The domain, whose prompt is shown where samples have questions of their own.
        columns: Images per row.
    """
    tiles = []
    for sample, answer in zip(samples, answers, strict=True):
        tile, scale = fit_into_tile(sample.images, TILE, BACKGROUND)
        for boxes, colour in ((sample.answer.boxes, TRUTH), (answer.boxes[:1], RIGHT)):
            tile = draw_boxes(tile, boxes, scale, [colour] * len(boxes))
        right = _is_right(answer, sample.answer)
        lines = [(domain.question(sample), TRUTH)] if sample.prompt is not None else []
        lines.append((_text(answer) or "no answer", RIGHT if right else WRONG))
        lines += [] if right else [(_text(sample.answer), EXPECTED)]
        tiles.append(add_caption(tile, lines, CAPTION_ROWS, BACKGROUND, rows_per_line=2))
    return arrange(tiles, columns, 4, BACKGROUND)


def _text(answer: Answer) -> str:
    boxes = "".join(f"({b.x0:.0f}, {b.y0:.0f}, {b.x1:.0f}, {b.y1:.0f})" for b in answer.boxes[:1])
    return answer.choice or next(iter(answer.captions), "") or boxes


def _is_right(answer: Answer, truth: Answer) -> bool:
    if not truth.boxes:
        return _text(answer) == _text(truth) or _text(answer) in truth.captions
    return any(_iou(box, truth.boxes[0]) >= 0.5 for box in answer.boxes[:1])


def _iou(one: Box, other: Box) -> float:
    """Intersection over union."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (one.area + other.area - shared)


def heat_map(decisions: Sequence[AttemptDecision], required: Mapping[str, float]) -> Figure:
    """A heat map of domains × attempts: accuracy minus requirement on the validation split."""
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
        tick.set_color(VERDICT_COLOURS[decision.verdict])
    axes.set_title("Validation accuracy after each attempt (colour: above or below requirement)")
    figure.colorbar(picture, ax=axes, label="accuracy − required")
    figure.tight_layout()
    return figure


def packing_timeline(decisions: Sequence[AttemptDecision], seconds: Sequence[float]) -> Figure:
    """A timeline of attempts: one bar each, by adapter, coloured by verdict."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    adapters = sorted({decision.attempt.adapter for decision in decisions}, reverse=True)
    figure = Figure(figsize=(11, 1.6 + 0.7 * len(adapters)), dpi=110)
    axes = figure.add_subplot()
    start = 0.0
    for decision, took in zip(decisions, seconds, strict=True):
        row = adapters.index(decision.attempt.adapter)
        axes.barh(row, took, left=start, color=VERDICT_COLOURS[decision.verdict], edgecolor="white")
        axes.text(start + took / 2, row, decision.attempt.domain, ha="center", va="center",
                  color="white", fontsize=8, rotation=20)  # fmt: skip
        start += took
    axes.set_yticks(range(len(adapters)), adapters)
    axes.set_xlabel("seconds of fusion")
    axes.set_title("Packing timeline")
    axes.legend(
        handles=[Patch(color=color, label=verdict) for verdict, color in VERDICT_COLOURS.items()],
        loc="upper left", bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
    figure.tight_layout()
    return figure
