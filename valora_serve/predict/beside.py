"""The fused domain beside the small model that it replaces, on pictures without labels.

What a team looks at before it turns the small model off: how often both agree, by class and by
size of object, and the pictures in which they differ most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from valora_serve.predict.records import Prediction
    from valora_serve.types import ServedModel

PICTURES = 24  # shown, those that differ most
_IOU = 0.5
_SIZES = (("small", 32**2), ("medium", 96**2), ("large", float("inf")))  # COCO's, square pixels
_SIDES = ("both", "fused", "small")
Found = dict[str, Any]


@dataclass(slots=True)
class Comparison:
    """Objects that both models found, or one alone, by class and by size, and where.

    `classes` and `sizes` count by name and side (`both`, `fused` or `small`); `pictures` are those
    in which the models differ, most first, with what each found alone.
    """

    classes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sizes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    pictures: list[dict[str, Any]] = field(default_factory=list)
    images: int = 0

    def count(self, side: str, found: Found) -> None:
        """Count an object, or a picture's label."""
        self.classes[found["label"]][side] += 1
        if "box" in found:
            x0, y0, x1, y1 = found["box"]
            area = (x1 - x0) * (y1 - y0)
            self.sizes[next(name for name, most in _SIZES if area < most)][side] += 1

    @property
    def agreement(self) -> float:
        """Share of all objects that both found, each counted once a model; 1 if there are none."""
        return share(sum(self.classes.values(), Counter()))


def share(counts: Mapping[str, int]) -> float:
    """2 · both ÷ (2 · both + fused + small), which is F1 of either model against the other."""
    both, fused, small = (counts.get(side, 0) for side in _SIDES)
    return 2 * both / (2 * both + fused + small) if both + fused + small else 1.0


def compare(fused: Iterable[Prediction], small: Mapping[str, Found]) -> Comparison:
    """Compare the domain's predictions with the small model's answers by file."""
    made = Comparison()
    for one in fused:
        if one.file not in small:
            continue
        made.images += 1
        alone = [one.detections, list(small[one.file].get("detections") or ())]
        if "detections" in one.answer:
            for found in _matched(*alone):
                made.count("both", found)
        else:
            alone = [[one.answer], [small[one.file]]]
            if one.answer["label"] == small[one.file]["label"]:
                made.count("both", one.answer)
                alone = [[], []]
        for side, objects in zip(_SIDES[1:], alone, strict=True):
            for found in objects:
                made.count(side, found)
        if any(alone):
            weight = sum(found["confidence"] for objects in alone for found in objects)
            made.pictures.append({
                "file": one.file, "width": one.width, "height": one.height, "weight": weight,
                "fused": alone[0], "small": alone[1],
            })  # fmt: skip
    made.pictures.sort(key=lambda picture: -picture["weight"])
    return made


def _matched(fused: list[Found], small: list[Found]) -> list[Found]:
    """The small model's objects that the fused one found, too; both are taken off the lists."""
    pairs = sorted(
        ((_overlap(a["box"], b["box"]), i, j)
         for i, a in enumerate(fused) for j, b in enumerate(small) if a["label"] == b["label"]),
        reverse=True,
    )  # fmt: skip
    taken: tuple[set[int], set[int]] = (set(), set())
    for overlap, i, j in pairs:
        if overlap >= _IOU and i not in taken[0] and j not in taken[1]:
            taken[0].add(i)
            taken[1].add(j)
    both = [small[j] for j in sorted(taken[1])]
    for objects, places in zip((fused, small), taken, strict=True):
        objects[:] = [one for place, one in enumerate(objects) if place not in places]
    return both


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / (areas - shared)


def answers_of(model: str, folder: Path, domain: ServedModel, out: Path) -> dict[str, Found]:
    """The small model's answers by file: of a file of predictions, or by `valora label`."""
    if not domain.labels:
        raise SettingsError(f"{domain.name} answers in words: --beside compares boxes and labels")
    if not model.endswith(".jsonl"):
        made = out / "beside.jsonl"
        command = [sys.executable, "-m", "valora_serve.commands", "label", model, str(folder)]
        command += [
            "--labels",
            ",".join(domain.labels),
            "--task",
            str(domain.task),
            "--out",
            str(made),
        ]
        if subprocess.run([*command, "--domain", domain.name], check=False).returncode:
            raise SettingsError(
                f"{model} did not answer, see above: run valora label yourself (its --help names "
                "the options), and give the file that it writes to --beside"
            )
        model = str(made)
    try:
        lines = Path(model).read_text(encoding="utf-8").splitlines()
        return {one["file"]: one["answer"] for one in map(json.loads, lines)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{model} cannot be read as predictions ({error}): check it") from error


def write(made: Comparison, domain: str, source: Path, out: Path) -> Path:
    """Write ``beside.json`` and the page ``beside.html``; the page."""
    tables = {"class": made.classes, "size": made.sizes}
    facts = {
        "domain": domain, "images": made.images, "agreement": made.agreement,
        **{name: {key: {**counts, "agreement": share(counts)} for key, counts in table.items()}
           for name, table in tables.items()},
        "pictures": made.pictures,
    }  # fmt: skip
    (out / "beside.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    parts = [
        f"<h1>{escape(domain)} beside the small model</h1>",
        f"<p>{made.images} images, agreement {made.agreement:.3f}. Found by the fused model alone: "
        "<b class=fused>solid</b>; by the small model alone: <b class=small>dashed</b>.</p>",
    ]
    for name, table in tables.items():
        head = "".join(f"<th>{text}" for text in (name, *_SIDES, "agreement"))
        rows = "".join(
            f"<tr><td>{escape(key)}" + "".join(f"<td>{counts[side]}" for side in _SIDES)
            + f"<td>{share(counts):.3f}" for key, counts in sorted(table.items())
        )  # fmt: skip
        parts.append(f"<table><tr>{head}{rows}</table>")
    parts += [_figure(picture, source, out) for picture in made.pictures[:PICTURES]]
    page = out / "beside.html"
    page.write_text(_PAGE + "\n".join(parts), encoding="utf-8")
    return page


def _figure(picture: Mapping[str, Any], source: Path, out: Path) -> str:
    """A picture, with what each model found alone."""
    place = quote(os.path.relpath(source / picture["file"], out))
    shapes, labels = [], []
    for side in _SIDES[1:]:
        for found in picture[side]:
            text = f"{found['label']} {found['confidence']:.2f}"
            labels.append(f"<b class={side}>{escape(text)}</b>")
            if "box" in found:
                x0, y0, x1, y1 = found["box"]
                shapes.append(
                    f"<rect class={side} x={x0:.1f} y={y0:.1f} width={x1 - x0:.1f} "
                    f"height={y1 - y0:.1f}></rect>"
                )
    size = f"{picture['width']} {picture['height']}"
    return (
        f'<figure><svg viewBox="0 0 {size}"><image href="{place}" width=100% height=100%></image>'
        f"{''.join(shapes)}</svg><figcaption>{escape(picture['file'])}: {', '.join(labels)}"
        "</figcaption></figure>"
    )


_PAGE = """<!doctype html><meta charset=utf-8><title>Beside the small model</title><style>
body {font: 15px sans-serif; margin: 2em} td, th {padding: 2px 12px; text-align: right}
figure {display: inline-block; width: 380px; margin: 8px; vertical-align: top} svg {width: 100%}
rect {fill: none; stroke-width: 2; vector-effect: non-scaling-stroke}
rect.fused {stroke: #07c} rect.small {stroke: #e60; stroke-dasharray: 5 3}
b.fused {color: #07c} b.small {color: #e60}</style>
"""
