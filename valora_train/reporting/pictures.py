"""Pictures for people: contact sheets, the fusion in bars, confusion matrices."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL.Image import Image

from valora_data.drawing import add_caption, arrange, draw_boxes, show_photograph, widen
from valora_data.schema import Answer, Box, Domain, Sample
from valora_data.tasks import task_spec
from valora_train.reporting.texts import adapter_texts, by_adapter, share_text

matplotlib.rcParams["text.parse_math"] = False  # names of classes are no formulas,
warnings.filterwarnings("ignore", "Glyph .* missing from font")  # and in any script

TILE = 256  # pixels, the side of a square photograph
CAPTION_ROWS, COLUMNS, DPI = 5, 4, 110
BACKGROUND, TRUTH, RIGHT, WRONG, EXPECTED = "#202020", "#ffffff", "#00e676", "#ff5252", "#b0b0b0"
BARS = {"head_only": ("without LoRA", "#9e9e9e"), "teacher": ("teacher", "#1e88e5"),
        "test": ("test", "#2e7d32")}  # fmt: skip
MISSED = ("test, requirement missed", "#c62828")


def contact_sheet(
    samples: Sequence[Sample], found: Sequence[Sequence[Box]], threshold: float
) -> Image:
    """Photographs with true boxes and detections from a confidence, and a legend of the colours."""
    truths = [sample.answer.boxes for sample in samples]
    classes = len({box.label for boxes in (*truths, *found) for box in boxes}) > 1
    tiles, used = [], {TRUTH} if any(truths) else set()
    for sample, truth, boxes in zip(samples, truths, found, strict=True):
        tile, scale = show_photograph([sample.image], TILE)
        names = [box.label for box in truth] if classes else None
        tile = draw_boxes(tile, truth, scale, [TRUTH] * len(truth), names, below=True)
        sure = sorted(
            (box for box in boxes if box.confidence >= threshold), key=lambda box: -box.confidence
        )
        labels = [f"{box.confidence:.2f}" + f" {box.label}" * classes for box in sure]
        colours = [RIGHT if hit else WRONG for hit in _hits(sure, truth)]
        used |= set(colours)
        tiles.append(widen(draw_boxes(tile, sure, scale, colours, labels), TILE // 2, BACKGROUND))
    right = f"right prediction (IoU from 0.5, confidence from {threshold:.2f})"
    return _sheet(tiles, {"truth": TRUTH, right: RIGHT, "wrong prediction": WRONG}, used)


def answer_sheet(samples: Sequence[Sample], answers: Sequence[Answer], domain: Domain) -> Image:
    """Images with question and answer; below a wrong answer stands the true one."""
    tiles, used = [], set()
    for sample, answer in zip(samples, answers, strict=True):
        tile, scale = show_photograph(sample.images or (sample.image,), TILE)
        truth = sample.answer
        right = (
            any(box.iou(truth.boxes[0]) >= 0.5 for box in answer.boxes[:1])
            if truth.boxes
            else _text(answer) in (_text(truth), *truth.captions)
        )
        verdict = RIGHT if right else WRONG
        used |= {verdict, *([TRUTH] if truth.boxes else ()), *(() if right else [EXPECTED])}
        for boxes, colour in ((truth.boxes, TRUTH), (answer.boxes[:1], verdict)):
            tile = draw_boxes(tile, boxes, scale, [colour] * len(boxes))
        lines = [(domain.question(sample), TRUTH)] if sample.prompt is not None else []
        lines.append((_text(answer) or "no answer", verdict))
        lines += [] if right else [(_text(truth), EXPECTED)]
        tile = widen(tile, TILE, BACKGROUND)
        tiles.append(add_caption(tile, lines, CAPTION_ROWS, BACKGROUND, rows_per_line=2))
    legend = {"right prediction": RIGHT, "wrong prediction": WRONG, "true answer": EXPECTED}
    return _sheet(tiles, legend | {"true box": TRUTH}, used)


def _sheet(tiles: Sequence[Image], legend: Mapping[str, str], used: set[str]) -> Image:
    """Tiles on a sheet, above a legend of the colours that are used."""
    sheet = arrange(tiles, COLUMNS, 6, BACKGROUND)
    entries = [entry for entry in legend.items() if entry[1] in used]
    return add_caption(sheet, entries, len(entries), BACKGROUND)


def _hits(found: Sequence[Box], truth: Sequence[Box]) -> list[bool]:
    """Whether each detection, the most confident first, is matched to a true box of its own."""
    left, hits = list(truth), []
    for box in found:
        near = [other for other in left if other.label == box.label and box.iou(other) >= 0.5]
        hits.append(bool(near))
        if near:
            left.remove(max(near, key=box.iou))
    return hits


def _text(answer: Answer) -> str:
    boxes = "".join(f"({b.x0:.0f}, {b.y0:.0f}, {b.x1:.0f}, {b.y1:.0f})" for b in answer.boxes[:1])
    return answer.choice or next(iter(answer.captions), "") or boxes


def accuracy_bars(
    domains: Mapping[str, Mapping[str, Any]], adapters: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """A fusion in one picture: domains by adapter with accuracy, target and teacher."""
    # Metrics that end at 1 share one axis; those with another range, such as CIDEr, have their own.
    groups: dict[float, list[str]] = {}
    for name in by_adapter(domains, adapters):
        groups.setdefault(task_spec(domains[name]["task"]).largest, []).append(name)
    ordered = [names for _, names in sorted(groups.items())]
    size = (11, 1.8 + 0.75 * len(domains) + 0.5 * len(groups))
    figure = Figure(figsize=size, dpi=DPI)
    ratios = [len(names) for names in ordered]
    grid = figure.subplots(len(groups), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, largest, names in zip(grid, sorted(groups), ordered, strict=True):
        for row, name in enumerate(names):
            _bars(axes, row, domains[name])
        holders = [domains[name].get("adapter") for name in names]
        words = ["\n".join(adapter_texts(one, adapters.get(one or "", {}))) for one in holders]
        axes.set_yticks(range(len(names)), [f"{a}\n{b}" for a, b in zip(names, words, strict=True)])
        axes.set_xlim(0, largest)
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first domain above
        axes.set_xlabel(", ".join(dict.fromkeys(domains[name]["metric"] for name in names)))
        axes.grid(axis="x", alpha=0.3)
    shown = {
        text: mark
        for axes in grid
        for mark, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown, loc="upper center", ncols=len(shown), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    return figure


def _bars(axes: Any, row: int, facts: Mapping[str, Any]) -> None:
    """Bars of a domain: without LoRA, its teacher, and test with its interval; further marks."""
    accuracy = facts["accuracy"]
    bars = BARS if facts["status"] == "met" else BARS | {"test": MISSED}
    for place, (key, (label, colour)) in enumerate(bars.items()):
        value, error = accuracy[key], None
        if value is None:
            continue
        text = f" {value:.3f}"
        if key == "test":
            low, high = accuracy["test_ci95"]
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            if accuracy["teacher"]:
                text += f", {share_text(value, accuracy['teacher'])} of the teacher"
        y = row + 0.27 * (place - 1)
        axes.barh(y, value, 0.25, color=colour, label=label, xerr=error)
        axes.text(0, y, text, va="center", fontsize=7, bbox={"fc": "white", "alpha": 0.7, "lw": 0})
    marks = [
        ("required", facts["required"], "|", "black"),
        ("target", facts.get("bar"), 2, "black"),
        ("validation", accuracy.get("val"), "D", "#ff6f00"),
    ]
    for label, value, marker, colour in marks:
        if value is not None:
            size = 20 if marker == "D" else 900
            axes.scatter(value, row, size, colour, marker, label=label, zorder=3)


def confusion_matrix(domain: str, confusion: Mapping[str, Any]) -> Figure:
    """A confusion matrix: `counts` by truth (row) and prediction, coloured by share of the row."""
    names, counts = confusion["names"], np.array(confusion["counts"])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.55 * min(len(names), 30)
    figure = Figure(figsize=(side + 1.2, side), dpi=DPI)
    axes = figure.add_subplot(
        title=f"{domain}: truth and prediction", xlabel="prediction", ylabel="truth"
    )
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counts > 0):
        ink = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, counts[row, column], ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(picture, ax=axes, label="share of the true class")
    figure.tight_layout()
    return figure
