"""COCO's JSON formats: instances (pixel x, y, width, height) and captions.

One file; or a folder with a file for each split, in `annotations/` as COCO has it or in the folders
of the splits as Roboflow writes it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Task
from valora_data.sources.base import annotation_file, take_missing_from_train
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    collected,
    four_numbers,
)
from valora_data.sources.formats.files import SPLIT_NAMES, Finder, folder_splits
from valora_data.sources.formats.labelled import Shape, check_labels, checked_box
from valora_data.sources.formats.tables import (
    check_unique,
    load_json,
    load_tables,
    sound_entries,
    unique_entries,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from valora_data.schema import Split
    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import Edges, ImageReader
    from valora_data.sources.formats.tables import Entries

ROBOFLOW = "_annotations.coco.json"
IMAGE, CATEGORY = ("id", "file_name"), ("id", "name")
ANNOTATION, CAPTION = ("image_id", "category_id", "bbox"), ("image_id", "caption")
INSTANCES, CAPTIONS = ("images", "annotations", "categories"), ("images", "annotations")


class _Part(NamedTuple):
    """A file, the folder of its images, and what ids begin with."""

    file: Path
    images: Path
    prefix: str = ""


class CocoFormat(AnnotatedFormat):
    """A file of instances or captions, or a folder of such files."""

    files = "COCO JSON"

    def supports(self, task: Task) -> bool:
        """Object detection and captions."""
        return task.spec.detects or task.spec.answer == "captions"

    def recognises(self, location: Location) -> bool:
        """A JSON object with `images`, or a folder with such files in `annotations/`."""
        folder = location.path / "annotations"
        return "images" in location.keys or next(folder.glob("*.json"), None) is not None

    def guess_task(self, path: str) -> Task:
        """Detection if there are categories."""
        files = _standard_files(Path(path), "")
        content = load_json(next(iter(files.values()), annotation_file(Path(path))))
        return Task.DETECTION if "categories" in content else Task.CAPTION

    def parts(self, source: Source) -> Mapping[Split | None, _Part]:
        """The file of each split, or one file for all images."""
        whole = Path(source.location)
        kind = "captions" if source.task.spec.answer == "captions" else "instances"
        found = _standard_files(whole, kind)
        if found:
            parts = {
                split: _Part(file, _standard_images(whole, file, source), f"{split}/")
                for split, file in found.items()
            }
            return take_missing_from_train(parts)
        folders = {} if (whole / ROBOFLOW).is_file() or not whole.is_dir() else folder_splits(whole)
        if any((folder / ROBOFLOW).is_file() for folder in folders.values()):
            several = len(folders) > 1
            parts = {
                split: _Part(folder / ROBOFLOW, folder, f"{folder.name}/" if several else "")
                for split, folder in folders.items()
            }
            return take_missing_from_train(parts)
        file = whole / ROBOFLOW if (whole / ROBOFLOW).is_file() else source.file
        if file.is_dir():
            raise DataError(
                f"folder {file} holds no single JSON file, no annotations/instances_train.json and "
                f"no train/{ROBOFLOW}: name the file, and the folder of its images as source.images"
            )
        return {None: _Part(file, Path(source.images) if source.images else file.parent)}

    def name(self, source: Source, part: _Part) -> str:
        """Name of the file."""
        return part.file.name

    def folder(self, source: Source, part: _Part) -> Path:
        """The folder of the images."""
        return part.images

    def lists(self, source: Source) -> Iterator[Path]:
        """The files of all splits."""
        yield from (part.file for part in self.parts(source).values())

    def records(self, source: Source, part: _Part, reading: ImageReader) -> Iterator[Record]:
        """Images in the file's order; ids are COCO's image ids.

        Ids may be any integers or texts. Crowd regions are left out, as they are no single objects.
        """
        name = part.file.name
        captions = source.task.spec.answer == "captions"
        tables = CAPTIONS if captions else INSTANCES
        content = load_tables(part.file, tables, "COCO captions" if captions else "COCO instances")
        reading.total += len(content["images"])
        images = sound_entries(reading, name, "images", content["images"], IMAGE)
        for key in IMAGE:
            images = unique_entries(reading, name, "image", key, images)
        files = {image["id"]: str(image["file_name"]) for image in images}
        keys = CAPTION if captions else ANNOTATION
        entries = sound_entries(reading, name, "annotations", content["annotations"], keys)
        by_image = _by_image(entries, files, name, reading)
        if captions:
            yield from _captions(images, by_image, part, reading)
            return
        categories = sound_entries(reading, name, "categories", content["categories"], CATEGORY)
        names = {category["id"]: str(category["name"]) for category in categories}
        check_unique(name, "category", [category["id"] for category in categories])
        if source.labels:
            check_labels(name, names.values(), source.labels)
        used = _used(categories, entries)
        finder = Finder(part.images)
        for image in images:
            file = files[image["id"]]

            def shape(entry: dict[str, Any], _: int, file: str = file) -> Shape | None:
                where = f"{name}, annotation {entry.get('id')} of {file}"
                if entry["category_id"] not in names:
                    raise FaultError(
                        FaultKind.CLASS_UNKNOWN,
                        f"{where} has category id {entry['category_id']}, which is none of "
                        f"{', '.join(map(str, list(names)[:10]))}",
                    )
                label = names[entry["category_id"]]
                if entry.get("iscrowd") or (not source.labels and label not in used):
                    return None
                return Shape(label, coco_edges(entry["bbox"], where), where)

            found = by_image.get(image["id"])
            shapes = None if found is None else collected(found, shape, file, reading)
            size = (image.get("width"), image.get("height"))
            yield Record(finder.find(file), f"{part.prefix}{image['id']}", shapes, size=size)


class RoboflowFormat(CocoFormat):
    """The folder of an export of Roboflow; `train`, `valid` and `test` in it are the splits."""

    files = ""

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """Folders with Roboflow's file of annotations in them, or in a folder of a split."""
        return location.path.is_dir() and any(
            next(location.path.glob(pattern), None) for pattern in (ROBOFLOW, f"*/{ROBOFLOW}")
        )

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION


def pixel_box(bbox: Any, label: str, size: tuple[int, int], where: str) -> Box:
    """A box from COCO's x, y, width, height in pixels.

    Args:
        bbox: The four numbers.
        label: Name of its class.
        size: Width and height of the image.
        where: What the box belongs to, for messages.

    Raises:
        FaultError: If these are not four numbers, or the box has no area or lies outside.
    """
    return checked_box(coco_edges(bbox, where), label, size, where)


def coco_edges(bbox: Any, where: str) -> Edges:
    """Edges (x0, y0, x1, y1) from COCO's x, y, width, height.

    Raises:
        FaultError: If these are not four numbers.
    """
    x, y, width, height = four_numbers(bbox, f"{where}: bbox")
    return (x, y, x + width, y + height)


def _standard_files(whole: Path, kind: str) -> dict[Split, Path]:
    """Files such as `annotations/instances_train2017.json` by split."""
    found: dict[Split, Path] = {}
    for file in sorted((whole / "annotations").glob(f"{kind}*.json")):
        words = re.split(r"[^a-z]+", file.stem.lower())
        for split in (SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES):
            found.setdefault(split, file)
    return found


def _standard_images(whole: Path, file: Path, source: Source) -> Path:
    """Folder of the images of such a file: `train2017/`, `images/train2017/` or what holds it."""
    if source.images:
        return Path(source.images)
    last = file.stem.rsplit("_", 1)[-1]
    places = [whole / last, whole / "images" / last, whole / "images", whole]
    return next(place for place in places if place.is_dir())


def _used(categories: Entries, annotations: Entries) -> set[str]:
    """Names of the categories, without those that only group others, as Roboflow writes one."""
    groups = {category.get("supercategory") for category in categories}
    used = {annotation["category_id"] for annotation in annotations}
    return {
        str(category["name"])
        for category in categories
        if category["id"] in used or category["name"] not in groups
        or category["name"] == category.get("supercategory")
    }  # fmt: skip


def _by_image(
    annotations: Entries, files: Mapping[Any, str], name: str, reading: ImageReader
) -> dict[Any, Entries]:
    """Annotations of every image that has some."""
    found: defaultdict[Any, Entries] = defaultdict(list)
    for annotation in annotations:
        image = annotation["image_id"]
        with reading.tolerate(files.get(image, f"image {image}")):
            if image not in files:
                raise FaultError(
                    FaultKind.ANNOTATION_STRAY,
                    f"{name}: annotation {annotation.get('id')} belongs to image {image}, which is "
                    "not listed",
                )
            found[image].append(annotation)
    return dict(found)


def _captions(
    images: Entries, by_image: Mapping[Any, Entries], part: _Part, reading: ImageReader
) -> Iterable[Record]:
    name, found = part.file.name, []
    finder = Finder(part.images)
    for image in images:
        file, texts = str(image["file_name"]), []
        for annotation in by_image.get(image["id"], ()):
            with reading.tolerate(file):
                text = str(annotation["caption"]).strip()
                if not text:
                    raise FaultError(
                        FaultKind.ROW_INCOMPLETE,
                        f"{name}: the caption of annotation {annotation.get('id')} is empty",
                    )
                texts.append(text)
        if not texts:
            reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no caption")
        answer = Answer(captions=tuple(texts)) if texts else None
        found.append(Record(finder.find(file), f"{part.prefix}{image['id']}", answer=answer))
    if not any(record.answer for record in found):
        raise DataError(f"{name}: no image has a caption: the data set is empty")
    return found
