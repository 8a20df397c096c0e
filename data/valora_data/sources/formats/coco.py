"""Labelled data sets in COCO's JSON formats: instances (pixel x, y, width, height), captions."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from valora_data.sources.formats.labelled import (
    IMAGES,
    Frame,
    ImageReader,
    Reading,
    check_labels,
    checked_box,
)
from valora_data.sources.formats.tables import (
    check_unique,
    load_json,
    load_tables,
    sound_entries,
    unique_entries,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from valora_data.sources.formats.tables import Entries


class CocoFormat(SourceFormat):
    """One file of instances or captions."""

    files = "COCO JSON"

    def supports(self, task: Task) -> bool:
        """Object detection and captions."""
        return task.spec.detects or task.spec.answer == "captions"

    def recognises(self, location: Location) -> bool:
        """A JSON object with `images`."""
        return "images" in location.keys

    def guess_task(self, path: str) -> Task:
        """Detection if there are categories."""
        content = load_json(annotation_file(Path(path)))
        return Task.DETECTION if "categories" in content else Task.CAPTION

    def open(self, source: Source) -> Splits:
        """All images as one piece: COCO has a file for each split."""
        file, images = source.file, source.image_folder
        if source.task.spec.answer == "captions":
            return {None: partial(read_coco_captions, file, images, source.reader)}
        return {None: partial(read_coco, file, images, source.labels or None, source.reader)}

    def reads(self, source: Source) -> Iterator[Path]:
        """The file and the images that it lists."""
        file = source.file
        yield file
        yield from listed_images(load_json(file), source.image_folder)


def read_coco(
    json_path: Path,
    image_folder: Path,
    labels: Sequence[str] | None = None,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Read the images of a COCO file with the boxes of some of its categories.

    Category ids may be any integers. Crowd regions are left out, as they are no single objects.

    Args:
        json_path: File with `images`, `annotations` and `categories`.
        image_folder: What `file_name` is relative to.
        labels: Category names that the domain asks for; others are left out. None for all.
        reader: Opens the images; by default a reader that tolerates few broken files.

    Yields:
        One sample per image that decodes, in the file's order; its id is COCO's image id.

    Raises:
        DataError: If the file is missing, corrupt or empty, ids do not match or occur twice, a
            label is not a category, a box lies outside its image, or too many images cannot be
            decoded.
    """
    source = json_path.name
    content = load_tables(json_path, INSTANCES, "COCO instances")
    with Reading(reader, source, len(content["images"])) as reading:
        categories = sound_entries(reading, source, "categories", content["categories"], CATEGORY)
        names = {category["id"]: str(category["name"]) for category in categories}
        check_unique(source, "category", [category["id"] for category in categories])
        images = _sound_images(reading, source, content["images"])
        annotations = sound_entries(
            reading, source, "annotations", content["annotations"], ANNOTATION
        )
        by_image = _by_image(reading, source, annotations, images, names)
        if labels is None:
            labels = _used(categories, annotations)
        check_labels(source, names.values(), labels)
        paths = [image_folder / entry["file_name"] for entry in images]
        note_unlisted(paths, image_folder, reading)
        for entry, picture in zip(images, reading.open_all(paths), strict=True):
            if picture is None:
                continue
            file = entry["file_name"]
            if entry["id"] not in by_image:
                reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no annotation")
            with reading.tolerate(file):
                declared = (entry.get("width"), entry.get("height"))
                frame = Frame(picture, declared, f"{source}, {file}")
                boxes = []
                for annotation in by_image.get(entry["id"], ()):
                    label = names[annotation["category_id"]]
                    with reading.tolerate(file):
                        if label in labels and not annotation.get("iscrowd"):
                            where = f"{source}, annotation {annotation.get('id')} of {file}"
                            edges = coco_edges(annotation["bbox"], where)
                            boxes.append(frame.box(edges, label, where))
                yield Sample(str(entry["id"]), picture, Answer(tuple(boxes)))


def _sound_images(reader: ImageReader, source: str, entries: Entries) -> Entries:
    images = sound_entries(reader, source, "images", entries, IMAGE)
    images = unique_entries(reader, source, "image", "id", images)
    return unique_entries(reader, source, "image", "file_name", images)


def _used(categories: Entries, annotations: Entries) -> tuple[str, ...]:
    """Names of the categories, without those that only group others, as Roboflow writes one."""
    groups = {category.get("supercategory") for category in categories}
    used = {annotation["category_id"] for annotation in annotations}
    return tuple(
        str(category["name"])
        for category in categories
        if category["id"] in used or category["name"] not in groups
        or category["name"] == category.get("supercategory")
    )  # fmt: skip


def listed_images(content: Any, image_folder: Path) -> list[Path]:
    """Files that a table of `images` with `file_name` lists."""
    images = content.get("images") if isinstance(content, dict) else None
    return [
        image_folder / str(entry["file_name"])
        for entry in images or ()
        if isinstance(entry, dict) and "file_name" in entry
    ]


def note_unlisted(paths: Iterable[Path], folder: Path, reader: ImageReader) -> None:
    """Note image files in a folder, or below it, that are not listed."""
    if not reader.thorough:
        return
    listed = {path.resolve() for path in paths}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGES and path.resolve() not in listed:
            name = path.relative_to(folder).as_posix()
            reader.add(FaultKind.IMAGE_UNLISTED, name, f"{name} is not listed")


def read_coco_captions(
    json_path: Path, image_folder: Path, reader: ImageReader | None = None
) -> Iterator[Sample]:
    """Read the images of a COCO file with their captions.

    Args:
        json_path: File with `images` and `annotations` that have a `caption`.
        image_folder: What `file_name` is relative to.
        reader: Opens the images; by default a reader that tolerates few broken files.

    Yields:
        One sample per image that decodes and has captions, in the file's order; its id is COCO's
        image id.

    Raises:
        DataError: If the file is missing, corrupt or empty, ids do not match or occur twice, no
            image has a caption, or too many images cannot be decoded.
    """
    source = json_path.name
    content = load_tables(json_path, CAPTIONS, "COCO captions")
    with Reading(reader, source, len(content["images"])) as reading:
        images = _sound_images(reading, source, content["images"])
        captions: defaultdict[Any, list[str]] = defaultdict(list)
        known = {image["id"] for image in images}
        annotations = sound_entries(reading, source, "annotations", content["annotations"], CAPTION)
        for annotation in annotations:
            with reading.tolerate(f"image {annotation['image_id']}"):
                _check_listed(source, annotation, known)
                text = str(annotation["caption"]).strip()
                if not text:
                    raise FaultError(
                        FaultKind.ROW_INCOMPLETE,
                        f"{source}: the caption of annotation {annotation.get('id')} is empty",
                    )
                captions[annotation["image_id"]].append(text)
        captioned = [image for image in images if captions[image["id"]]]
        if not captioned:
            raise DataError(f"{source}: no image has a caption: the data set is empty")
        for image in images:
            if not captions[image["id"]]:
                file = image["file_name"]
                reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no caption")
        paths = [image_folder / entry["file_name"] for entry in captioned]
        note_unlisted(
            [image_folder / entry["file_name"] for entry in images], image_folder, reading
        )
        for entry, picture in zip(captioned, reading.open_all(paths), strict=True):
            if picture is not None:
                answer = Answer(captions=tuple(captions[entry["id"]]))
                yield Sample(str(entry["id"]), picture, answer)


IMAGE = ("id", "file_name")
ANNOTATION = ("image_id", "category_id", "bbox")
CATEGORY = ("id", "name")
CAPTION = ("image_id", "caption")
INSTANCES = ("images", "annotations", "categories")
CAPTIONS = ("images", "annotations")


def _check_listed(source: str, annotation: dict[str, Any], image_ids: Container[Any]) -> None:
    if annotation["image_id"] not in image_ids:
        raise FaultError(
            FaultKind.ANNOTATION_STRAY,
            f"{source}: annotation {annotation.get('id')} belongs to image "
            f"{annotation['image_id']}, which is not listed",
        )


def _by_image(
    reader: ImageReader,
    source: str,
    annotations: Entries,
    images: Entries,
    names: dict[Any, str],
) -> dict[Any, Entries]:
    """Annotations of every image that has some."""
    found: defaultdict[Any, Entries] = defaultdict(list)
    seen: set[str] = set()
    files = {image["id"]: image["file_name"] for image in images}
    for annotation in annotations:
        item = files.get(annotation["image_id"], f"image {annotation['image_id']}")
        with reader.tolerate(item):
            _check_listed(source, annotation, files)
            if annotation["category_id"] not in names:
                raise FaultError(
                    FaultKind.CLASS_UNKNOWN,
                    f"{source}: annotation {annotation.get('id')} has category id "
                    f"{annotation['category_id']}, which is none of "
                    f"{', '.join(map(str, list(names)[:10]))}",
                )
            key = repr([annotation[name] for name in ANNOTATION] + [annotation.get("iscrowd")])
            if key in seen:
                raise FaultError(
                    FaultKind.ROW_REPEATED,
                    f"{source}: annotation {annotation.get('id')} of {item} repeats another",
                )
            seen.add(key)
            found[annotation["image_id"]].append(annotation)
    return dict(found)


def pixel_box(bbox: Any, label: str, size: tuple[int, int], where: str) -> Box:
    """A box from COCO's x, y, width, height in pixels.

    Args:
        bbox: The four numbers.
        label: Name of its class.
        size: Width and height of the image.
        where: What the box belongs to, for messages.

    Raises:
        DataError: If these are not four numbers, or the box has no area or lies outside.
    """
    return checked_box(coco_edges(bbox, where), label, size, where)


def coco_edges(bbox: Any, where: str) -> tuple[float, float, float, float]:
    """Edges (x0, y0, x1, y1) from COCO's x, y, width, height.

    Raises:
        FaultError: If these are not four numbers.
    """
    try:
        x, y, width, height = (float(value) for value in bbox)
    except (TypeError, ValueError) as error:
        raise FaultError(
            FaultKind.BOX_MALFORMED,
            f"{where}: bbox {bbox!r} is not four numbers x, y, width, height",
        ) from error
    return (x, y, x + width, y + height)
