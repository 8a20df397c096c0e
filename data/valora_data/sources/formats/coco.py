"""COCO's JSON formats and what is made of them: instances, captions, RefCOCO, VQA v2."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source, annotation_file
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Shape
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.rows import texts_of

log = logging.getLogger(__name__)
ROBOFLOW = "_annotations.coco.json"
Entries = list[dict[str, Any]]


def _tables(path: Path, required: Sequence[str], what: str) -> dict[str, Any]:
    """The content of a file with the required tables, the first of which is not empty."""
    content = files.load_json(path)
    for table in required:
        if not isinstance(content, dict) or not isinstance(content.get(table), list):
            raise DataError(
                f"{path.name} has no list {table!r}: expected {what} with {', '.join(required)}"
            )
    if not content[required[0]]:
        raise DataError(f"{path.name} lists no {required[0]}: the data set is empty")
    return dict(content)


def _entries(
    reading: ImageReader,
    file: Path,
    content: Mapping[str, Any],
    table: str,
    *keys: str,
    unique: str = "",
) -> Entries:
    """Rows of a table that have some keys; the others are collected as faults.

    File names must be texts, ids numbers or texts; whole ones in any form are alike. No value of
    the unique keys, with spaces between, may occur twice.
    """
    found: Entries = []
    seen: set[tuple[str, Any]] = set()
    for position, row in enumerate(content[table]):
        where = f"{file.name}: entry {position} of {table!r}"
        with reading.tolerate(where, where):
            entry = {
                k: files.whole(v) if k.endswith("id") else v
                for k, v in files.as_object(row).items()
            }
            for key in keys:
                value, file_name = entry[key], key == "file_name"
                sound = isinstance(value, str) or (isinstance(value, int) and not file_name)
                if not sound and (file_name or key.endswith("id")):
                    what = "text" if file_name else "number or text"
                    raise TypeError(f"has the {key} {value!r}, which is no {what}")
            for key in unique.split():
                if (key, entry[key]) in seen:
                    what = f"{table.removesuffix('s')} {'id' if key.endswith('id') else key}"
                    text = f"{what} {entry[key]} occurs more than once"
                    raise FaultError(FaultKind.ID_TWICE, text)
            seen |= {(key, entry[key]) for key in unique.split()}
            found.append(entry)
    return found


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
        tables = ("images", "annotations") if captions else ("images", "annotations", "categories")
        content = _tables(part.file, tables, "COCO captions" if captions else "COCO instances")
        reading.total += len(content["images"])

        entries = partial(_entries, reading, part.file, content)
        images = entries("images", "id", "file_name", unique="id file_name")
        annotations = entries(
            "annotations", "image_id", *(("caption",) if captions else ("category_id", "bbox"))
        )
        by_image: defaultdict[Any, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        named = {image["id"]: image["file_name"] for image in images}
        for one in annotations:
            number = one["image_id"]
            where = f"{name}, annotation {one.get('id')} of {named.get(number)}"
            by_image[number].append((where, one))
            if number not in named:
                text = f"{name}: annotation {one.get('id')} belongs to image {number}"
                text += ", which is not listed"
                reading.add(FaultKind.ANNOTATION_STRAY, f"image {number}", text)
        if captions and not by_image.keys() & named.keys():
            raise DataError(f"{name}: no image has a caption: the data set is empty")
        names: dict[Any, str] = {}
        kept: set[str] = set()
        if not captions:
            names, kept = _names(entries("categories", "id", "name"), annotations, name, source)

        def shape(entry: dict[str, Any]) -> tuple[str, Edges] | None:
            label = names.get(entry["category_id"])
            if label is None:
                known = ", ".join(map(str, list(names)[:10]))
                text = f"has category id {entry['category_id']}, which is none of {known}"
                raise FaultError(FaultKind.CLASS_UNKNOWN, text)
            wanted = not entry.get("iscrowd") and label in kept
            return (label, annotated.corners(entry["bbox"])) if wanted else None

        finder = files.Finder(part.images)
        for image in images:
            number, file = image["id"], image["file_name"]
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
    entries: Sequence[tuple[str, dict[str, Any]]], file: str, reading: ImageReader
) -> Iterator[str]:
    for where, entry in entries:
        with reading.tolerate(file, where):
            text = str(entry["caption"]).strip()
            if not text:
                raise FaultError(FaultKind.ROW_INCOMPLETE, "the caption is empty")
            yield text


def _names(
    categories: Entries, annotations: Entries, name: str, source: Source
) -> tuple[dict[Any, str], set[str]]:
    """Names of all categories, and those that count: not what only groups others, as Roboflow's."""
    names = {category["id"]: str(category["name"]) for category in categories}
    for number, count in Counter(category["id"] for category in categories).items():
        if count > 1:
            raise DataError(f"{name}: category id {number} occurs more than once: number them anew")
    if source.labels:
        annotated.check_labels(name, names.values(), source.labels)
        return names, {*names.values()}
    used = {annotation["category_id"] for annotation in annotations}
    groups = {category.get("supercategory") for category in categories}
    groups -= {one["name"] for one in categories if one["name"] == one.get("supercategory")}
    return names, {
        label for number, label in names.items() if number in used or label not in groups
    }


class RefCocoFormat(AnnotatedFormat):
    """Referring expressions: RefCOCO, RefCOCO+ and RefCOCOg in JSON.

    A file with `images`, `annotations` and `refs`; or one with `refs` alone, whose entries carry
    `file_name` and `bbox` themselves. Each of a reference's `sentences` is a sample. (The original
    `refs(unc).p` is a pickle, which runs code when it is read: convert it.)
    """

    files = "RefCOCO JSON"
    answers = frozenset({"phrase"})
    task = Task.GROUNDING

    def recognises(self, location: Location) -> bool:
        """A JSON object with `refs`, or a list of references, which have `sentences`."""
        return bool(location.keys & {"refs", "sentences"})

    def parts(self, source: Source) -> Mapping[Split | None, Split | None]:
        """The splits that the references name, or all references as one piece."""
        found = {_split_of(ref) for ref in _content(source)["refs"]}
        return files.with_rest({split: split for split in found if split is not None}, None)

    def records(self, source: Source, part: Split | None, reading: ImageReader) -> Iterator[Record]:
        """A record for each sentence, which is its prompt and the label of its box.

        testA and testB are both `test`. Ids are ``<image>#<reference>-<sentence>``.
        """
        name, content = source.file.name, _content(source)

        content["refs"] = [ref for ref in content["refs"] if part is None or _split_of(ref) is part]
        if not content["refs"]:
            raise DataError(f"{name} has no references for {part}: the data set is empty")
        reading.total += len(content["refs"])
        entries = partial(_entries, reading, source.file, content)
        named = {image["id"]: image["file_name"] for image in entries("images", "id", "file_name")}
        boxes = {one["id"]: one["bbox"] for one in entries("annotations", "id", "bbox")}
        finder = files.Finder(source.image_folder)
        for ref in entries("refs", "ref_id", "sentences", unique="ref_id"):
            item = f"reference {ref['ref_id']}"
            where = f"{name}, {item}"
            with reading.tolerate(item, where):
                file = str(_look_up(ref, "file_name", "image_id", named))
                edges = annotated.corners(_look_up(ref, "bbox", "ann_id", boxes))
                if not ref["sentences"]:
                    raise KeyError("sentences")
                for number, phrase in enumerate(texts_of(ref["sentences"], ("sent", "raw"))):
                    key = f"{ref.get('image_id', file)}#{ref['ref_id']}-{number}"
                    shapes = [Shape(phrase, edges, where)]
                    with reading.tolerate(item, where):
                        if not phrase:
                            raise FaultError(
                                FaultKind.ROW_INCOMPLETE, f"sentence {number} is empty"
                            )
                        yield Record((finder.find(file),), key, shapes, prompt=phrase, item=item)


def _content(source: Source) -> dict[str, list[Any]]:
    """The tables `refs`, `images` and `annotations`, of which the last two may be empty."""
    content = files.load_json(source.file)
    content = {"refs": content} if isinstance(content, list) else content
    refs = content.get("refs") if isinstance(content, dict) else None
    if not isinstance(refs, list):
        raise DataError(f"{source.file.name} has no list 'refs': expected referring expressions")
    return {table: content.get(table) or [] for table in ("images", "annotations", "refs")}


def _look_up(ref: dict[str, Any], own: str, key: str, table: dict[Any, Any]) -> Any:
    """A reference's own value, or that of the entry it names."""
    if ref.get(key) in table:
        return table[ref[key]]
    if own in ref:
        return ref[own]
    text = f"has {key} {ref.get(key)}, which is not listed, and no {own}"
    raise FaultError(FaultKind.ANNOTATION_STRAY, text)


def _split_of(ref: Any) -> Split | None:
    return files.SPLIT_NAMES.get(str(ref.get("split", ""))) if isinstance(ref, dict) else None


class VqaFormat(AnnotatedFormat):
    """VQA v2, a file of questions; `Source.annotations` is the file of answers."""

    files = "VQA JSON"
    answers = frozenset({"answers"})
    task = Task.VQA

    def recognises(self, location: Location) -> bool:
        """A JSON object with `questions`."""
        return "questions" in location.keys

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All questions as one piece: VQA v2 has a file for each split."""
        if source.annotations is None:
            raise DataError(
                f"{source.file.name} holds questions without answers: set source.annotations to "
                "the file of annotations"
            )
        return {None: Path(source.annotations)}

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each question, with all annotators' answers in theirs.

        An `image` names the file where it does not follow COCO's pattern. Ids are
        ``<image id>#<question id>``. Questions of which the commonest answer is none of the
        domain's labels are left out.
        """
        name = source.file.name
        content = _tables(source.file, ("questions",), "VQA questions")
        given = _tables(part, ("annotations",), "VQA annotations")
        reading.total += len(content["questions"])
        questions = _entries(
            reading, source.file, content, "questions", "question_id", "image_id", "question",
            unique="question_id",
        )  # fmt: skip
        rows = _entries(reading, part, given, "annotations", "question_id", "answers")
        answers = {row["question_id"]: row["answers"] for row in rows}
        finder, wanted = files.Finder(source.image_folder), 0
        for entry in questions:
            number = entry["question_id"]
            item = f"question {number}"
            with reading.tolerate(item, f"{part.name}: {item}"):
                if number not in answers:
                    raise KeyError(f"annotation in {part.name}")
                answer = Answer(answers=tuple(texts_of(answers.pop(number), ("answer",))))
                if not any(answer.answers):
                    raise KeyError("answers")
                if not source.labels or answer.choice in source.labels:
                    wanted += 1
                    path = _file(source.image_folder, finder, entry, content.get("data_subtype"))
                    record = Record((path,), f"{entry['image_id']}#{number}", item=item)
                    record.answer, record.prompt = answer, str(entry["question"]).strip()
                    yield record
        for number in answers if reading.thorough else ():
            text = f"{part.name}: question {number} is not asked in {name}"
            reading.add(FaultKind.ANNOTATION_STRAY, f"question {number}", text)
        if not wanted:
            raise DataError(
                f"{name}: no question is answered by one of {', '.join(source.labels)}: correct "
                "the domain's labels"
            )
        if wanted < len(questions):
            log.info("%s: %d questions have other answers", name, len(questions) - wanted)


def _file(folder: Path, finder: files.Finder, entry: dict[str, Any], subtype: Any) -> Path:
    if "image" in entry:
        return finder.find(str(entry["image"]))
    image = entry["image_id"]
    number = f"{image:012d}" if isinstance(image, int) else str(image)
    names = [f"COCO_{subtype}_{number}.jpg", f"{number}.jpg", f"{image}.jpg", f"{image}.png"]
    return next(
        (folder / name for name in names if files.is_file(folder / name)), folder / names[1]
    )
