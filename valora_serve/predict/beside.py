"""The fused domain beside the small model that it replaces, on pictures without labels."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from valora_data.contract.files import expanded
from valora_data.schema import Box
from valora_data.sources.formats.files import read_lines
from valora_serve.errors import SettingsError
from valora_serve.predict.run import Prediction, written
from valora_serve.types import ServedModel

PICTURES = 24  # shown, those that differ most
_IOU = 0.5
_SIZES = (("small", 32**2), ("medium", 96**2), ("large", math.inf))  # COCO's, square pixels
_SIDES = ("both", "fused", "small")


@dataclass(slots=True)
class Comparison:
    """What both models found, or one alone, counted by name and side (`both`, `fused`, `small`)."""

    classes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sizes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # Where the models differ, most first, with what the fused and the small one found alone.
    pictures: list[tuple[Prediction, list[Box], list[Box]]] = field(default_factory=list)
    images: int = 0

    @property
    def agreement(self) -> float:
        """Share of all objects that both found, each counted once a model; 1 if there are none."""
        return share(sum(self.classes.values(), Counter()))


def share(counts: Mapping[str, int]) -> float:
    """2 · both ÷ (2 · both + fused + small), which is F1 of either model against the other."""
    both, fused, small = (counts.get(side, 0) for side in _SIDES)
    return 2 * both / (2 * both + fused + small) if both + fused + small else 1.0


def compare(fused: Iterable[Prediction], small: Mapping[str, list[Box]]) -> Comparison:
    """Compare the domain's predictions with what the small model found, by file."""
    made = Comparison()
    for one in fused:
        if one.file not in small:
            continue
        made.images += 1
        both, *alone = _matched(found_in(one.answer), small[one.file])
        for side, boxes in zip(_SIDES, (both, *alone), strict=True):
            for box in boxes:
                made.classes[box.label][side] += 1
                made.sizes[next(name for name, limit in _SIZES if box.area < limit)][side] += 1
        if any(alone):
            made.pictures.append((one, alone[0], alone[1]))
    made.pictures.sort(key=lambda it: -sum(box.confidence for boxes in it[1:] for box in boxes))
    return made


def found_in(answer: Mapping[str, Any]) -> list[Box]:
    """The boxes of an answer of ``/v1/vision``; a label counts as a box of its own."""
    found: Iterable[Mapping[str, Any]] = answer.get("detections", [{"box": (0, 0, 1, 1), **answer}])
    boxes = []
    for one in found:
        x0, y0, x1, y1, score = numbers = [*map(float, (*one["box"], one["confidence"]))]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a box is not finite")
        boxes.append(Box(x0, y0, x1, y1, str(one["label"]), score))
    return [box for box in boxes if box.area > 0]


def _matched(fused: list[Box], small: list[Box]) -> tuple[list[Box], list[Box], list[Box]]:
    """The small model's boxes that the fused one found, too; what each found alone."""
    pairs = sorted(
        ((one.iou(other), i, j) for i, one in enumerate(fused) for j, other in enumerate(small)
         if one.label == other.label), reverse=True,
    )  # fmt: skip
    taken: dict[int, int] = {}  # places in `fused`, by those in `small`
    for overlap, i, j in pairs:
        if overlap >= _IOU and i not in taken.values() and j not in taken:
            taken[j] = i
    return (
        [small[j] for j in taken],
        [box for i, box in enumerate(fused) if i not in taken.values()],
        [box for j, box in enumerate(small) if j not in taken],
    )


def answers_of(
    model: str, folder: Path, domain: ServedModel, out: Path, min_score: float | None = None
) -> dict[str, list[Box]]:
    """What the small model finds by file, by a file of predictions or by asking it."""
    if not domain.labels:
        raise SettingsError(f"{domain.name} answers in words: --beside compares boxes and labels")
    file = expanded(model)
    if file.suffix != ".jsonl":
        file = out / "beside.jsonl"
        labels = ",".join('"{}"'.format(label.replace('"', '""')) for label in domain.labels)
        command = [sys.executable, "-m", "valora_serve.commands", "label", model, str(folder)]
        command += ["--labels", labels, "--task", str(domain.task), "--domain", domain.name]
        command += ["--out", str(file)]
        command += [] if min_score is None else ["--min-score", str(min_score)]
        if (status := subprocess.run(command, check=False).returncode) in (130, -signal.SIGINT):
            raise KeyboardInterrupt
        if status:
            raise SettingsError(
                f"{model} did not answer, see above: run valora label, and give its file here"
            )
    found = {}
    for number, row in read_lines(file):
        try:
            if row is None or (row.get("error") is None and row["domain"] == domain.name):
                found[row["file"]] = found_in(row["answer"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"line {number} of {file} is no prediction: write it with valora label"
            raise SettingsError(text) from error
    if not found:
        raise SettingsError(f"{file} has no answers of {domain.name}: name it with --domain there")
    if others := {box.label for boxes in found.values() for box in boxes} - {*domain.labels}:
        raise SettingsError(f"{file} finds {min(others)!r}, which is none of {domain.name}'s "
                            "labels: run valora label with those as --labels")  # fmt: skip
    return found


def write(made: Comparison, domain: ServedModel, source: Path, out: Path) -> Path:
    """Write ``beside.json`` and the page ``beside.html``; the page."""
    tables = {"class": made.classes} | ({"size": made.sizes} if domain.boxes else {})
    facts = {
        "domain": domain.name, "images": made.images, "agreement": made.agreement,
        **{name: {key: {**dict.fromkeys(_SIDES, 0), **counts, "agreement": share(counts)}
                  for key, counts in table.items()} for name, table in tables.items()},
        "pictures": [
            {"file": one.file} | {
                side: [{"label": box.label, "confidence": box.confidence, "box": box.xyxy}
                       for box in boxes] for side, boxes in zip(_SIDES[1:], alone, strict=True)}
            for one, *alone in made.pictures
        ],
    }  # fmt: skip
    written(out / "beside.json", json.dumps(facts, indent=1) + "\n")
    parts = [
        f"<h1>{escape(domain.name)} beside the small model</h1>",
        f"<p>images: {made.images}, agreement: {made.agreement:.3f}. Found by the fused model "
        "alone: <b class=fused>solid</b>; by the small model alone: <b class=small>dashed</b>.</p>",
    ]
    for name, table in tables.items():
        head = "".join(f"<th>{text}" for text in (name, *_SIDES, "agreement"))
        rows = "".join(
            f"<tr><td>{escape(key)}" + "".join(f"<td>{counts[side]}" for side in _SIDES)
            + f"<td>{share(counts):.3f}" for key, counts in sorted(table.items())
        )  # fmt: skip
        parts.append(f"<table><tr>{head}{rows}</table>")
    for one, *alone in made.pictures[:PICTURES]:
        parts.append(_figure(one, alone, quote(os.path.relpath(source / one.file, out))))
    return written(out / "beside.html", _PAGE + "\n".join(parts))


def _figure(one: Prediction, alone: list[list[Box]], link: str) -> str:
    shapes, labels = [], []
    for side, boxes in zip(_SIDES[1:], alone, strict=True):
        for box in boxes:
            labels.append(f"<b class={side}>{escape(box.label)} {box.confidence:.2f}</b>")
            shapes.append(
                f"<rect class={side} x={box.x0:.1f} y={box.y0:.1f} "
                f"width={box.x1 - box.x0:.1f} height={box.y1 - box.y0:.1f}></rect>"
            )
    return (
        f'<figure><svg viewBox="0 0 {one.width} {one.height}"><image href="{link}" width=100% '
        f"height=100%></image>{''.join(shapes)}</svg><figcaption>{escape(one.file)}: "
        f"{', '.join(labels)}</figcaption></figure>"
    )


_PAGE = """<!doctype html><meta charset=utf-8><title>Beside the small model</title><style>
body {font: 15px sans-serif; margin: 2em} td, th {padding: 2px 12px; text-align: right}
figure {display: inline-block; width: 380px; margin: 8px; vertical-align: top} svg {width: 100%}
rect {fill: none; stroke-width: 2; vector-effect: non-scaling-stroke}
rect.fused {stroke: #07c} rect.small {stroke: #e60; stroke-dasharray: 5 3}
b.fused {color: #07c} b.small {color: #e60}</style>
"""
