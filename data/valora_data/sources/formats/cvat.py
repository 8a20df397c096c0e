"""CVAT for images 1.1: one XML file for all images, with boxes, polygons, masks and tags."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.coco import note_unlisted
from valora_data.sources.formats.folders import SPLIT_NAMES
from valora_data.sources.formats.labelled import Frame, ImageReader, Reading, check_labels
from valora_data.sources.formats.xml import number, parse_xml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from PIL.Image import Image

FILE = "annotations.xml"
SHAPES = ("box", "polygon", "polyline", "points", "ellipse", "mask")
Edges = tuple[float, float, float, float]


class CvatFormat(SourceFormat):
    """The XML file of an export, or the folder that holds it; `subset` of an image is its split."""

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

    def open(self, source: Source) -> Splits:
        """The splits that subsets are named after, or all images as one piece."""
        file = _file(source.location)
        subsets = {entry.get("subset") for entry in _images(_root(file))}
        named = {
            split: name
            for name in sorted(filter(None, subsets))
            if (split := SPLIT_NAMES.get(name.lower())) is not None
        }
        places: Mapping[Split | None, str | None]
        places = take_missing_from_train(named) if named else {None: None}
        return {split: partial(read_cvat, file, subset, source) for split, subset in places.items()}

    def reads(self, source: Source) -> Iterator[Path]:
        """The XML file and the images that it lists."""
        file = _file(source.location)
        yield file
        for entry in _images(_root(file)):
            yield _place(_folder(file, source), entry)


def read_cvat(file: Path, subset: str | None, source: Source) -> Iterator[Sample]:
    """Read the images of an export with their shapes or tags.

    Polygons, masks, ellipses, points and rotated boxes count as the upright box around them.

    Args:
        file: The XML file.
        subset: Only images of this subset; None for all.
        source: Task, labels, folder of the images and reader.

    Yields:
        One sample per image that decodes; its id is the name that CVAT gives the image.

    Raises:
        DataError: If the file cannot be read or is of a video, it lists no images, a label is not
            declared, or too many images have faults.
    """
    root = _root(file)
    entries = [entry for entry in _images(root) if subset in (None, entry.get("subset"))]
    if not entries:
        raise DataError(f"{file.name} lists no images of {subset or 'any subset'}: it is empty")
    declared = [(label.findtext("name") or "").strip() for label in root.iter("label")]
    labels = source.labels or None
    if labels and declared:
        check_labels(file.name, declared, labels)
    folder = _folder(file, source)
    with Reading(source.reader, file.name, len(entries)) as reading:
        seen: set[str] = set()
        once = []
        for entry in entries:
            name = entry.get("name") or ""
            with reading.tolerate(name or f"image {entry.get('id')}"):
                if not name:
                    text = f"{file.name}: image {entry.get('id')} has no name"
                    raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                if name in seen:
                    raise FaultError(FaultKind.IMAGE_TWICE, f"{file.name} lists {name} twice")
                seen.add(name)
                once.append((name, entry))
        paths = [_place(folder, entry) for _, entry in once]
        note_unlisted([_place(folder, entry) for entry in _images(root)], folder, reading)
        for (name, entry), picture in zip(once, reading.open_all(paths), strict=True):
            if picture is None:
                continue
            with reading.tolerate(name):
                if source.task.spec.detects:
                    answer = Answer(_boxes(entry, name, picture, labels, reading))
                else:
                    label = _tag(entry, name, labels, reading)
                    if label is None:
                        continue
                    answer = Answer(label=label)
                yield Sample(name, picture, answer)


def _file(path: str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _folder(file: Path, source: Source) -> Path:
    """Folder of the images: `Source.images`, `images/` beside the file, or the file's folder."""
    if source.images:
        return Path(source.images)
    beside = file.parent / "images"
    return beside if beside.is_dir() else file.parent


def _place(folder: Path, entry: Element) -> Path:
    name, subset = entry.get("name") or "", entry.get("subset") or ""
    within = folder / subset / name
    return within if subset and within.is_file() else folder / name


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


def _images(root: Element) -> list[Element]:
    return list(root.iter("image"))


def _boxes(
    entry: Element,
    name: str,
    picture: Image,
    labels: Sequence[str] | None,
    reading: ImageReader,
) -> tuple[Box, ...]:
    frame = Frame(picture, (entry.get("width"), entry.get("height")), name)
    boxes: list[Box] = []
    counted: defaultdict[str, int] = defaultdict(int)
    for shape in entry:
        if shape.tag not in SHAPES:
            continue
        counted[shape.tag] += 1
        where = f"{name}, {shape.tag} {counted[shape.tag]}"
        with reading.tolerate(name):
            label = shape.get("label") or ""
            if not label:
                raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no label")
            if labels is not None and label not in labels:
                continue
            box = frame.box(_edges(shape, where), label, where)
            if box in boxes:
                raise FaultError(FaultKind.ROW_REPEATED, f"{where} repeats an earlier shape")
            boxes.append(box)
    if not counted:
        reading.add(FaultKind.LABELS_EMPTY, name, f"{name} has no shapes")
    return tuple(boxes)


def _edges(shape: Element, where: str) -> Edges:
    """The upright box around a shape, in pixels."""
    names = {
        "box": ("xtl", "ytl", "xbr", "ybr"),
        "ellipse": ("cx", "cy", "rx", "ry"),
        "mask": ("left", "top", "width", "height"),
    }
    if shape.tag not in names:
        points = [
            [number(text, f"{where}: point") for text in point.split(",")]
            for point in (shape.get("points") or "").split(";")
        ]
        if any(len(point) != 2 for point in points):
            raise FaultError(FaultKind.BOX_MALFORMED, f"{where} has points that are no pairs")
        xs, ys = zip(*points, strict=True)
        return min(xs), min(ys), max(xs), max(ys)
    a, b, c, d = (number(shape.get(edge), f"{where}: {edge}") for edge in names[shape.tag])
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


def _tag(
    entry: Element, name: str, labels: Sequence[str] | None, reading: ImageReader
) -> str | None:
    """The class of an image; None if the domain does not ask for it."""
    tags = list(dict.fromkeys(tag.get("label") or "" for tag in entry.iter("tag")))
    if not tags:
        reading.add(FaultKind.ROW_INCOMPLETE, name, f"{name} has no tag")
        return None
    if labels is not None:
        tags = [tag for tag in tags if tag in labels]
    if len(tags) > 1:
        text = f"{name} has {len(tags)} tags ({', '.join(tags)}), expected one"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return tags[0] if tags else None
