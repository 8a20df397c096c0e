"""CVAT for images 1.1: one XML file for all images, with boxes, polygons, masks and tags."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree.ElementTree import Element

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Edges,
    Record,
    Shape,
    check_labels,
    collected,
    note_unlisted,
    number,
)
from valora_data.sources.formats.files import SPLIT_NAMES, Finder, with_rest
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.voc import child_text, parse_xml

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
    answers = frozenset({"objects", "label"})

    def recognises(self, location: Location) -> bool:
        """XML files, and folders with `annotations.xml`."""
        path = location.path
        return (path / FILE).is_file() or (path.is_file() and path.suffix.lower() == ".xml")

    def guess_task(self, path: str) -> Task:
        """Classification if images have tags and no shapes."""
        tags = {element.tag for element in _root(_file(path)).iter()}
        return Task.CLASSIFICATION if "tag" in tags and not tags & {*SHAPES} else Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, tuple[Path, str | None]]:
        """The splits that subsets are named after, or all images as one piece."""
        file = _file(source.location)
        names = sorted(image.get("subset") or "" for image in _root(file).iter("image"))
        splits = {SPLIT_NAMES.get(name.lower()): (file, name) for name in names}
        return with_rest({split: part for split, part in splits.items() if split}, (file, None))

    def records(
        self, source: Source, part: tuple[Path, str | None], reading: ImageReader
    ) -> Iterator[Record]:
        """Images with their shapes or tags; ids are the names that CVAT gives them."""
        file, wanted = part
        root = _root(file)
        entries = [one for one in root.iter("image") if wanted in (None, one.get("subset"))]
        if not entries:
            raise DataError(f"{file.name} lists no images: the data set is empty")
        declared = [child_text(label, "name") for label in root.iter("label")]
        if source.labels and declared:
            check_labels(file.name, declared, source.labels)
        reading.total += len(entries)
        beside = file.parent / "images"
        finder = Finder(Path(source.images or (beside if beside.is_dir() else file.parent)))
        for entry in entries:
            name, subset = entry.get("name") or "", entry.get("subset")
            with reading.tolerate(name or f"image {entry.get('id')}"):
                if not name:
                    text = f"{file.name}: image {entry.get('id')} has no name"
                    raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                path = finder.find(f"{subset}/{name}" if subset else name)
                record = Record((path,), name, size=(entry.get("width"), entry.get("height")))
                if source.task.spec.detects:
                    record.shapes = _shapes(entry, name, reading)
                else:
                    record.answer = _tagged(entry, name, source)
                yield record
        if wanted is None:
            note_unlisted(finder, reading)


def _file(path: str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _root(file: Path) -> Element:
    root = parse_xml(file)
    tracks = next(root.iter("track"), None) is not None
    if root.tag != "annotations" or tracks:
        found = "holds tracks of a video" if tracks else f"is no export of CVAT (it is {root.tag})"
        raise DataError(
            f"{file.name} {found}: export the task in the format `CVAT for images 1.1`, with its "
            "images"
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
        points = [point.split(",") for point in (shape.get("points") or "").split(";")]
        if any(len(point) != 2 for point in points):
            raise FaultError(FaultKind.BOX_MALFORMED, f"{where} has points that are no pairs")
        xs, ys = ([number(point[axis], f"{where}: point") for point in points] for axis in (0, 1))
        return min(xs), min(ys), max(xs), max(ys)
    a, b, c, d = (number(shape.get(side), f"{where}: {side}") for side in SIDES[shape.tag])
    if shape.tag == "mask":
        return a, b, a + c, b + d
    if shape.tag == "ellipse":
        a, b, c, d = a - c, b - d, a + c, b + d
    turn = math.radians(number(shape.get("rotation") or "0", f"{where}: rotation"))
    if not turn or not all(map(math.isfinite, (a, b, c, d, turn))):
        return a, b, c, d
    # Turned about its centre.
    sine, cosine = abs(math.sin(turn)), abs(math.cos(turn))
    x, y, across, down = (a + c) / 2, (b + d) / 2, (c - a) / 2, (d - b) / 2
    right, bottom = across * cosine + down * sine, across * sine + down * cosine
    return x - right, y - bottom, x + right, y + bottom


def _tagged(entry: Element, name: str, source: Source) -> Answer | None:
    """The class of an image; None if the domain does not ask for it."""
    tags = list(dict.fromkeys(tag.get("label") or "" for tag in entry.iter("tag")))
    if not tags:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{name} has no tag")
    asked = [tag for tag in tags if not source.labels or tag in source.labels]
    if len(asked) > 1:
        text = f"{name} has {len(asked)} tags ({', '.join(asked)}), expected one"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return Answer(label=asked[0]) if asked else None
