"""Label Studio: JSON exports (`JSON` and `JSON-MIN`) of tasks about images.

Shapes are in percent of the image. Paths are those of the server that the images were labelled on;
images are looked for by ever shorter ends of them, below the folder of the images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Edges,
    Record,
    Shape,
    collected,
    note_unlisted,
    shares,
)
from valora_data.sources.formats.files import IMAGES, Finder
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.records import read_count
from valora_data.sources.formats.tables import load_rows

Result = Mapping[str, Any]
MIN_SHAPES = ("rectanglelabels", "polygonlabels", "ellipselabels", "choices", "text", "number")
"""Types of results by which `JSON-MIN` marks them."""
MIN_KEYS = {
    "choice": "choices", "choices": "choices", "label": "choices", "class": "choices",
    "caption": "textarea", "text": "textarea", "count": "number", "number": "number",
}  # fmt: skip
"""Names of tags in `JSON-MIN`, and the type of what stands under them."""
KINDS = {
    "choices": ("label", "choices", Task.CLASSIFICATION),
    "textarea": ("captions", "text", Task.CAPTION),
    "number": ("count", "number", Task.COUNTING),
}
"""Types of results that are answers: the field of `Answer`, where it stands, and the task."""


class LabelStudioFormat(AnnotatedFormat):
    """One JSON file; `Source.images` is the folder of the images.

    Of several annotations of a task the ground truth is taken, or else the first that was not
    cancelled. Tasks without one are left out. Polygons, ellipses and turned rectangles count as the
    upright box around them.
    """

    files = "Label Studio JSON"
    answers = frozenset({"objects", "label", "captions", "count"})

    def recognises(self, location: Location) -> bool:
        """A list of tasks with `data` and `annotations`, or of annotated images (`JSON-MIN`)."""
        return {"data", "annotations"} <= location.keys or "annotation_id" in location.keys

    def guess_task(self, path: str) -> Task:
        """The task that the first result belongs to."""
        entries = load_rows(annotation_file(Path(path)), "tasks")
        found = (one for entry in entries for one in (_results(entry) or ()))
        kind = KINDS.get(str(next(found, {}).get("type")))
        return Task.DETECTION if kind is None else kind[2]

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """Images of the tasks that are labelled; ids are their paths as they were found."""
        entries = load_rows(part, "tasks")
        reading.total += len(entries)
        folder = source.image_folder
        finder = Finder(folder)
        for position, entry in enumerate(entries):
            number = entry.get("id", position) if isinstance(entry, dict) else position
            where = f"{part.name}, task {number}"
            with reading.tolerate(where):
                path = finder.find(_place(entry, source.columns, where))
                results = _results(entry)
                if results is None:
                    text = f"{where}: {path.name} has no annotation"
                    raise FaultError(FaultKind.NOT_LABELLED, text)
                key = path.relative_to(folder) if path.is_relative_to(folder) else path
                record = Record((path,), key.as_posix())
                if source.task.spec.detects:
                    found = [one for one in results if str(one.get("type", "")).endswith("labels")]
                    for one in found[:1]:
                        record.size = one.get("original_width"), one.get("original_height")
                    shapes = [(one, where) for one in found]
                    record.shapes = collected(shapes, _shape, where, reading)
                else:
                    record.answer = _answer(results, source.task.spec.answer, where)
                yield record
        note_unlisted(finder, reading)


def _results(entry: Any) -> list[Result] | None:
    """Results of the annotation that counts; None if there is none."""
    if not isinstance(entry, dict):
        return None
    if "annotations" not in entry:
        return list(_small_results(entry))
    given = entry["annotations"] if isinstance(entry["annotations"], list) else ()
    sound = [one for one in given if isinstance(one, dict) and not one.get("was_cancelled")]
    sound.sort(key=lambda annotation: not annotation.get("ground_truth"))
    if not sound:
        return None
    return [result for result in sound[0].get("result") or [] if isinstance(result, dict)]


def _small_results(entry: Result) -> Iterator[Result]:
    """Results of `JSON-MIN`, where values stand under the names of the tags."""
    for key, value in entry.items():
        for shape in value if isinstance(value, list) else []:
            kinds = [kind for kind in MIN_SHAPES if isinstance(shape, dict) and kind in shape]
            if kinds:
                yield {"type": kinds[0], "value": shape, **shape}
        if key in MIN_KEYS and isinstance(value, str | int | float):
            yield {"type": MIN_KEYS[key], "value": {KINDS[MIN_KEYS[key]][1]: value}}


def _place(entry: Any, columns: Mapping[str, str], where: str) -> str:
    """Path of a task's image on the server."""
    data = entry.get("data", entry) if isinstance(entry, dict) else None
    if not isinstance(data, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where}: a task is no object")
    texts = {key: value for key, value in data.items() if isinstance(value, str)}
    names = [columns["image"]] if "image" in columns else ["image", "img", "image_url", *texts]
    for name in names:
        end = unquote(texts.get(name, "")).lower().rsplit(".", 1)[-1]
        if f".{end}" in IMAGES or (name == "image" and texts.get(name)):
            address = urlsplit(texts[name])
            local = parse_qs(address.query).get("d")
            # Relative: it is looked for below the folder, not where it was on the server.
            return (local[0] if local else unquote(address.path)).lstrip("/")
    text = f"{where} names no image (source.columns.image names another key)"
    raise FaultError(FaultKind.ROW_INCOMPLETE, text)


def _answer(results: list[Result], wanted: str, where: str) -> Answer:
    kind, key = next((kind, key) for kind, (field, key, _) in KINDS.items() if field == wanted)
    values = [one.get("value", {}).get(key) for one in results if one.get("type") == kind]
    listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
    found = [one for one in listed if one is not None and str(one).strip()]
    if not found:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer of type {kind}")
    if kind == "textarea":
        return Answer(captions=tuple(str(text).strip() for text in found))
    if len(found) > 1:
        text = f"{where}: expected one answer, got {found}"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    if kind == "number":
        return Answer(count=read_count(found[0], where))
    return Answer(label=str(found[0]))


def _shape(entry: tuple[Result, str], number: int) -> Shape:
    result, where = entry
    where = f"{where}, result {number}"
    value = result.get("value")
    if not isinstance(value, dict):
        raise FaultError(FaultKind.BOX_MALFORMED, f"{where} has no value")
    named = value.get(str(result["type"])) or value.get("labels") or []
    if not named:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no label")
    if result.get("image_rotation"):
        text = f"{where}: the image was turned while it was labelled"
        raise FaultError(FaultKind.BOX_MALFORMED, text)
    try:
        return Shape(str(named[0]), _edges(value), where)
    except (KeyError, TypeError, ValueError) as error:
        text = f"{where}: the shape {value} has no numbers ({error})"
        raise FaultError(FaultKind.BOX_MALFORMED, text) from error


def _edges(value: Mapping[str, Any]) -> Callable[[float, float], Edges]:
    """The upright box around a shape; KeyError, TypeError or ValueError if it has no numbers."""
    if "points" in value:
        xs, ys = zip(*((float(x) / 100, float(y) / 100) for x, y in value["points"]), strict=True)
        return shares(min(xs), min(ys), max(xs), max(ys))
    ellipse = "width" not in value
    names = ("radiusX", "radiusY") if ellipse else ("width", "height")
    x, y, across, down = (float(value[name]) / 100 for name in ("x", "y", *names))
    turn = math.radians(float(value.get("rotation") or 0))
    if not turn:  # exact, where a rotation by 0 would round
        left, top = (x - across, y - down) if ellipse else (x, y)
        return shares(left, top, x + across, y + down)
    sine, cosine = math.sin(turn), math.cos(turn)

    def turned(width: float, height: float) -> Edges:
        """Edges of a shape that is turned in pixels: an ellipse, or a box about its corner."""
        a, b = across * width, down * height
        if ellipse:
            right, bottom = math.hypot(a * cosine, b * sine), math.hypot(a * sine, b * cosine)
            xs, ys = [-right, right], [-bottom, bottom]
        else:
            corners = [(0.0, 0.0), (a, 0.0), (a, b), (0.0, b)]
            xs = [u * cosine - v * sine for u, v in corners]
            ys = [u * sine + v * cosine for u, v in corners]
        x0, y0 = x * width, y * height
        return x0 + min(xs), y0 + min(ys), x0 + max(xs), y0 + max(ys)

    return turned
