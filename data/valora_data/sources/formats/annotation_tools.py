"""Exports of annotation tools: Pascal VOC, CVAT and Label Studio."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import parse

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Shape

XML = frozenset({".xml"})
SHAPES = ("box", "mask", "polygon", "polyline", "points", "ellipse")
Result = Mapping[str, Any]


def parse_xml(path: Path) -> Element:
    """Root of an XML file, parsed by defusedxml, which expands no entities; or a `FaultError`."""
    try:
        root: Element | None = parse(str(path)).getroot()
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError) as error:
        text = f"{path.name} is not valid XML ({error})"
        raise FaultError(FaultKind.FILE_MALFORMED, text) from error
    assert root is not None, "an XML file without a root is a ParseError"
    return root


class VocFormat(AnnotatedFormat):
    """A folder of images and XML files."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        if not location.path.is_dir() or ".xml" not in location.suffixes:
            return False
        try:
            return parse_xml(files.files_below(location.path, XML)[0]).tag == "annotation"
        except FaultError:
            return True

    def parts(self, source: Source) -> Mapping[Split | None, list[Path]]:
        folder = Path(source.images or source.location)
        images = files.images_below(folder)
        named = {files.spelling(path.stem): path for path in images}
        parts: dict[Split, list[Path]] = {}
        for file in self.lists(source):  # in the order of names: train before trainval
            split = files.SPLIT_NAMES.get(file.stem.replace("trainval", "train"))
            if split is not None and split not in parts:
                lines = filter(str.strip, files.read_text(file).splitlines())
                parts[split] = [
                    named.get(files.spelling(name), images[0].parent / f"{name}.jpg")
                    for name in sorted({line.split()[0] for line in lines})
                ]
        for path in () if parts else images:
            if (split := files.split_in(path.relative_to(folder).parts[:-1])) is None:
                return {None: images}
            parts.setdefault(split, []).append(path)
        return files.with_rest(parts, images)

    def lists(self, source: Source) -> Iterator[Path]:
        yield from sorted(Path(source.location).glob("ImageSets/Main/*.txt"))

    def records(self, source: Source, part: list[Path], reading: ImageReader) -> Iterator[Record]:
        whole, below = Path(source.location), Path(source.images or source.location)
        if not files.files_below(whole, XML):
            text = f"{whole} holds no XML files: name the folder that holds both the images and the"
            raise DataError(f"{text} XML files, or the folder of the images as source.images")
        reading.total += len(part)
        images = dict.fromkeys([*part, *files.images_below(below)])
        expected = {image: image.with_suffix(".xml") for image in images}
        labels = annotated.label_files(expected, reading, whole)
        for path in part:
            file, key = labels[path], path.relative_to(below).as_posix()
            record = Record((path,), key, shape=_voc_shape, file=file)
            with reading.tolerate(record.item):
                if file.exists():
                    root = parse_xml(file)
                    record.size = [root.findtext(f"size/{side}") for side in ("width", "height")]
                    record.entries = annotated.numbered(f"{file.name}, object", root.iter("object"))
                yield record


def _voc_shape(element: Element) -> Shape:
    """A box of pixels counted from 1, as the devkit has it: from xmin − 1 to xmax."""
    names = [f"bndbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]
    x0, y0, x1, y1 = annotated.four_numbers([element.findtext(name, "") for name in names])
    # labelImg counts from 0 at the very edge.
    edges = max(x0 - 1, min(x0, 0)), max(y0 - 1, min(y0, 0)), x1, y1
    return element.findtext("name", "").strip(), edges


def _around(points: Any, unit: float = 1) -> Edges:
    """The box around points, which are in so many parts of a pixel or of the image."""
    xs, ys = zip(*((float(x) / unit, float(y) / unit) for x, y in points), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


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
        (file, wanted), root = part, _cvat_root(part[0])
        entries = [one for one in root.iter("image") if wanted in (None, one.get("subset"))]
        if not entries:
            raise DataError(f"{file.name} lists no images: the data set is empty")
        declared = [label.findtext("name", "").strip() for label in root.iter("label")]
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
                drawn = (one for one in entry if one.tag in SHAPES)
                size = entry.get("width"), entry.get("height")
                shapes = annotated.numbered(f"{name}, shape", drawn)
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
        return label, _around(point.split(",") for point in given["points"].split(";"))
    edges = annotated.four_numbers([given[side] for side in ("xtl", "ytl", "xbr", "ybr")])
    if turn := math.radians(float(given.get("rotation") or 0)):  # about the centre
        (x0, y0, x1, y1), cos, sin = edges, abs(math.cos(turn)), abs(math.sin(turn))
        width, height = (x1 - x0) * cos + (y1 - y0) * sin, (x1 - x0) * sin + (y1 - y0) * cos
        x0, y0 = (x0 + x1 - width) / 2, (y0 + y1 - height) / 2
        edges = x0, y0, x0 + width, y0 + height
    return label, edges


class LabelStudioFormat(AnnotatedFormat):
    """An export as `JSON`; the ground truth counts, or the first annotation not cancelled."""

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
                path = finder.find(_image_path(files.as_object(entry), source.columns))
                results = _results(entry)
                if results is None:
                    raise FaultError(FaultKind.NOT_LABELLED, f"{path.name} has no annotation")
                key = path.relative_to(folder) if path.is_relative_to(folder) else path
                if not source.task.spec.detects:
                    values = [one["value"] for one in results]
                    chosen = [label for value in values for label in value.get("choices", ())]
                    yield Record((path,), key.as_posix(), answer=Answer(label=_only_label(chosen)))
                    continue
                found = [one for one in results if str(one.get("type", "")).endswith("labels")]
                sizes = [(one.get("original_width"), one.get("original_height")) for one in found]
                shapes = list(annotated.numbered(f"{where}, result", found))
                yield Record((path,), key.as_posix(), shapes, _studio_shape, size=[*sizes, ()][0])
        annotated.note_unlisted(finder, reading)


def _tasks(path: Path) -> list[Any]:
    found = files.load_rows(path, "tasks")
    if isinstance(found[0], dict) and "annotation_id" in found[0]:
        raise DataError(f"{path.name} is an export as JSON-MIN: export it as JSON")
    return found


def _results(entry: Any) -> list[Result] | None:
    given = _objects(entry.get("annotations")) if isinstance(entry, dict) else []
    sound = [one for one in given if not one.get("was_cancelled")]
    sound.sort(key=lambda annotation: not annotation.get("ground_truth"))
    return _objects(sound[0].get("result")) if sound else None


def _objects(entries: Any) -> list[Result]:
    return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []


def _image_path(entry: Result, columns: Mapping[str, str]) -> str:
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


def _only_label(labels: Any) -> str:
    if not isinstance(labels, list) or len(labels) != 1 or not isinstance(labels[0], str | int):
        raise ValueError(f"expected one label, got {labels}")
    return str(labels[0])


def _studio_shape(result: Result) -> Shape:
    value = result["value"]
    label = _only_label(value.get(str(result["type"])) or value.get("labels"))
    if result.get("image_rotation") or value.get("rotation"):
        raise ValueError("the image or the box is turned, draw it upright")
    if "points" in value:
        return label, annotated.shares(*_around(value["points"], 100))
    if "width" not in value:
        raise ValueError(f"{result['type']} are not read, draw a rectangle")
    edges = annotated.corners([value[side] for side in ("x", "y", "width", "height")])
    return label, annotated.shares(*(edge / 100 for edge in edges))
