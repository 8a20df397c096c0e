"""COCO's JSON: instances and captions, in one file or in a folder with a file for each split."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record
from valora_data.sources.formats.labelled import ImageReader

ROBOFLOW = "_annotations.coco.json"
Entry = dict[str, Any]


class _Part(NamedTuple):
    """A file, the folder of its images, and what ids begin with."""

    file: Path
    images: Path
    prefix: str = ""


class CocoFormat(AnnotatedFormat):
    """A file of instances (pixel x, y, width, height) or captions, or a folder of such files.

    That has a file for each split, in `annotations/` as COCO has it or in the folders of the splits
    as Roboflow writes it.
    """

    files = "COCO JSON"
    answers = frozenset({"objects", "captions"})

    def recognises(self, location: Location) -> bool:
        """A JSON object with `images`, or a folder with JSON files in `annotations/`."""
        folder = location.path / "annotations"
        return "images" in location.keys or next(folder.glob("*.json"), None) is not None

    def guess_task(self, path: str) -> Task:
        """Detection if there are categories."""
        if self.task is not None:
            return self.task
        standard = _standard_files(Path(path), "")
        content = files.load_json(next(iter(standard.values()), annotation_file(Path(path))))
        return Task.DETECTION if "categories" in content else Task.CAPTION

    def parts(self, source: Source) -> Mapping[Split | None, _Part]:
        """The file of each split, or one file for all images."""
        whole = Path(source.location)
        images = Path(source.images) if source.images else None
        kind = "captions" if source.task.spec.answer == "captions" else "instances"
        parts = {
            split: _Part(file, images or _standard_images(whole, file), f"{split}/")
            for split, file in _standard_files(whole, kind).items()
        }
        exported = (whole / ROBOFLOW).is_file()
        if whole.is_dir() and not exported and not parts:
            folders = files.folder_splits(whole)
            if any((folder / ROBOFLOW).is_file() for folder in folders.values()):
                prefix = "{}/" if len(folders) > 1 else ""
                parts = {
                    split: _Part(folder / ROBOFLOW, folder, prefix.format(folder.name))
                    for split, folder in folders.items()
                }
        file = whole / ROBOFLOW if exported else source.file
        if file.is_dir() and not parts:
            raise DataError(
                f"folder {file} holds no single JSON file, no annotations/instances_train.json and "
                f"no train/{ROBOFLOW}: name the file, and the folder of its images as source.images"
            )
        return files.with_rest(parts, _Part(file, images or file.parent))

    def records(self, source: Source, part: _Part, reading: ImageReader) -> Iterator[Record]:
        """Images in the file's order; ids are COCO's image ids.

        Ids may be any integers or texts. Crowd regions are left out, as they are no single objects.
        """
        name, captions = part.file.name, source.task.spec.answer == "captions"
        content = _tables(part.file, "images", "annotations", *(() if captions else ["categories"]))
        reading.total += len(content["images"])
        images: dict[Any, Entry] = {}
        for where, entry in _entries(content, "images", part.file, reading, "id", "file_name"):
            if images.setdefault(entry["id"], entry) is not entry:
                text = f"{where}: image id {entry['id']} occurs more than once"
                reading.add(FaultKind.ID_TWICE, where, text)
        needed = ("caption",) if captions else ("category_id", "bbox")
        by_image: defaultdict[Any, list[tuple[str, Entry]]] = defaultdict(list)
        for _, one in _entries(content, "annotations", part.file, reading, "image_id", *needed):
            number, where = one["image_id"], f"{name}, annotation {one.get('id')}"
            if number in images:
                by_image[number].append((f"{where} of {images[number]['file_name']}", one))
            else:
                text = f"{where} belongs to image {number}, which is not listed"
                reading.add(FaultKind.ANNOTATION_STRAY, f"image {number}", text)
        if captions and not by_image:
            raise DataError(f"{name}: no image has a caption: the data set is empty")
        given = (
            () if captions else _entries(content, "categories", part.file, reading, "id", "name")
        )
        used = {one.get("category_id") for each in by_image.values() for _, one in each}
        names, kept = _names([one for _, one in given], used, name, source)

        def shape(entry: Entry) -> tuple[str, Edges] | None:
            label = names.get(entry["category_id"])
            if label is None:
                known = ", ".join(map(str, list(names)[:10]))
                text = f"has category id {entry['category_id']}, which is none of {known}"
                raise FaultError(FaultKind.CLASS_UNKNOWN, text)
            wanted = not entry.get("iscrowd") and label in kept
            return (label, annotated.corners(entry["bbox"])) if wanted else None

        finder = files.Finder(part.images)
        for number, image in images.items():
            file = str(image["file_name"])
            record = Record((finder.find(file),), f"{part.prefix}{number}", item=file)
            record.size = image.get("width"), image.get("height")
            if captions:
                texts = tuple(_captions(by_image.get(number, ()), file, reading))
                record.answer = Answer(captions=texts) if texts else None
                if not texts:
                    reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no caption")
            elif number in by_image:
                record.shapes = annotated.read_shapes(reading, file, by_image[number], shape)
            yield record
        annotated.note_unlisted(finder, reading)


class RoboflowFormat(CocoFormat):
    """The folder of an export of Roboflow; `train`, `valid` and `test` in it are the splits."""

    files = ""
    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        """Folders with Roboflow's file of annotations in them, or in a folder of a split."""
        found = (next(location.path.glob(at), None) for at in (ROBOFLOW, f"*/{ROBOFLOW}"))
        return location.path.is_dir() and any(found)


def _tables(file: Path, *required: str) -> dict[str, Any]:
    """The content of a file with the required tables, the first of which is not empty."""
    content = files.load_json(file)
    for table in required:
        if not isinstance(content, dict) or not isinstance(content.get(table), list):
            raise DataError(f"{file.name} has no list {table!r}: expected COCO JSON")
    if not content[required[0]]:
        raise DataError(f"{file.name} lists no {required[0]}: the data set is empty")
    return dict(content)


def _entries(
    content: Mapping[str, Any], table: str, file: Path, reading: ImageReader, *keys: str
) -> Iterator[tuple[str, Entry]]:
    """Rows of a table that have some keys, with their places; the others are faults.

    Ids are numbers or texts; whole ones in any form are alike.
    """
    for position, row in enumerate(content[table]):
        where = f"{file.name}: entry {position} of {table!r}"
        with reading.tolerate(where, where):
            entry = dict(files.as_object(row))
            for key in keys:
                value, is_id = entry[key], key.endswith("id")
                entry[key] = files.whole(value) if is_id else value
                if is_id and not isinstance(entry[key], int | str):
                    raise TypeError(f"has the {key} {value!r}, which is no number or text")
                if key == "file_name" and not isinstance(value, str):
                    raise TypeError(f"has the file_name {value!r}, which is no text")
            yield where, entry


def _standard_files(whole: Path, kind: str) -> dict[Split, Path]:
    """Files such as `annotations/instances_train2017.json` by split."""
    found: dict[Split, Path] = {}
    for file in sorted((whole / "annotations").glob(f"{kind}*.json")):
        split = files.split_in(re.split(r"[^a-z]+", file.stem.lower()))
        if split is not None:
            found.setdefault(split, file)
    return found


def _standard_images(whole: Path, file: Path) -> Path:
    """Folder of the images of such a file: `train2017/`, `images/train2017/` or what holds it."""
    last = file.stem.rsplit("_", 1)[-1]
    places = [whole / last, whole / "images" / last, whole / "images", whole]
    return next(place for place in places if place.is_dir())


def _captions(
    entries: Sequence[tuple[str, Entry]], file: str, reading: ImageReader
) -> Iterator[str]:
    for where, entry in entries:
        with reading.tolerate(file, where):
            text = str(entry["caption"]).strip()
            if not text:
                raise FaultError(FaultKind.ROW_INCOMPLETE, "the caption is empty")
            yield text


def _names(
    categories: Sequence[Entry], used: set[Any], name: str, source: Source
) -> tuple[dict[Any, str], set[str]]:
    """Names of all categories, and those that count: not what only groups others, as Roboflow's."""
    names = {category["id"]: str(category["name"]) for category in categories}
    if len(names) < len(categories):
        raise DataError(f"{name}: category ids occur more than once: number them anew")
    if source.labels and categories:
        annotated.check_labels(name, names.values(), source.labels)
        return names, {*names.values()}
    groups = {category.get("supercategory") for category in categories}
    groups -= {one["name"] for one in categories if one["name"] == one.get("supercategory")}
    return names, {label for key, label in names.items() if key in used or label not in groups}
