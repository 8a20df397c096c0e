"""Pictures for people: contact sheets, the fusion in bars, the heat map, the packing timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from valora_data.drawing import add_caption, add_legend, arrange, draw_boxes, show_photograph, widen
from valora_data.tasks import task_spec
from valora_train.reporting.domain_table import by_adapter
from valora_train.reporting.text import bytes_text, share_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure
    from PIL.Image import Image

    from valora_data.schema import Answer, Box, Domain, Sample
    from valora_train.fusion.decision import AttemptDecision

TILE = 256  # pixels, the side of a square photograph
CAPTION_ROWS = 5
BACKGROUND, TRUTH, RIGHT, WRONG, EXPECTED = "#202020", "#ffffff", "#00e676", "#ff5252", "#b0b0b0"
VERDICT_COLOURS = {"committed": "#2e7d32", "rolled back": "#c62828", "unreachable": "#6a1b9a"}


def contact_sheet(
    samples: Sequence[Sample], found: Sequence[Sequence[Box]], threshold: float, columns: int = 4
) -> Image:
    """Photographs with true boxes and detections, and a legend of their colours.

    Args:
        samples: Images with their true boxes.
        found: Detections on each image.
        threshold: Confidence from which a detection is drawn.
        columns: Square images per row.
    """
    seen = {box.label for sample in samples for box in sample.answer.boxes}
    classes = len(seen | {box.label for boxes in found for box in boxes}) > 1
    tiles = []
    used = {TRUTH} if any(sample.answer.boxes for sample in samples) else set()
    for sample, boxes in zip(samples, found, strict=True):
        tile, scale = show_photograph([sample.image], TILE)
        truth = sample.answer.boxes
        names = [box.label for box in truth] if classes else None
        tile = draw_boxes(tile, truth, scale, [TRUTH] * len(truth), names, below=True)
        sure = sorted(
            (box for box in boxes if box.confidence >= threshold), key=lambda box: -box.confidence
        )
        labels = [f"{box.confidence:.2f}" + f" {box.label}" * classes for box in sure]
        colours = [RIGHT if hit else WRONG for hit in _hits(sure, truth)]
        used |= set(colours)
        tiles.append(widen(draw_boxes(tile, sure, scale, colours, labels), TILE // 2, BACKGROUND))
    legend = [
        ("truth", TRUTH),
        (f"right prediction (IoU from 0.5, confidence from {threshold:.2f})", RIGHT),
        ("wrong prediction", WRONG),
    ]
    return _with_legend(arrange(tiles, columns, 6, BACKGROUND), legend, used)


def _with_legend(sheet: Image, legend: Sequence[tuple[str, str]], used: set[str]) -> Image:
    """Put a legend of the colours that are used above a sheet."""
    entries = [(meaning, colour) for meaning, colour in legend if colour in used]
    return add_legend(sheet, entries, BACKGROUND, TRUTH) if entries else sheet


def _hits(found: Sequence[Box], truth: Sequence[Box]) -> list[bool]:
    """Whether each detection, the most confident first, is matched to a true box of its own."""
    left = list(truth)
    hits = []
    for box in found:
        near = [other for other in left if other.label == box.label and _iou(box, other) >= 0.5]
        hits.append(bool(near))
        if near:
            left.remove(max(near, key=lambda other: _iou(box, other)))
    return hits


def answer_sheet(
    samples: Sequence[Sample], answers: Sequence[Answer], domain: Domain, columns: int = 4
) -> Image:
    """Images with question and answer; below a wrong answer stands the true one.

    Args:
        samples: Images or videos with their true answers.
        answers: The answer to each sample.
        domain: The domain, whose prompt is shown where samples have questions of their own.
        columns: Square images per row.
    """
    tiles = []
    used = set()
    for sample, answer in zip(samples, answers, strict=True):
        tile, scale = show_photograph(sample.images or (sample.image,), TILE)
        right = _is_right(answer, sample.answer)
        verdict = RIGHT if right else WRONG
        used |= {verdict} if right else {verdict, EXPECTED}
        used |= {TRUTH} if sample.answer.boxes else set()
        for boxes, colour in ((sample.answer.boxes, TRUTH), (answer.boxes[:1], verdict)):
            tile = draw_boxes(tile, boxes, scale, [colour] * len(boxes))
        lines = [(domain.question(sample), TRUTH)] if sample.prompt is not None else []
        lines.append((_text(answer) or "no answer", verdict))
        lines += [] if right else [(_text(sample.answer), EXPECTED)]
        tile = widen(tile, TILE, BACKGROUND)
        tiles.append(add_caption(tile, lines, CAPTION_ROWS, BACKGROUND, rows_per_line=2))
    legend = [
        ("right prediction", RIGHT), ("wrong prediction", WRONG), ("true answer", EXPECTED),
        ("true box", TRUTH),
    ]  # fmt: skip
    return _with_legend(arrange(tiles, columns, 6, BACKGROUND), legend, used)


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


BARS = (("without LoRA", "#9e9e9e"), ("teacher", "#1e88e5"), ("test", "#2e7d32"))
MISSED = "#c62828"
BANDS = ("#eceff1", "#ffffff")  # behind the domains of one adapter, in turn
NO_ADAPTER = "no adapter"


def accuracy_bars(
    domains: Mapping[str, Mapping[str, Any]], adapters: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """A fusion in one picture: adapters with their domains, accuracy, bar and teacher on one scale.

    Metrics that end at 1 share one axis; those with another range, such as CIDEr, have their own.

    Args:
        domains: What a fusion promises of each domain (`domains` of `fusion.json`).
        adapters: Rank and bytes of each adapter, in the order of the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    groups: dict[float, list[str]] = {}
    for name in by_adapter(domains, adapters):
        groups.setdefault(task_spec(domains[name]["task"]).largest, []).append(name)
    figure = Figure(figsize=(11, 1.8 + 0.75 * len(domains) + 0.5 * len(groups)), dpi=110)
    ordered = sorted(groups.items())
    ratios = [len(names) for _, names in ordered]
    grid = figure.subplots(len(groups), 1, squeeze=False, height_ratios=ratios)
    for axes, (largest, names) in zip(grid[:, 0], ordered, strict=True):
        axes.set_xlim(0, largest)
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first domain above
        _bands(axes, [domains[name].get("adapter") for name in names], adapters)
        for row, name in enumerate(names):
            _bars_of_domain(axes, row, domains[name])
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(", ".join(dict.fromkeys(domains[name]["metric"] for name in names)))
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in BARS]
    handles += [Patch(color=MISSED, label="test, requirement missed")]
    handles += [Line2D([], [], color="black", linewidth=2, label="required")]
    handles += [Line2D([], [], color="black", linewidth=1, linestyle=":", label="bar")]
    handles += [Line2D([], [], color="#ff6f00", marker="D", linestyle="", label="validation")]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    return figure


def _bands(
    axes: Any, holders: Sequence[str | None], adapters: Mapping[str, Mapping[str, Any]]
) -> None:
    """Shade the rows of each adapter and name it beside them."""
    starts = [row for row in range(len(holders)) if not row or holders[row] != holders[row - 1]]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(holders)
        axes.axhspan(start - 0.5, end - 0.5, color=BANDS[number % 2], zorder=0)
        adapter = holders[start]
        lines = [adapter or NO_ADAPTER]
        facts = adapters.get(adapter or "", {})
        lines += [f"rank {facts['rank']}"] if "rank" in facts else []
        lines += [bytes_text(facts["bytes"])] if "bytes" in facts else []
        text = "\n".join(lines) if end - start > 1 else ", ".join(lines)
        axes.annotate(
            text, (1.01, (start + end - 1) / 2), xycoords=("axes fraction", "data"),
            va="center", fontsize=8,
        )  # fmt: skip


def _bars_of_domain(axes: Any, row: int, facts: Mapping[str, Any]) -> None:
    accuracy = facts["accuracy"]
    values = (accuracy["head_only"], accuracy["teacher"], accuracy["test"])
    for place, (value, (label, colour)) in enumerate(zip(values, BARS, strict=True)):
        if value is None:
            continue
        last = place == len(BARS) - 1
        y = row + 0.27 * (place - 1)
        low, high = accuracy["test_ci95"]
        axes.barh(
            y, value, height=0.25,
            color=MISSED if last and facts["status"] != "met" else colour,
            xerr=[[max(0.0, value - low)], [max(0.0, high - value)]] if last else None,
        )  # fmt: skip
        text = f" {value:.3f} {label}"
        if last and accuracy["teacher"]:
            text += f", {share_text(value, accuracy['teacher'])} of the teacher"
        room = value > 0.3 * axes.get_xlim()[1]
        axes.text(
            0.0 if room else value, y, text, va="center", fontsize=7,
            color="white" if room else "black", zorder=4,
            bbox=None if room else {"facecolor": "white", "alpha": 0.8, "pad": 0.5, "lw": 0},
        )  # fmt: skip
    axes.vlines(facts["required"], row - 0.42, row + 0.42, color="black", linewidth=2)
    if facts.get("bar") is not None:
        axes.vlines(facts["bar"], row - 0.42, row + 0.42, color="black", linestyle=":")
    if accuracy.get("val") is not None:
        axes.plot(accuracy["val"], row + 0.27, marker="D", color="#ff6f00", markersize=4)


def confusion_matrix(names: Sequence[str], counts: Sequence[Sequence[int]], title: str) -> Figure:
    """A confusion matrix: counts, coloured by their share of the true class.

    Args:
        names: Names of the classes.
        counts: Counts by truth (row) and prediction (column).
        title: Title of the figure.
    """
    from matplotlib.figure import Figure

    values = np.array(counts)
    shares = values / np.maximum(values.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.55 * min(len(names), 30)
    figure = Figure(figsize=(side + 1.2, side), dpi=110)
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(values > 0):
        ink = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, values[row, column], ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("prediction")
    axes.set_ylabel("truth")
    axes.set_title(title)
    figure.colorbar(picture, ax=axes, label="share of the true class")
    figure.tight_layout()
    return figure


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
            f"{decision.attempt.number:02d} {decision.attempt.label}\n"
            f"→ {decision.attempt.adapter}\n{decision.verdict}"
            for decision in decisions
        ],
        fontsize=7,
    )
    for tick, decision in zip(axes.get_xticklabels(), decisions, strict=True):
        tick.set_color(VERDICT_COLOURS[decision.verdict])
    axes.set_title("Validation accuracy in each attempt (colour: above or below requirement)")
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
        axes.text(start + took / 2, row, decision.attempt.label, ha="center", va="center",
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
