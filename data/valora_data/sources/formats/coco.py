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
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape
from valora_data.sources.formats.labelled import ImageReader

ROBOFLOW = "_annotations.coco.json"
Entry = dict[str, Any]


class _Part(NamedTuple):
    """A file, the folder of its images, and what ids begin with."""

    file: Path
    images: Path
    prefix: str = ""


class CocoFormat(AnnotatedFormat):
    """A file of instances or captions; or a folder of them, as COCO or Roboflow has it."""

    answers = frozenset({"objects", "captions"})

    def recognises(self, location: Location) -> bool:
        folder = location.path / "annotations"
        return "images" in location.keys or next(folder.glob("*.json"), None) is not None

    def guess_task(self, path: str) -> Task:
        parts = _parts(Path(path), "")
        file = next(iter(parts.values())).file if parts else annotation_file(Path(path))
        return Task.DETECTION if "categories" in files.load_json(file) else Task.CAPTION

    def parts(self, source: Source) -> Mapping[Split | None, _Part]:
        whole, captions = Path(source.location), source.task.spec.answer == "captions"
        images = Path(source.images) if source.images else None
        parts = _parts(whole, "captions" if captions else "instances", images)
        file = whole / ROBOFLOW if (whole / ROBOFLOW).is_file() else source.file
        if file.is_dir() and not parts:
            raise DataError(
                f"folder {file} holds no single JSON file, no annotations/instances_train.json and "
                f"no train/{ROBOFLOW}: name the file, and the folder of its images as source.images"
            )
        return files.with_rest(parts, _Part(file, images or file.parent))

    def records(self, source: Source, part: _Part, reading: ImageReader) -> Iterator[Record]:
        name, captions = part.file.name, source.task.spec.answer == "captions"
        content = _tables(part.file, "images", "annotations", *["categories"] * (not captions))
        reading.total += len(content["images"])
        images: dict[Any, Entry] = {}
        for where, entry in _entries(content, "images", name, reading, "id", "file_name"):
            if images.setdefault(entry["id"], entry) is not entry:
                text = f"{where}: image id {entry['id']} occurs more than once"
                reading.add(FaultKind.ID_TWICE, where, text)
        needed = ("caption",) if captions else ("category_id", "bbox")
        by_image: defaultdict[Any, list[tuple[str, Entry]]] = defaultdict(list)
        for _, one in _entries(content, "annotations", name, reading, "image_id", *needed):
            number, where = one["image_id"], f"{name}, annotation {one.get('id')}"
            if number in images:
                by_image[number].append((f"{where} of {images[number]['file_name']}", one))
            else:
                text = f"{where} belongs to image {number}, which is not listed"
                reading.add(FaultKind.ANNOTATION_STRAY, f"image {number}", text)
        if captions and not by_image:
            raise DataError(f"{name}: no image has a caption: the data set is empty")
        used = {one["category_id"] for each in by_image.values() for _, one in each if not captions}
        given = [] if captions else _entries(content, "categories", name, reading, "id", "name")
        names, kept = _names([one for _, one in given], used, name, source)

        def shape(entry: Entry) -> Shape | None:
            if (label := names.get(entry["category_id"])) is None:
                text = f"has category id {entry['category_id']}, which is none of "
                text += ", ".join(map(str, list(names)[:10]))
                raise FaultError(FaultKind.CLASS_UNKNOWN, text)
            wanted = not entry.get("iscrowd") and label in kept
            return (label, annotated.corners(entry["bbox"])) if wanted else None

        finder = files.Finder(part.images)
        for number, image in images.items():
            file = str(image["file_name"])
            record = Record((finder.find(file),), f"{part.prefix}{number}", shape=shape, item=file)
            record.size = image.get("width"), image.get("height")
            if captions:
                texts = tuple(_captions(by_image[number], file, reading))
                record.answer = Answer(captions=texts) if texts else None
                if not texts:
                    reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no caption")
            else:
                record.entries = by_image.get(number)
            yield record
        annotated.note_unlisted(finder, reading)


class RoboflowFormat(CocoFormat):
    """The folder of an export of Roboflow; `train`, `valid` and `test` in it are the splits."""

    answers = frozenset({"objects"})

    def recognises(self, location: Location) -> bool:
        found = (next(location.path.glob(at), None) for at in (ROBOFLOW, f"*/{ROBOFLOW}"))
        return location.path.is_dir() and any(found)

    def guess_task(self, path: str) -> Task:
        return Task.DETECTION


def _parts(whole: Path, kind: str, images: Path | None = None) -> dict[Split, _Part]:
    """Files of a folder by split, such as `annotations/instances_train2017.json`."""
    parts: dict[Split, _Part] = {}
    for file in sorted((whole / "annotations").glob(f"{kind}*.json")):
        last = file.stem.split("_")[-1]
        split = files.split_in(re.split(r"[^a-z]+", file.stem.lower()))
        if split is not None and split not in parts:
            tried = (whole / last, whole / "images" / last, whole / "images", whole)
            parts[split] = _Part(file, images or next(filter(Path.is_dir, tried)), f"{split}/")
    if whole.is_dir() and not parts and not (whole / ROBOFLOW).is_file():
        folders = files.folder_splits(whole)
        if any((folder / ROBOFLOW).is_file() for folder in folders.values()):
            for split, folder in folders.items():
                prefix = f"{folder.name}/" if len(folders) > 1 else ""
                parts[split] = _Part(folder / ROBOFLOW, folder, prefix)
    return parts


def _tables(file: Path, *required: str) -> Mapping[str, Any]:
    content = files.load_json(file)
    for table in required:
        if not isinstance(content, dict) or not isinstance(content.get(table), list):
            raise DataError(f"{file.name} has no list {table!r}: expected COCO JSON")
    if not content[required[0]]:
        raise DataError(f"{file.name} lists no {required[0]}: the data set is empty")
    return dict(content)


def _entries(
    content: Mapping[str, Any], table: str, name: str, reading: ImageReader, *keys: str
) -> Iterator[tuple[str, Entry]]:
    """Rows of a table that have some keys, with their locations; the others are faults."""
    for position, row in enumerate(content[table]):
        where = f"{name}: entry {position} of {table!r}"
        with reading.tolerate(where, where):
            entry = dict(files.as_object(row))
            for key in keys:
                value, is_id = entry[key], key.endswith("id")
                entry[key] = files.whole(value) if is_id else value  # ids in any form are alike
                if is_id and not isinstance(entry[key], int | str):
                    raise TypeError(f"has the {key} {value!r}, which is no number or text")
                if key == "file_name" and not isinstance(value, str):
                    raise TypeError(f"has the file_name {value!r}, which is no text")
            yield where, entry


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
    groups = {str(one["supercategory"]) for one in categories if one.get("supercategory")}
    groups -= {str(one["name"]) for one in categories if one["name"] == one.get("supercategory")}
    return names, {label for key, label in names.items() if key in used or label not in groups}
