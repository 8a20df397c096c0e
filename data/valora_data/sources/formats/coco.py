"""Labelled data sets in COCO's JSON formats: instances (pixel x, y, width, height), captions."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.formats.labelled import ImageReader, check_labels, checked_box
from valora_data.sources.formats.tables import check_unique, load_json, load_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        return Task.DETECTION if "categories" in load_json(Path(path)) else Task.CAPTION

    def open(self, source: Source) -> Splits:
        """All images as one piece: COCO has a file for each split."""
        file, images = Path(source.location), source.image_folder
        if source.task.spec.answer == "captions":
            return {None: partial(read_coco_captions, file, images, source.reader)}
        return {None: partial(read_coco, file, images, source.labels or None, source.reader)}


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
    images, annotations, categories = (content[table] for table in INSTANCES)
    names = {category["id"]: category["name"] for category in categories}
    check_unique(source, "image", [image["id"] for image in images])
    check_unique(source, "category", [category["id"] for category in categories])
    if labels is None:
        labels = tuple(names.values())
    check_labels(source, names.values(), labels)
    by_image = _by_image(source, annotations, {image["id"] for image in images}, names)
    reader = reader or ImageReader(source)
    reader.total = len(images)
    for entry in images:
        picture = reader.open(image_folder / entry["file_name"])
        if picture is None:
            continue
        boxes = []
        for annotation in by_image[entry["id"]]:
            label = names[annotation["category_id"]]
            if label in labels:
                where = f"{source}, annotation {annotation.get('id')} of {entry['file_name']}"
                boxes.append(pixel_box(annotation["bbox"], label, picture.size, where))
        yield Sample(str(entry["id"]), picture, Answer(tuple(boxes)))
    reader.finish()


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
    images = content["images"]
    check_unique(source, "image", [image["id"] for image in images])
    captions: defaultdict[Any, list[str]] = defaultdict(list)
    known = {image["id"] for image in images}
    for annotation in content["annotations"]:
        _check_listed(source, annotation, known)
        captions[annotation["image_id"]].append(str(annotation["caption"]).strip())
    captioned = [image for image in images if captions[image["id"]]]
    if not captioned:
        raise DataError(f"{source}: no image has a caption: the data set is empty")
    reader = reader or ImageReader(source)
    reader.total = len(captioned)
    for entry in captioned:
        picture = reader.open(image_folder / entry["file_name"])
        if picture is not None:
            yield Sample(str(entry["id"]), picture, Answer(captions=tuple(captions[entry["id"]])))
    reader.finish()


INSTANCES = {
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}
CAPTIONS = {"images": ("id", "file_name"), "annotations": ("image_id", "caption")}


def _check_listed(source: str, annotation: dict[str, Any], image_ids: set[Any]) -> None:
    if annotation["image_id"] not in image_ids:
        raise DataError(
            f"{source}: annotation {annotation.get('id')} belongs to image "
            f"{annotation['image_id']}, which is not listed: add the image or remove it"
        )


def _by_image(
    source: str, annotations: Entries, image_ids: set[Any], names: dict[Any, str]
) -> defaultdict[Any, Entries]:
    found: defaultdict[Any, Entries] = defaultdict(list)
    for annotation in annotations:
        _check_listed(source, annotation, image_ids)
        if annotation["category_id"] not in names:
            raise DataError(
                f"{source}: annotation {annotation.get('id')} has category id "
                f"{annotation['category_id']}, which is none of "
                f"{', '.join(map(str, list(names)[:10]))}: make the ids match"
            )
        if not annotation.get("iscrowd"):
            found[annotation["image_id"]].append(annotation)
    return found


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
    try:
        x, y, width, height = (float(value) for value in bbox)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: bbox {bbox!r} is not four numbers x, y, width, height: fix it"
        ) from error
    return checked_box((x, y, x + width, y + height), label, size, where)
