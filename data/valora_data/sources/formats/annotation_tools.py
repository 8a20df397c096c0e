"""Exports of annotation tools: CVAT and Label Studio."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree.ElementTree import Element

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Shape
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.voc import child_text, parse_xml

SHAPES = ("box", "mask", "polygon", "polyline", "points", "ellipse")
Result = Mapping[str, Any]


def _around(points: Iterable[complex]) -> Edges:
    xs, ys = zip(*((point.real, point.imag) for point in points), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def _around_turned(edges: Edges, degrees: float, about: complex) -> Edges:
    """The upright box around one that is turned clockwise about a point."""
    x0, y0, x1, y1 = edges
    turn = cmath.rect(1, math.radians(degrees))
    corners = (complex(x, y) for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1)))
    return _around(about + (corner - about) * turn for corner in corners) if degrees else edges


class CvatFormat(AnnotatedFormat):
    """`CVAT for images 1.1`: an XML file or its folder; shapes count as the box around them."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        file = _cvat_file(location.text)
        return file.is_file() and file.suffix.lower() == ".xml"

    def parts(self, source: Source) -> Mapping[Split | None, tuple[Path, str | None]]:
        file = _cvat_file(source.location)
        names = sorted(image.get("subset") or "" for image in _cvat_root(file).iter("image"))
        found = ((files.SPLIT_NAMES.get(name.lower()), name) for name in names)
        splits = {split: (file, name) for split, name in found if split}
        return files.with_rest(splits, (file, None))

    def records(
        self, source: Source, part: tuple[Path, str | None], reading: ImageReader
    ) -> Iterator[Record]:
        file, wanted = part
        root = _cvat_root(file)
        entries = [one for one in root.iter("image") if wanted in (None, one.get("subset"))]
        if not entries:
            raise DataError(f"{file.name} lists no images: the data set is empty")
        declared = [child_text(label, "name") for label in root.iter("label")]
        if source.labels and declared:
            annotated.check_labels(file.name, declared, source.labels)
        reading.total += len(entries)
        beside = file.parent / "images"
        finder = files.Finder(Path(source.images or (beside if beside.is_dir() else file.parent)))
        for entry in entries:
            name, subset = entry.get("name") or "", entry.get("subset")
            where = name or f"{file.name}: image {entry.get('id')}"
            with reading.tolerate(where, where):
                if not name:
                    raise KeyError("name")
                path = finder.find(f"{subset}/{name}" if subset else name)
                shapes = annotated.numbered(
                    f"{name}, shape", (one for one in entry if one.tag in SHAPES)
                )
                size = entry.get("width"), entry.get("height")
                yield Record((path,), name, shapes, _cvat_shape, size=size)
        if wanted is None:
            annotated.note_unlisted(finder, reading)


def _cvat_file(path: str) -> Path:
    return Path(path) / "annotations.xml" if Path(path).is_dir() else Path(path)


def _cvat_root(file: Path) -> Element:
    root = parse_xml(file)
    tracks = next(root.iter("track"), None) is not None
    if root.tag != "annotations" or tracks:
        found = "holds tracks of a video" if tracks else f"is no export of CVAT (it is {root.tag})"
        text = f"{file.name} {found}: export the task in the format `CVAT for images 1.1`"
        raise DataError(f"{text}, with its images")
    return root


def _cvat_shape(shape: Element) -> Shape:
    label, given = shape.get("label"), shape.attrib
    if shape.tag == "ellipse":
        raise ValueError("ellipses are not read, draw a box")
    if shape.tag == "mask":
        sides = ("left", "top", "width", "height")
        return label, annotated.corners([given[side] for side in sides])
    if shape.tag != "box":
        points = (point.split(",") for point in given["points"].split(";"))
        return label, _around(complex(float(x), float(y)) for x, y in points)
    edges = annotated.four_numbers([given[side] for side in ("xtl", "ytl", "xbr", "ybr")])
    centre = complex(edges[0] + edges[2], edges[1] + edges[3]) / 2
    return label, _around_turned(edges, float(given.get("rotation") or 0), centre)


class LabelStudioFormat(AnnotatedFormat):
    """An export as `JSON`; `Source.images` is the folder of the images.

    The ground truth counts, or the first annotation that was not cancelled; polygons and turned
    rectangles as the box around them. Images are looked for by ever shorter ends of their paths.
    """

    answers = frozenset({"objects", "label"})

    def recognises(self, location: Location) -> bool:
        """A list of tasks with `data` and `annotations`; JSON-MIN, to be refused."""
        return {"data", "annotations"} <= location.keys or "annotation_id" in location.keys

    def guess_task(self, path: str) -> Task:
        tasks = _tasks(annotation_file(Path(path)))
        kinds = (one.get("type") for task in tasks for one in _results(task) or ())
        return Task.CLASSIFICATION if next(kinds, "") == "choices" else Task.DETECTION

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        entries = _tasks(part)
        reading.total += len(entries)
        folder = source.image_folder
        finder = files.Finder(folder)
        for position, entry in enumerate(entries):
            number = entry.get("id", position) if isinstance(entry, dict) else position
            where = f"{part.name}, task {number}"
            with reading.tolerate(where, where):
                path = finder.find(_place(files.as_object(entry), source.columns))
                results = _results(entry)
                if results is None:
                    raise FaultError(FaultKind.NOT_LABELLED, f"{path.name} has no annotation")
                key = path.relative_to(folder) if path.is_relative_to(folder) else path
                record = Record((path,), key.as_posix(), shape=_studio_shape)
                if source.task.spec.detects:
                    found = [one for one in results if str(one.get("type", "")).endswith("labels")]
                    for one in found[:1]:
                        record.size = one.get("original_width"), one.get("original_height")
                    record.entries = list(annotated.numbered(f"{where}, result", found))
                else:
                    values = [one["value"] for one in results]
                    choices = [value["choices"] for value in values if "choices" in value]
                    if len(choices) != 1 or len(choices[0]) != 1:
                        raise ValueError(f"expected one choice, got {choices}")
                    record.answer = Answer(label=str(choices[0][0]))
                yield record
        annotated.note_unlisted(finder, reading)


def _tasks(path: Path) -> list[Any]:
    found = files.load_rows(path, "tasks")
    if isinstance(found[0], dict) and "annotation_id" in found[0]:
        raise DataError(f"{path.name} is an export as JSON-MIN: export it as JSON")
    return found


def _results(entry: Any) -> list[Result] | None:
    given = entry.get("annotations") if isinstance(entry, dict) else None
    sound = [one for one in given or () if isinstance(one, dict) and not one.get("was_cancelled")]
    sound.sort(key=lambda annotation: not annotation.get("ground_truth"))
    return [one for one in sound[0].get("result") or () if isinstance(one, dict)] if sound else None


def _place(entry: Result, columns: Mapping[str, str]) -> str:
    data = files.as_object(entry["data"])
    texts = {key: value for key, value in data.items() if isinstance(value, str)}
    names = [columns["image"]] if "image" in columns else ["image", "img", "image_url", *texts]
    for name in names:
        end = unquote(texts.get(name, "")).lower().rsplit(".", 1)[-1]
        if f".{end}" in files.IMAGES or (name == "image" and texts.get(name)):
            address = urlsplit(texts[name])
            local = parse_qs(address.query).get("d")
            # Relative: it is looked for below the folder, not where it was on the server.
            return (local[0] if local else unquote(address.path)).lstrip("/")
    raise KeyError("image (source.columns.image names another key)")


def _studio_shape(result: Result) -> Shape:
    value = result["value"]
    label = (value.get(str(result["type"])) or value.get("labels") or [None])[0]
    if result.get("image_rotation"):
        raise ValueError("the image was turned while it was labelled")
    if "points" in value:
        points = (complex(float(x), float(y)) / 100 for x, y in value["points"])
        return label, annotated.shares(*_around(points))
    if "width" not in value:
        raise ValueError(f"{result['type']} are not read, draw a rectangle")
    x0, y0, x1, y1 = annotated.corners([value[side] for side in ("x", "y", "width", "height")])
    turn = float(value.get("rotation") or 0)

    def edges(width: float, height: float) -> Edges:  # it turns about its upper left corner
        box = x0 * width / 100, y0 * height / 100, x1 * width / 100, y1 * height / 100
        return _around_turned(box, turn, complex(*box[:2]))

    return label, edges
