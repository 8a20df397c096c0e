"""COCO's JSON: instances and captions, in one file or in a folder with a file for each split."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape

ROBOFLOW = "_annotations.coco.json"
Entry = dict[str, Any]
_Part = tuple[Path, Path, str]  # A file, the folder of its images, and what ids begin with


class CocoFormat(AnnotatedFormat):
    """A file of instances or captions; or a folder of them, as COCO or Roboflow has it."""

    answers = frozenset({"objects", "captions"})

    def recognises(self, location: Location) -> bool:
        names = ("annotations/*.json", ROBOFLOW, f"*/{ROBOFLOW}")
        found = (next(location.path.glob(at), None) for at in names)
        return "images" in location.keys or any(found)

    def guess_task(self, path: str) -> Task:
        parts = _parts(Path(path), "instances") or _parts(Path(path), "captions")
        file = next(iter(parts.values()))[0] if parts else annotation_file(Path(path))
        captions = file.is_file() and "categories" not in files.load_json(file)
        return Task.CAPTION if captions else Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, _Part]:
        whole, images = Path(source.location), Path(source.images) if source.images else None
        parts = _parts(whole, "instances" if source.task.spec.detects else "captions", images)
        file = whole / ROBOFLOW if (whole / ROBOFLOW).is_file() else source.file
        if file.is_dir() and not parts:
            raise DataError(
                f"folder {file} holds no single JSON file, no annotations/instances_train.json and "
                f"no train/{ROBOFLOW}: name the file, and the folder of its images as source.images"
            )
        return files.with_rest(parts, (file, images or file.parent, ""))

    def records(self, source: Source, part: _Part, reading: ImageReader) -> Iterator[Record]:
        file, folder, prefix = part
        name, detects = file.name, source.task.spec.detects
        content = _tables(file, detects)
        reading.total += len(content["images"])
        images: dict[Any, Entry] = {}
        for where, entry in _entries(content, "images", name, reading, "id", "file_name"):
            if images.setdefault(entry["id"], entry) is not entry:
                text = f"{where}: image id {entry['id']} occurs more than once"
                reading.add(FaultKind.ID_TWICE, where, text)
        by_image: defaultdict[Any, list[tuple[str, Entry]]] = defaultdict(list)
        keys = ("image_id", *(("category_id", "bbox") if detects else ("caption",)))
        for _, one in _entries(content, "annotations", name, reading, *keys):
            number, where = one["image_id"], f"{name}, annotation {one.get('id')}"
            if number in images:
                by_image[number].append((f"{where} of {images[number]['file_name']}", one))
            else:
                text = f"{where} belongs to image {number}, which is not listed"
                reading.add(FaultKind.ANNOTATION_STRAY, f"image {number}", text)
        used = {one.get("category_id") for each in by_image.values() for _, one in each}
        given = _entries(content, "categories", name, reading, "id", "name") if detects else ()
        names, kept = _names([one for _, one in given], used, name, source)

        def shape(entry: Entry) -> Shape | None:
            if (label := names.get(entry["category_id"])) is None:
                text = f"has category id {entry['category_id']}, which is none of "
                text += ", ".join(map(str, list(names)[:10]))
                raise FaultError(FaultKind.CLASS_UNKNOWN, text)
            wanted = not entry.get("iscrowd") and label in kept
            return (label, annotated.corners(entry["bbox"])) if wanted else None

        finder = files.Finder(folder)
        for number, image in images.items():
            item = str(image["file_name"])
            media, key, entries = (finder.find(item),), f"{prefix}{number}", by_image.get(number)
            record = Record(media, key, entries, shape, item=item)
            record.size = image.get("width"), image.get("height")
            if not detects:
                texts = tuple(_captions(entries or (), item, reading))
                record.entries, record.answer = None, Answer(captions=texts) if texts else None
                if not texts:
                    reading.add(FaultKind.IMAGE_UNLABELLED, item, f"{item} has no caption")
            yield record
        if [part[1] for part in self.parts(source).values()].count(folder) == 1:
            annotated.note_unlisted(finder, reading)


def _parts(whole: Path, kind: str, images: Path | None = None) -> dict[Split, _Part]:
    """Files of a folder by split, such as `annotations/instances_train2017.json`."""
    parts: dict[Split, _Part] = {}
    for file in sorted((whole / "annotations").glob(f"{kind}*.json")):
        last = file.stem.split("_")[-1]
        split = files.split_in(re.split(r"[^a-z]+", file.stem.lower()))
        if split is not None and split not in parts:
            tried = (whole / last, whole / "images" / last, whole / "images", whole)
            parts[split] = (file, images or next(filter(Path.is_dir, tried)), f"{split}/")
    if whole.is_dir() and not parts and not (whole / ROBOFLOW).is_file():
        folders = files.folder_splits(whole)
        if any((folder / ROBOFLOW).is_file() for folder in folders.values()):
            for split, folder in folders.items():
                prefix = f"{folder.name}/" if len(folders) > 1 else ""
                parts[split] = (folder / ROBOFLOW, folder, prefix)
    return parts


def _tables(file: Path, detects: bool) -> Mapping[str, Any]:
    content = files.load_json(file)
    for table in ("images", "annotations", *["categories"] * detects):
        if not isinstance(content, dict) or not isinstance(content.get(table), list):
            raise DataError(f"{file.name} has no list {table!r}: expected COCO JSON")
    if not content["images"]:
        raise DataError(f"{file.name} lists no images: the data set is empty")
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
                value = entry[key]
                if key.endswith("id"):  # ids in any form are alike
                    entry[key] = files.whole(value)
                if key.endswith(("id", "name")) and not isinstance(entry[key], int | str):
                    raise TypeError(f"has the {key} {value!r}, which is no number or text")
            yield where, entry


def _captions(
    entries: Iterable[tuple[str, Entry]], item: str, reading: ImageReader
) -> Iterator[str]:
    for where, entry in entries:
        with reading.tolerate(item, where):
            if not (text := str(entry["caption"] or "").strip()):
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
