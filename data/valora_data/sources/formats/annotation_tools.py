"""Exports of annotation tools: CVAT, Label Studio and FiftyOne."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree.ElementTree import Element

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Scaled
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.rows import read_count
from valora_data.sources.formats.voc import child_text, parse_xml

SIDES: Mapping[str, tuple[str, str, str, str]] = {
    "box": ("xtl", "ytl", "xbr", "ybr"), "ellipse": ("cx", "cy", "rx", "ry"),
    "mask": ("left", "top", "width", "height"),
}  # fmt: skip
SHAPES = (*SIDES, "polygon", "polyline", "points")
"""Shapes of CVAT."""


class CvatFormat(AnnotatedFormat):
    """`CVAT for images 1.1`: one XML file for all images, or the folder that holds it.

    `subset` of an image is its split. Polygons, masks, ellipses, points and rotated boxes count as
    the upright box around them.
    """

    files = "CVAT XML"
    answers = frozenset({"objects", "label"})

    def recognises(self, location: Location) -> bool:
        """XML files, and folders with `annotations.xml`."""
        file = _below(location.path, "annotations.xml")
        return file.is_file() and file.suffix.lower() == ".xml"

    def guess_task(self, path: str) -> Task:
        """Classification if images have tags and no shapes."""
        tags = {element.tag for element in _root(path)[1].iter()}
        return Task.CLASSIFICATION if "tag" in tags and not tags & {*SHAPES} else Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, tuple[Path, str | None]]:
        """The splits that subsets are named after, or all images as one piece."""
        file, root = _root(source.location)
        names = sorted(image.get("subset") or "" for image in root.iter("image"))
        splits = {files.SPLIT_NAMES.get(name.lower()): (file, name) for name in names}
        return files.with_rest(
            {split: part for split, part in splits.items() if split}, (file, None)
        )

    def records(
        self, source: Source, part: tuple[Path, str | None], reading: ImageReader
    ) -> Iterator[Record]:
        """Images with their shapes or tags; ids are the names that CVAT gives them."""
        wanted = part[1]
        file, root = _root(source.location)
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
                record = Record((path,), name, size=(entry.get("width"), entry.get("height")))
                if source.task.spec.detects:
                    record.shapes = annotated.read_shapes(
                        reading, name, _cvat_shapes(entry), _cvat_shape
                    )
                else:
                    record.answer = _tagged(entry, source)
                yield record
        if wanted is None:
            annotated.note_unlisted(finder, reading)


def _below(path: Path | str, name: str) -> Path:
    """A file, or the one of this name in a folder."""
    return Path(path) / name if Path(path).is_dir() else Path(path)


def _root(path: str) -> tuple[Path, Element]:
    file = _below(path, "annotations.xml")
    root = parse_xml(file)
    tracks = next(root.iter("track"), None) is not None
    if root.tag != "annotations" or tracks:
        found = "holds tracks of a video" if tracks else f"is no export of CVAT (it is {root.tag})"
        raise DataError(
            f"{file.name} {found}: export the task in the format `CVAT for images 1.1`, with its "
            "images"
        )
    return file, root


def _cvat_shapes(image: Element) -> Iterator[tuple[str, Element]]:
    """The shapes of an image with their places."""
    counted: Counter[str] = Counter()
    for one in image:
        if one.tag in SHAPES:
            counted[one.tag] += 1
            yield f"{image.get('name')}, {one.tag} {counted[one.tag]}", one


def _cvat_shape(shape: Element) -> tuple[str | None, Edges]:
    """The label of a shape, and the upright box around it in pixels."""
    label = shape.get("label")
    if shape.tag not in SIDES:
        points = [map(float, one.split(",")) for one in (shape.get("points") or "").split(";")]
        xs, ys = zip(*points, strict=True)
        return label, (min(xs), min(ys), max(xs), max(ys))
    a, b, c, d = (annotated.number(shape.get(side), side) for side in SIDES[shape.tag])
    if shape.tag == "mask":
        return label, (a, b, a + c, b + d)
    if shape.tag == "ellipse":
        a, b, c, d = a - c, b - d, a + c, b + d
    turn = annotated.number(shape.get("rotation") or "0", "rotation")
    if not turn:
        return label, (a, b, c, d)
    across, down = (c - a) / 2, (d - b) / 2
    return label, _turned((-across, -down, across, down), turn, (a + c) / 2, (b + d) / 2)


def _turned(box: Edges, degrees: float, x: float, y: float) -> Edges:
    """The upright box around a box, given from (x, y), that is turned clockwise about this."""
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    places = [(u, v) for u in box[0::2] for v in box[1::2]]
    xs = [x + u * cosine - v * sine for u, v in places]
    ys = [y + u * sine + v * cosine for u, v in places]
    return min(xs), min(ys), max(xs), max(ys)


def _tagged(image: Element, source: Source) -> Answer | None:
    """The class of an image; None if the domain does not ask for it."""
    tags = list(dict.fromkeys(tag.get("label") or "" for tag in image.iter("tag")))
    if not tags:
        raise KeyError("tag")
    asked = [tag for tag in tags if not source.labels or tag in source.labels]
    if len(asked) > 1:
        text = f"has {len(asked)} tags ({', '.join(asked)}), expected one"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return Answer(label=asked[0]) if asked else None


Result = Mapping[str, Any]
MIN_SHAPES = ("rectanglelabels", "polygonlabels", "ellipselabels", "choices", "text", "number")
"""Types of results by which Label Studio's `JSON-MIN` marks them."""
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
    """`JSON` or `JSON-MIN`; `Source.images` is the folder of the images.

    Of several annotations of a task the ground truth is taken, or else the first that was not
    cancelled. Tasks without one are left out. Polygons, ellipses and turned rectangles, in percent
    of the image, count as the upright box around them. Paths are those of the server that the
    images were labelled on: images are looked for by ever shorter ends of them.
    """

    files = "Label Studio JSON"
    answers = frozenset({"objects", "label", "captions", "count"})

    def recognises(self, location: Location) -> bool:
        """A list of tasks with `data` and `annotations`, or of annotated images (`JSON-MIN`)."""
        return {"data", "annotations"} <= location.keys or "annotation_id" in location.keys

    def guess_task(self, path: str) -> Task:
        """The task that the first result belongs to."""
        entries = files.load_rows(annotation_file(Path(path)), "tasks")
        found = (one for entry in entries for one in (_results(entry) or ()))
        kind = KINDS.get(str(next(found, {}).get("type")))
        return Task.DETECTION if kind is None else kind[2]

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """Images of the tasks that are labelled; ids are their paths as they were found."""
        entries = files.load_rows(part, "tasks")
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
                record = Record((path,), key.as_posix())
                if source.task.spec.detects:
                    found = [one for one in results if str(one.get("type", "")).endswith("labels")]
                    for one in found[:1]:
                        record.size = one.get("original_width"), one.get("original_height")
                    shapes = annotated.numbered(f"{where}, result", found)
                    record.shapes = annotated.read_shapes(reading, where, shapes, _studio_shape)
                else:
                    record.answer = _answer(results, source.task.spec.answer)
                yield record
        annotated.note_unlisted(finder, reading)


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


def _place(entry: Result, columns: Mapping[str, str]) -> str:
    """Path of a task's image on the server."""
    data = files.as_object(entry.get("data", entry))
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


def _answer(results: list[Result], wanted: str) -> Answer:
    kind, key = next((kind, key) for kind, (field, key, _) in KINDS.items() if field == wanted)
    values = [one.get("value", {}).get(key) for one in results if one.get("type") == kind]
    listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
    found = [one for one in listed if one is not None and str(one).strip()]
    if not found:
        raise KeyError(f"answer of type {kind}")
    if kind == "textarea":
        return Answer(captions=tuple(str(text).strip() for text in found))
    if len(found) > 1:
        raise FaultError(FaultKind.LABEL_MALFORMED, f"expected one answer, got {found}")
    return Answer(count=read_count(found[0])) if kind == "number" else Answer(label=str(found[0]))


def _studio_shape(result: Result) -> tuple[Any, Scaled]:
    """The label of a result, and the upright box around its shape."""
    value = result.get("value") or {}
    named = value.get(str(result["type"])) or value.get("labels")
    if not named:
        raise KeyError("label")
    if result.get("image_rotation"):
        raise ValueError("the image was turned while it was labelled")
    if "points" in value:
        xs, ys = zip(*((float(x) / 100, float(y) / 100) for x, y in value["points"]), strict=True)
        return named[0], annotated.shares(min(xs), min(ys), max(xs), max(ys))
    ellipse = "width" not in value
    sides = ("x", "y", *(("radiusX", "radiusY") if ellipse else ("width", "height")))
    x, y, across, down = (annotated.number(value[side], side) / 100 for side in sides)
    turn = float(value.get("rotation") or 0)
    if not turn:  # exact, where a rotation by 0 would round
        left, top = (x - across, y - down) if ellipse else (x, y)
        return named[0], annotated.shares(left, top, x + across, y + down)

    def turned(width: float, height: float) -> Edges:
        """Edges of a shape that is turned in pixels: an ellipse, or a box about its corner."""
        a, b, x0, y0 = across * width, down * height, x * width, y * height
        if not ellipse:
            return _turned((0.0, 0.0, a, b), turn, x0, y0)
        sine, cosine = math.sin(math.radians(turn)), math.cos(math.radians(turn))
        right, bottom = math.hypot(a * cosine, b * sine), math.hypot(a * sine, b * cosine)
        return x0 - right, y0 - bottom, x0 + right, y0 + bottom

    return named[0], turned


CLASSES = {"Detections": Task.DETECTION, "Classification": Task.CLASSIFICATION}
"""Class of a FiftyOne field's value, and the task that it answers."""


class FiftyOneFormat(AnnotatedFormat):
    """`FiftyOneDataset`: a folder with `samples.json` and the media.

    Boxes are in shares of the image: x, y of the upper left corner, width, height.
    `columns.objects` or `columns.label` names the field of the labels.
    """

    files = "FiftyOne's samples.json"
    answers = frozenset({"objects", "label"})

    def recognises(self, location: Location) -> bool:
        """A file of `samples` that have a `filepath`, or its folder."""
        file = _below(location.path, "samples.json")
        if file.name != "samples.json" or not file.is_file():
            return False
        try:
            return any("filepath" in sample for sample in _samples(file)[:1])
        except DataError:
            return False

    def guess_task(self, path: str) -> Task:
        """The task of the first field of labels."""
        for sample in _samples(Path(path)):
            for value in sample.values():
                if isinstance(value, dict) and value.get("_cls") in CLASSES:
                    return CLASSES[value["_cls"]]
        return super().guess_task(path)

    def parts(self, source: Source) -> Mapping[Split | None, tuple[Path, Split | None]]:
        """Splits that all samples are tagged with, or all samples as one piece."""
        file = _below(source.location, "samples.json")
        found = [_split(sample) for sample in _samples(file)]
        parts = {split: (file, split) for split in found if split is not None}
        return files.with_rest({} if None in found else parts, (file, None))

    def records(
        self, source: Source, part: tuple[Path, Split | None], reading: ImageReader
    ) -> Iterator[Record]:
        """Samples of a split; ids are their paths, as the export has them."""
        file, split = part
        samples = [one for one in _samples(file) if split in (None, _split(one))]
        if not samples:
            raise DataError(f"{file} lists no samples: export it again")
        reading.total += len(samples)
        finder = files.Finder(Path(source.images) if source.images else file.parent)
        for position, sample in enumerate(samples):
            place = sample.get("filepath")
            where = f"{file.name}, {place if isinstance(place, str) else f'sample {position}'}"
            with reading.tolerate(where, where):
                if not isinstance(place, str):
                    raise KeyError("filepath")
                record = Record((finder.find(place),), place)
                if source.task.spec.detects:
                    value = _field(sample, source.columns.get("objects"), "Detections")
                    found = annotated.numbered(f"{where}, detection", value.get("detections") or ())
                    record.shapes = annotated.read_shapes(reading, record.item, found, _detection)
                else:
                    value = _field(sample, source.columns.get("label"), "Classification")
                    record.answer = Answer(label=str(value["label"]))
                yield record


def _samples(path: Path) -> list[dict[str, Any]]:
    content = files.load_json(_below(path, "samples.json"))
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(entry, dict) for entry in samples):
        raise DataError(
            f"{path} holds no list of samples: export it as fiftyone.types.FiftyOneDataset"
        )
    return samples


def _split(sample: Mapping[str, Any]) -> Split | None:
    """The split that a sample is tagged with."""
    tags = sample.get("tags")
    return files.split_in(str(tag).lower() for tag in (tags if isinstance(tags, list) else ()))


def _detection(found: dict[str, Any]) -> tuple[Any, Scaled]:
    return found.get("label"), annotated.shares(*annotated.corners(found["bounding_box"]))


def _field(sample: Mapping[str, Any], named: str | None, kind: str) -> Mapping[str, Any]:
    """The field with the labels: the named one, `ground_truth`, or the only one of its class."""
    fields = {key: value for key, value in sample.items() if isinstance(value, dict)}
    fitting = {key: value for key, value in fields.items() if value.get("_cls") == kind}
    name = named or (next(iter(fitting)) if len(fitting) == 1 else "ground_truth")
    if name in fitting:
        return fitting[name]
    if kind == "Detections" and sample.get(name, {}) is None:
        return {}  # labelled as holding nothing
    column = "objects" if kind == "Detections" else "label"
    raise FaultError(
        FaultKind.ROW_INCOMPLETE if named or fitting else FaultKind.NOT_LABELLED,
        f"has no {kind} in field {name!r}, only in {', '.join(fitting) or 'none'} "
        f"(source.columns.{column} names another)",
    )
