"""Label Studio: JSON exports (`JSON` and `JSON-MIN`) of tasks about images.

Shapes are in percent of the image. Paths are those of the server that the images were labelled on;
images are looked for by ever shorter ends of them, below the folder of the images.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    annotation_file,
)
from valora_data.sources.formats.coco import note_unlisted
from valora_data.sources.formats.labelled import (
    IMAGES,
    Frame,
    ImageReader,
    Reading,
    stray_label,
)
from valora_data.sources.formats.records import read_count
from valora_data.sources.formats.tables import load_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL.Image import Image

Point = tuple[float, float]
UPLOADED = re.compile(r"^[0-9a-f]{8}-")
"""What Label Studio puts before the name of a file that is uploaded."""
MIN_KEYS = ("rectanglelabels", "polygonlabels", "ellipselabels", "choices", "text", "number")


class LabelStudioFormat(SourceFormat):
    """One JSON file; `Source.images` is the folder of the images."""

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
            for result in _results(entry) if isinstance(entry, dict) else ():
                return kinds.get(str(result.get("type")), Task.DETECTION)
        return Task.DETECTION

    def open(self, source: Source) -> Splits:
        """All tasks as one piece."""
        return {None: partial(read_label_studio, source.file, source)}

    def reads(self, source: Source) -> Iterator[Path]:
        """The file and the images of its tasks."""
        file = source.file
        yield file
        for entry in _entries(file):
            place = _place(entry, source.columns) if isinstance(entry, dict) else None
            if place is not None:
                yield _found(source.image_folder, place)


def read_label_studio(json_path: Path, source: Source) -> Iterator[Sample]:
    """Read the tasks of an export.

    Of several annotations of a task the ground truth is taken, or else the first that was not
    cancelled. Tasks without one are left out. Polygons, ellipses and turned rectangles count as the
    upright box around them.

    Args:
        json_path: The file.
        source: Task, labels, folder of the images, columns and reader.

    Yields:
        One sample per task whose image decodes; its id is the path of the image as it was found.

    Raises:
        DataError: If the file is missing, corrupt or empty, or too many images have faults.
    """
    name = json_path.name
    entries = _entries(json_path)
    if not entries:
        raise DataError(f"{name} lists no tasks: the data set is empty")
    folder = source.image_folder
    with Reading(source.reader, name, len(entries)) as reading:
        tasks = []
        seen: set[Path] = set()
        for position, entry in enumerate(entries):
            where = f"{name}, task {entry.get('id', position)}" if isinstance(entry, dict) else name
            with reading.tolerate(where):
                path = _path(entry, folder, source.columns, where)
                if path in seen:
                    raise FaultError(FaultKind.IMAGE_TWICE, f"{where}: {path.name} has a task")
                seen.add(path)
                if _annotation(entry) is None:
                    text = f"{where}: {path.name} has no annotation"
                    raise FaultError(FaultKind.NOT_LABELLED, text)
                tasks.append((entry, path, where))
        note_unlisted(seen, folder, reading)
        paths = [path for _, path, _ in tasks]
        for (entry, path, where), picture in zip(tasks, reading.open_all(paths), strict=True):
            if picture is None:
                continue
            with reading.tolerate(path.name):
                answer = _answer(entry, picture, source, where, reading)
                key = path.relative_to(folder) if path.is_relative_to(folder) else path
                yield Sample(key.as_posix(), picture, answer)


def _entries(json_path: Path) -> list[Any]:
    content = load_json(json_path)
    if not isinstance(content, list):
        raise DataError(f"{json_path.name} is no list of tasks: export it as JSON or JSON-MIN")
    return content


def _annotation(entry: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
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
    results = sound[0].get("result") or []
    return [result for result in results if isinstance(result, dict)]


def _results(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return _annotation(entry) or ()


def _small_results(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Results of `JSON-MIN`, where values stand under the names of the tags."""
    results: list[Mapping[str, Any]] = []
    for key, value in entry.items():
        shapes = value if isinstance(value, list) else []
        for shape in shapes:
            kind = next(
                (kind for kind in MIN_KEYS if isinstance(shape, dict) and kind in shape), ""
            )
            if kind:
                results.append({"type": kind, "value": shape, **shape})
        if key in ("choice", "choices", "label", "class") and isinstance(value, str):
            results.append({"type": "choices", "value": {"choices": [value]}})
        elif key in ("caption", "text") and isinstance(value, str):
            results.append({"type": "textarea", "value": {"text": [value]}})
        elif key in ("count", "number") and isinstance(value, int | float):
            results.append({"type": "number", "value": {"number": value}})
    return results


def _place(entry: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """Where the image of a task is, as the export has it."""
    data = entry.get("data", entry)
    if not isinstance(data, dict):
        return None
    texts = {key: value for key, value in data.items() if isinstance(value, str)}
    names = [columns["image"]] if "image" in columns else ["image", "img", "image_url", *texts]
    for name in names:
        end = unquote(texts.get(name, "")).lower().rsplit(".", 1)[-1]
        if f".{end}" in IMAGES or (name == "image" and texts.get(name)):
            return texts[name]
    return None


def _path(entry: Any, folder: Path, columns: Mapping[str, str], where: str) -> Path:
    if not isinstance(entry, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where}: a task is no object")
    place = _place(entry, columns)
    if place is None:
        raise FaultError(
            FaultKind.ROW_INCOMPLETE,
            f"{where} names no image (source.columns.image names another key)",
        )
    return _found(folder, place)


def _found(folder: Path, place: str) -> Path:
    """The file of an image, by the longest end of its path that exists below the folder."""
    address = urlsplit(place)
    local = parse_qs(address.query).get("d")
    path = local[0] if local else unquote(address.path)
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for start in range(len(parts)):
        for last in (parts[-1], UPLOADED.sub("", parts[-1])):
            file = folder.joinpath(*parts[start:-1], last)
            if file.is_file():
                return file
    return folder / (parts[-1] if parts else "image")


def _answer(
    entry: Mapping[str, Any], picture: Image, source: Source, where: str, reading: ImageReader
) -> Answer:
    results, spec = _results(entry), source.task.spec
    labels = source.labels or None
    if spec.detects:
        return Answer(_boxes(results, picture, labels, where, reading))
    kind, key = {
        "label": ("choices", "choices"), "captions": ("textarea", "text"),
        "count": ("number", "number"),
    }[spec.answer]  # fmt: skip
    values = [result.get("value", {}).get(key) for result in results if result["type"] == kind]
    flat = [
        one for value in values for one in (value if isinstance(value, list) else [value])
        if one is not None and str(one).strip()
    ]  # fmt: skip
    if not flat:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer of type {kind}")
    if spec.answer == "captions":
        return Answer(captions=tuple(str(text).strip() for text in flat))
    if len(flat) > 1:
        raise FaultError(FaultKind.LABEL_MALFORMED, f"{where}: expected one answer, got {flat}")
    if spec.answer == "count":
        whole = int(flat[0]) if isinstance(flat[0], float) and flat[0].is_integer() else flat[0]
        return Answer(count=read_count(whole, labels, where))
    if labels is not None and flat[0] not in labels:
        raise stray_label(where, str(flat[0]), labels)
    return Answer(label=str(flat[0]))


def _boxes(
    results: Sequence[Mapping[str, Any]],
    picture: Image,
    labels: Sequence[str] | None,
    where: str,
    reading: ImageReader,
) -> tuple[Box, ...]:
    boxes: list[Box] = []
    shapes = [result for result in results if str(result.get("type", "")).endswith("labels")]
    if not shapes:
        reading.add(FaultKind.LABELS_EMPTY, where, f"{where} has no shapes")
    for position, result in enumerate(shapes, start=1):
        at = f"{where}, result {position}"
        with reading.tolerate(where):
            value = result.get("value")
            if not isinstance(value, dict):
                raise FaultError(FaultKind.BOX_MALFORMED, f"{at} has no value")
            named = value.get(str(result["type"])) or value.get("labels") or []
            if not named:
                raise FaultError(FaultKind.ROW_INCOMPLETE, f"{at} has no label")
            if labels is not None and named[0] not in labels:
                continue
            size = (result.get("original_width"), result.get("original_height"))
            frame = Frame(picture, size, at)
            box = frame.box(_edges(value, result, picture, at), str(named[0]), at)
            if box in boxes:
                raise FaultError(FaultKind.ROW_REPEATED, f"{at} repeats an earlier shape")
            boxes.append(box)
    return tuple(boxes)


def _edges(
    value: Mapping[str, Any], result: Mapping[str, Any], picture: Image, where: str
) -> tuple[float, float, float, float]:
    """The upright box around a shape, in pixels."""
    if result.get("image_rotation"):
        raise FaultError(
            FaultKind.BOX_MALFORMED, f"{where}: the image was turned while it was labelled"
        )
    across = float(result.get("original_width") or picture.width) / 100
    down = float(result.get("original_height") or picture.height) / 100
    try:
        if "points" in value:
            corners = [(float(x) * across, float(y) * down) for x, y in value["points"]]
        else:
            names = ("x", "y", "width", "height") if "width" in value else ELLIPSE
            a, b, c, d = (float(value[name]) for name in names)
            turn = math.radians(float(value.get("rotation") or 0))
            shape = (a * across, b * down, c * across, d * down)
            corners = _corners(shape, turn, names is ELLIPSE)
    except (KeyError, TypeError, ValueError) as error:
        raise FaultError(
            FaultKind.BOX_MALFORMED, f"{where}: the shape {value} has no numbers ({error})"
        ) from error
    if not corners:
        raise FaultError(FaultKind.BOX_MALFORMED, f"{where}: the shape has no points")
    xs, ys = zip(*corners, strict=True)
    if len(corners) == 4 and not value.get("rotation") and "width" in value:
        return corners[0] + corners[2]  # which may be the wrong way round
    return min(xs), min(ys), max(xs), max(ys)


ELLIPSE = ("x", "y", "radiusX", "radiusY")


def _corners(shape: tuple[float, float, float, float], turn: float, ellipse: bool) -> list[Point]:
    """Corners of a rectangle, turned about its first one; or the box around a turned ellipse."""
    x, y, width, height = shape
    sine, cosine = math.sin(turn), math.cos(turn)
    if ellipse:
        across, down = math.hypot(width * cosine, height * sine), math.hypot(
            width * sine, height * cosine
        )  # fmt: skip
        return [(x - across, y - down), (x + across, y + down)]
    return [
        (x + dx * cosine - dy * sine, y + dx * sine + dy * cosine)
        for dx, dy in ((0.0, 0.0), (width, 0.0), (width, height), (0.0, height))
    ]
