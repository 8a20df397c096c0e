"""COCO's JSON formats: instances (pixel x, y, width, height) and captions.

One file; or a folder with a file for each split, in `annotations/` as COCO has it or in the folders
of the splits as Roboflow writes it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    Shape,
    check_labels,
    collected,
    corner_edges,
    note_unlisted,
)
from valora_data.sources.formats.files import Finder, folder_splits, split_in, with_rest
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import Entries, load_json, load_tables, sound_entries

ROBOFLOW = "_annotations.coco.json"


class _Part(NamedTuple):
    """A file, the folder of its images, and what ids begin with."""

    file: Path
    images: Path
    prefix: str = ""


class CocoFormat(AnnotatedFormat):
    """A file of instances or captions, or a folder of such files."""

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
        files = _standard_files(Path(path), "")
        content = load_json(next(iter(files.values()), annotation_file(Path(path))))
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
        alone = not whole.is_dir() or (whole / ROBOFLOW).is_file()
        folders = {} if parts or alone else folder_splits(whole)
        if any((folder / ROBOFLOW).is_file() for folder in folders.values()):
            prefix = "{}/" if len(folders) > 1 else ""
            parts = {
                split: _Part(folder / ROBOFLOW, folder, prefix.format(folder.name))
                for split, folder in folders.items()
            }
        file = whole / ROBOFLOW if (whole / ROBOFLOW).is_file() else source.file
        if file.is_dir() and not parts:
            raise DataError(
                f"folder {file} holds no single JSON file, no annotations/instances_train.json and "
                f"no train/{ROBOFLOW}: name the file, and the folder of its images as source.images"
            )
        return with_rest(parts, _Part(file, images or file.parent))

    def records(self, source: Source, part: _Part, reading: ImageReader) -> Iterator[Record]:
        """Images in the file's order; ids are COCO's image ids.

        Ids may be any integers or texts. Crowd regions are left out, as they are no single objects.
        """
        name, captions = part.file.name, source.task.spec.answer == "captions"
        tables = ("images", "annotations") if captions else ("images", "annotations", "categories")
        content = load_tables(part.file, tables, "COCO captions" if captions else "COCO instances")
        reading.total += len(content["images"])

        def entries(table: str, *keys: str, unique: str = "") -> Entries:
            return sound_entries(reading, name, table, content[table], *keys, unique=unique)

        images = entries("images", "id", "file_name", unique="id file_name")
        files = {image["id"]: image["file_name"] for image in images}
        sizes = {image["id"]: (image.get("width"), image.get("height")) for image in images}
        keys = ("caption",) if captions else ("category_id", "bbox")
        annotations = entries("annotations", "image_id", *keys)
        names: dict[Any, str] = {}
        kept: set[str] = set()
        if not captions:
            categories = entries("categories", "id", "name")
            names, kept = _names(categories, annotations, name, source)

        def shape(entry: dict[str, Any], _: int) -> Shape | None:
            where = f"{name}, annotation {entry.get('id')} of {files[entry['image_id']]}"
            label = names.get(entry["category_id"])
            if label is None:
                known = ", ".join(map(str, list(names)[:10]))
                text = f"{where} has category id {entry['category_id']}, which is none of {known}"
                raise FaultError(FaultKind.CLASS_UNKNOWN, text)
            if entry.get("iscrowd") or label not in kept:
                return None
            return Shape(label, corner_edges(entry["bbox"], where), where)

        def caption(entry: dict[str, Any], _: int) -> str:
            if text := str(entry["caption"]).strip():
                return text
            text = f"{name}: the caption of annotation {entry.get('id')} is empty"
            raise FaultError(FaultKind.ROW_INCOMPLETE, text)

        by_image = _by_image(annotations, files, name, reading)
        if captions and not by_image:
            raise DataError(f"{name}: no image has a caption: the data set is empty")
        finder = Finder(part.images)
        for number, file in files.items():
            found = by_image.get(number)
            record = Record((finder.find(file),), f"{part.prefix}{number}", item=file)
            record.size = sizes[number]
            if captions:
                texts = tuple(collected(found or (), caption, file, reading))
                record.answer = Answer(captions=texts) if texts else None
                if not texts:
                    reading.add(FaultKind.IMAGE_UNLABELLED, file, f"{file} has no caption")
            elif found is not None:
                record.shapes = collected(found, shape, file, reading)
            yield record
        note_unlisted(finder, reading)


class RoboflowFormat(CocoFormat):
    """The folder of an export of Roboflow; `train`, `valid` and `test` in it are the splits."""

    files = ""
    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        """Folders with Roboflow's file of annotations in them, or in a folder of a split."""
        found = (next(location.path.glob(at), None) for at in (ROBOFLOW, f"*/{ROBOFLOW}"))
        return location.path.is_dir() and any(found)


def _standard_files(whole: Path, kind: str) -> dict[Split, Path]:
    """Files such as `annotations/instances_train2017.json` by split."""
    found: dict[Split, Path] = {}
    for file in sorted((whole / "annotations").glob(f"{kind}*.json")):
        split = split_in(re.split(r"[^a-z]+", file.stem.lower()))
        if split is not None:
            found.setdefault(split, file)
    return found


def _standard_images(whole: Path, file: Path) -> Path:
    """Folder of the images of such a file: `train2017/`, `images/train2017/` or what holds it."""
    last = file.stem.rsplit("_", 1)[-1]
    places = [whole / last, whole / "images" / last, whole / "images", whole]
    return next(place for place in places if place.is_dir())


def _names(
    categories: Entries, annotations: Entries, name: str, source: Source
) -> tuple[dict[Any, str], set[str]]:
    """Names of all categories, and those that count: not what only groups others, as Roboflow's."""
    names = {category["id"]: str(category["name"]) for category in categories}
    ids = [category["id"] for category in categories]
    if twice := [number for number in names if ids.count(number) > 1]:
        raise DataError(f"{name}: category id {twice[0]} occurs more than once: number them anew")
    if source.labels:
        check_labels(name, names.values(), source.labels)
        return names, {*names.values()}
    used = {annotation["category_id"] for annotation in annotations}
    groups = {category.get("supercategory") for category in categories}
    groups -= {one["name"] for one in categories if one["name"] == one.get("supercategory")}
    return names, {
        label for number, label in names.items() if number in used or label not in groups
    }


def _by_image(
    annotations: Entries, files: Mapping[Any, str], name: str, reading: ImageReader
) -> dict[Any, Entries]:
    """Annotations of every image that has some."""
    found: defaultdict[Any, Entries] = defaultdict(list)
    for annotation in annotations:
        image = annotation["image_id"]
        if image in files:
            found[image].append(annotation)
        else:
            of = f"annotation {annotation.get('id')} belongs to image {image}"
            text = f"{name}: {of}, which is not listed"
            reading.add(FaultKind.ANNOTATION_STRAY, f"image {image}", text)
    return dict(found)
