"""Labelled data sets in COCO's JSON format (instances: pixel x, y, width, height)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample
from valora_data.sources.labelled import ImageReader, check_labels, checked_box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def read_coco(json_path: Path, image_folder: Path, labels: Sequence[str]) -> Iterator[Sample]:
    """Read the images of a COCO file with the boxes of some of its categories.

    Category ids may be any integers. Crowd regions are left out, as they are no single objects.

    Args:
        json_path: File with `images`, `annotations` and `categories`.
        image_folder: What `file_name` is relative to.
        labels: Category names that the domain asks for; others are left out.

    Yields:
        One sample per image that decodes, in the file's order; its id is COCO's image id.

    Raises:
        DataError: If the file is missing, corrupt or empty, ids do not match or occur twice, a
            label is no category, a box lies outside its image, or too many images do not decode.
    """
    source = json_path.name
    images, annotations, categories = _parsed(json_path)
    names = {category["id"]: category["name"] for category in categories}
    _check_unique(source, "image", [image["id"] for image in images])
    _check_unique(source, "category", [category["id"] for category in categories])
    check_labels(source, names.values(), labels)
    by_image = _by_image(source, annotations, {image["id"] for image in images}, names)
    reader = ImageReader(source, len(images))
    for entry in images:
        picture = reader.open(image_folder / entry["file_name"])
        if picture is None:
            continue
        boxes = []
        for annotation in by_image[entry["id"]]:
            label = names[annotation["category_id"]]
            if label in labels:
                where = f"{source}, annotation {annotation.get('id')} of {entry['file_name']}"
                boxes.append(_box(annotation, label, picture.size, where))
        yield Sample(str(entry["id"]), picture, Answer(tuple(boxes)))
    reader.finish()


Entries = list[dict[str, Any]]


def _parsed(json_path: Path) -> tuple[Entries, Entries, Entries]:
    source = json_path.name
    try:
        content = json.loads(json_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {json_path} ({error.strerror}): check the path") from error
    except ValueError as error:
        raise DataError(f"{source} is not valid JSON ({error}): export it again") from error
    required = {
        "images": ("id", "file_name"),
        "annotations": ("image_id", "category_id", "bbox"),
        "categories": ("id", "name"),
    }
    for table, keys in required.items():
        entries = content.get(table) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(
                f"{source} has no list {table!r}: expected COCO instances with images, "
                "annotations and categories"
            )
        for position, entry in enumerate(entries):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(
                    f"{source}: entry {position} of {table!r} has no {', '.join(missing)}: "
                    "export the file again"
                )
    if not content["images"]:
        raise DataError(f"{source} lists no images: the data set is empty")
    return content["images"], content["annotations"], content["categories"]


def _check_unique(source: str, kind: str, ids: list[Any]) -> None:
    double = [key for key, count in Counter(ids).items() if count > 1]
    if double:
        raise DataError(f"{source}: {kind} id {double[0]} occurs more than once: number them anew")


def _by_image(
    source: str, annotations: Entries, image_ids: set[Any], names: dict[Any, str]
) -> defaultdict[Any, Entries]:
    found: defaultdict[Any, Entries] = defaultdict(list)
    for annotation in annotations:
        if annotation["image_id"] not in image_ids:
            raise DataError(
                f"{source}: annotation {annotation.get('id')} belongs to image "
                f"{annotation['image_id']}, which is not listed: add the image or remove it"
            )
        if annotation["category_id"] not in names:
            raise DataError(
                f"{source}: annotation {annotation.get('id')} has category id "
                f"{annotation['category_id']}, which is none of "
                f"{', '.join(map(str, list(names)[:10]))}: make the ids match"
            )
        if not annotation.get("iscrowd"):
            found[annotation["image_id"]].append(annotation)
    return found


def _box(annotation: dict[str, Any], label: str, size: tuple[int, int], where: str) -> Box:
    try:
        x, y, width, height = (float(value) for value in annotation["bbox"])
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: bbox {annotation['bbox']!r} is not four numbers x, y, width, height: fix it"
        ) from error
    return checked_box((x, y, x + width, y + height), label, size, where)
