"""CVAT for images 1.1: one XML file for all images, with boxes, polygons, masks and tags."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import take_missing_from_train
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, collected
from valora_data.sources.formats.files import SPLIT_NAMES, Finder
from valora_data.sources.formats.labelled import Shape, check_labels
from valora_data.sources.formats.xml import number, parse_xml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from xml.etree.ElementTree import Element

    from valora_data.schema import Split
    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import Edges, ImageReader

FILE = "annotations.xml"
SIDES: Mapping[str, tuple[str, str, str, str]] = {
    "box": ("xtl", "ytl", "xbr", "ybr"), "ellipse": ("cx", "cy", "rx", "ry"),
    "mask": ("left", "top", "width", "height"),
}  # fmt: skip
SHAPES = (*SIDES, "polygon", "polyline", "points")


class CvatFormat(AnnotatedFormat):
    """The XML file of an export, or the folder that holds it; `subset` of an image is its split.

    Polygons, masks, ellipses, points and rotated boxes count as the upright box around them.
    """

    files = "CVAT XML"

    def supports(self, task: Task) -> bool:
        """Object detection by shapes, classification by tags."""
        return task.spec.detects or (task.spec.answer == "label" and not task.spec.video)

    def recognises(self, location: Location) -> bool:
        """XML files, and folders with `annotations.xml`."""
        path = location.path
        return (path / FILE).is_file() or (path.is_file() and path.suffix.lower() == ".xml")

    def guess_task(self, path: str) -> Task:
        """Classification if images have tags and no shapes."""
        root = _root(_file(path))
        shapes = any(next(root.iter(shape), None) is not None for shape in SHAPES)
        tagged = next(root.iter("tag"), None) is not None
        return Task.CLASSIFICATION if tagged and not shapes else Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, str | None]:
        """The splits that subsets are named after, or all images as one piece."""
        entries = _root(_file(source.location)).iter("image")
        named = {
            split: name
            for name in sorted(filter(None, {entry.get("subset") for entry in entries}))
            if (split := SPLIT_NAMES.get(name.lower())) is not None
        }
        return take_missing_from_train(named) if named else {None: None}

    def name(self, source: Source, part: str | None) -> str:
        """Name of the XML file."""
        return _file(source.location).name

    def folder(self, source: Source, part: str | None) -> Path | None:
        """The folder of the images, if it is that of one part."""
        return _folder(source) if part is None else None

    def lists(self, source: Source) -> Iterator[Path]:
        """The XML file."""
        yield _file(source.location)

    def records(self, source: Source, part: str | None, reading: ImageReader) -> Iterator[Record]:
        """Images with their shapes or tags; ids are the names that CVAT gives them."""
        file = _file(source.location)
        root = _root(file)
        entries = [one for one in root.iter("image") if part in (None, one.get("subset"))]
        if not entries:
            raise DataError(f"{file.name} lists no images of {part or 'any subset'}: it is empty")
        declared = [(label.findtext("name") or "").strip() for label in root.iter("label")]
        if source.labels and declared:
            check_labels(file.name, declared, source.labels)
        reading.total += len(entries)
        finder = Finder(_folder(source))
        for entry in entries:
            name, subset = entry.get("name") or "", entry.get("subset")
            with reading.tolerate(name or f"image {entry.get('id')}"):
                if not name:
                    text = f"{file.name}: image {entry.get('id')} has no name"
                    raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                path = finder.find(f"{subset}/{name}" if subset else name)
                record = Record(path, name, size=(entry.get("width"), entry.get("height")))
                if source.task.spec.detects:
                    record.shapes = _shapes(entry, name, reading)
                else:
                    record.answer = _tagged(entry, name, source, reading)
                yield record


def _file(path: str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _folder(source: Source) -> Path:
    """Folder of the images: `Source.images`, `images/` beside the file, or the file's folder."""
    if source.images:
        return Path(source.images)
    beside = _file(source.location).parent
    return beside / "images" if (beside / "images").is_dir() else beside


def _root(file: Path) -> Element:
    root = parse_xml(file)
    if root.tag != "annotations":
        raise DataError(
            f"{file.name} is no export of CVAT (its root is {root.tag}): export the task in the "
            "format `CVAT for images 1.1`"
        )
    if next(root.iter("track"), None) is not None:
        raise DataError(
            f"{file.name} holds tracks of a video: export the task in the format `CVAT for images "
            "1.1`, with its images"
        )
    return root


def _shapes(entry: Element, name: str, reading: ImageReader) -> list[Shape]:
    counted: Counter[str] = Counter()

    def shape(one: Element, _: int) -> Shape:
        counted[one.tag] += 1
        where = f"{name}, {one.tag} {counted[one.tag]}"
        if not one.get("label"):
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no label")
        return Shape(str(one.get("label")), _edges(one, where), where)

    return collected((one for one in entry if one.tag in SHAPES), shape, name, reading)


def _edges(shape: Element, where: str) -> Edges:
    """The upright box around a shape, in pixels."""
    if shape.tag not in SIDES:
        points = [
            [number(text, f"{where}: point") for text in point.split(",")]
            for point in (shape.get("points") or "").split(";")
        ]
        if any(len(point) != 2 for point in points):
            raise FaultError(FaultKind.BOX_MALFORMED, f"{where} has points that are no pairs")
        xs, ys = zip(*points, strict=True)
        return min(xs), min(ys), max(xs), max(ys)
    a, b, c, d = (number(shape.get(side), f"{where}: {side}") for side in SIDES[shape.tag])
    if shape.tag == "mask":
        return a, b, a + c, b + d
    if shape.tag == "ellipse":
        a, b, c, d = a - c, b - d, a + c, b + d
    return _turned((a, b, c, d), number(shape.get("rotation") or "0", f"{where}: rotation"))


def _turned(edges: Edges, degrees: float) -> Edges:
    """The upright box around a box that is turned about its centre."""
    x0, y0, x1, y1 = edges
    if not degrees or not all(map(math.isfinite, (*edges, degrees))):
        return edges
    sine, cosine = abs(math.sin(math.radians(degrees))), abs(math.cos(math.radians(degrees)))
    width, height = x1 - x0, y1 - y0
    half = (width * cosine + height * sine) / 2, (width * sine + height * cosine) / 2
    middle = (x0 + x1) / 2, (y0 + y1) / 2
    return middle[0] - half[0], middle[1] - half[1], middle[0] + half[0], middle[1] + half[1]


def _tagged(entry: Element, name: str, source: Source, reading: ImageReader) -> Answer | None:
    """The class of an image; None if the domain does not ask for it."""
    tags = list(dict.fromkeys(tag.get("label") or "" for tag in entry.iter("tag")))
    if not tags:
        reading.add(FaultKind.ROW_INCOMPLETE, name, f"{name} has no tag")
        return None
    asked = [tag for tag in tags if not source.labels or tag in source.labels]
    if len(asked) > 1:
        text = f"{name} has {len(asked)} tags ({', '.join(asked)}), expected one"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return Answer(label=asked[0]) if asked else None
