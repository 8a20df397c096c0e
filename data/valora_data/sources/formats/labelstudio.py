"""Label Studio: JSON exports (`JSON` and `JSON-MIN`) of tasks about images.

Shapes are in percent of the image. Paths are those of the server that the images were labelled on;
images are looked for by ever shorter ends of them, below the folder of the images.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import annotation_file
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, collected
from valora_data.sources.formats.files import IMAGES, Finder
from valora_data.sources.formats.labelled import Shape, shares
from valora_data.sources.formats.records import read_count
from valora_data.sources.formats.tables import load_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from valora_data.schema import Split
    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import Edges, ImageReader

    Result = Mapping[str, Any]

MIN_KEYS = ("rectanglelabels", "polygonlabels", "ellipselabels", "choices", "text", "number")
ELLIPSE = ("x", "y", "radiusX", "radiusY")


class LabelStudioFormat(AnnotatedFormat):
    """One JSON file; `Source.images` is the folder of the images.

    Of several annotations of a task the ground truth is taken, or else the first that was not
    cancelled. Tasks without one are left out. Polygons, ellipses and turned rectangles count as the
    upright box around them.
    """

    files = "Label Studio JSON"

    def supports(self, task: Task) -> bool:
        """Detection by shapes, classification by choices, captions by texts, counts by numbers."""
        return task.spec.detects or (
            task.spec.answer in ("label", "captions", "count") and not task.spec.video
        )

    def recognises(self, location: Location) -> bool:
        """A list of tasks with `data` and `annotations`, or of annotated images (`JSON-MIN`)."""
        return {"data", "annotations"} <= location.keys or "annotation_id" in location.keys

    def guess_task(self, path: str) -> Task:
        """The task that the first result belongs to."""
        kinds = {"choices": Task.CLASSIFICATION, "textarea": Task.CAPTION, "number": Task.COUNTING}
        for entry in _entries(annotation_file(Path(path))):
            for result in (_results(entry) or ()) if isinstance(entry, dict) else ():
                return kinds.get(str(result.get("type")), Task.DETECTION)
        return Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All tasks as one piece."""
        return {None: source.file}

    def name(self, source: Source, part: Path) -> str:
        """Name of the file."""
        return part.name

    def folder(self, source: Source, part: Path) -> Path:
        """The folder of the images."""
        return source.image_folder

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """Images of the tasks that are labelled; ids are their paths as they were found."""
        entries = _entries(part)
        if not entries:
            raise DataError(f"{part.name} lists no tasks: the data set is empty")
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
                record = Record(path, key.as_posix())
                if source.task.spec.detects:
                    shapes = [one for one in results if str(one.get("type", "")).endswith("labels")]
                    record.size = next((_size(one) for one in shapes), None)
                    read = partial(_shape, where=where)
                    record.shapes = collected(shapes, read, where, reading)
                else:
                    record.answer = _answer(results, source, where)
                yield record


def _entries(json_path: Path) -> list[Any]:
    content = load_json(json_path)
    if not isinstance(content, list):
        raise DataError(f"{json_path.name} is no list of tasks: export it as JSON or JSON-MIN")
    return content


def _results(entry: Mapping[str, Any]) -> list[Result] | None:
    """Results of the annotation that counts; None if there is none."""
    if "annotations" not in entry:
        return _small_results(entry)
    given = entry["annotations"]
    sound = [
        annotation
        for annotation in (given if isinstance(given, list) else ())
        if isinstance(annotation, dict) and not annotation.get("was_cancelled")
    ]
    sound.sort(key=lambda annotation: not annotation.get("ground_truth"))
    if not sound:
        return None
    return [result for result in sound[0].get("result") or [] if isinstance(result, dict)]


def _small_results(entry: Mapping[str, Any]) -> list[Result]:
    """Results of `JSON-MIN`, where values stand under the names of the tags."""
    results: list[Result] = []
    for key, value in entry.items():
        for shape in value if isinstance(value, list) else []:
            kinds = [kind for kind in MIN_KEYS if isinstance(shape, dict) and kind in shape]
            if kinds:
                results.append({"type": kinds[0], "value": shape, **shape})
        if key in ("choice", "choices", "label", "class") and isinstance(value, str):
            results.append({"type": "choices", "value": {"choices": [value]}})
        elif key in ("caption", "text") and isinstance(value, str):
            results.append({"type": "textarea", "value": {"text": [value]}})
        elif key in ("count", "number") and isinstance(value, int | float):
            results.append({"type": "number", "value": {"number": value}})
    return results


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
    raise FaultError(
        FaultKind.ROW_INCOMPLETE,
        f"{where} names no image (source.columns.image names another key)",
    )


def _answer(results: list[Result], source: Source, where: str) -> Answer:
    kind, key = {
        "label": ("choices", "choices"), "captions": ("textarea", "text"),
        "count": ("number", "number"),
    }[source.task.spec.answer]  # fmt: skip
    values = [one.get("value", {}).get(key) for one in results if one.get("type") == kind]
    flat = [
        one for value in values for one in (value if isinstance(value, list) else [value])
        if one is not None and str(one).strip()
    ]  # fmt: skip
    if not flat:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer of type {kind}")
    if kind == "textarea":
        return Answer(captions=tuple(str(text).strip() for text in flat))
    if len(flat) > 1:
        raise FaultError(FaultKind.LABEL_MALFORMED, f"{where}: expected one answer, got {flat}")
    if kind == "number":
        whole = int(flat[0]) if isinstance(flat[0], float) and flat[0].is_integer() else flat[0]
        return Answer(count=read_count(whole, source.labels or None, where))
    return Answer(label=str(flat[0]))


def _size(result: Result) -> tuple[Any, Any]:
    return result.get("original_width"), result.get("original_height")


def _shape(result: Result, number: int, where: str) -> Shape:
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
        edges = _edges(value)
    except (KeyError, TypeError, ValueError) as error:
        raise FaultError(
            FaultKind.BOX_MALFORMED, f"{where}: the shape {value} has no numbers ({error})"
        ) from error
    return Shape(str(named[0]), edges, where)


def _edges(value: Mapping[str, Any]) -> Callable[[float, float], Edges]:
    """The upright box around a shape.

    Raises:
        KeyError: A number is missing; TypeError or ValueError: it is none.
    """
    if "points" in value:
        xs, ys = zip(*((float(x) / 100, float(y) / 100) for x, y in value["points"]), strict=True)
        return shares(min(xs), min(ys), max(xs), max(ys))
    ellipse = "width" not in value
    names = ELLIPSE if ellipse else ("x", "y", "width", "height")
    x, y, across, down = (float(value[name]) / 100 for name in names)
    turn = math.radians(float(value.get("rotation") or 0))
    if not turn:
        if ellipse:
            return shares(x - across, y - down, x + across, y + down)
        return shares(x, y, x + across, y + down)
    sine, cosine = math.sin(turn), math.cos(turn)

    def turned(width: float, height: float) -> Edges:
        """Edges of a shape that is turned in pixels: an ellipse, or a box about its corner."""
        a, b = across * width, down * height
        if ellipse:
            dx, dy = math.hypot(a * cosine, b * sine), math.hypot(a * sine, b * cosine)
            left, right, top, bottom = -dx, dx, -dy, dy
        else:
            corners = [(0.0, 0.0), (a, 0.0), (a, b), (0.0, b)]
            xs, ys = zip(
                *((u * cosine - v * sine, u * sine + v * cosine) for u, v in corners), strict=True
            )
            left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
        return x * width + left, y * height + top, x * width + right, y * height + bottom

    return turned
