"""Tables of images or videos: folders with `metadata.jsonl`, and data sets on the hub.

A task reads these columns, which have the names that are customary on the hub; the first one that
exists is used. `Source.columns` maps a field to another name.

- classification, video: `label` (a name, or a class index where the names are declared)
- detection: `objects` with `bbox` (x, y, width, height in pixels) and `category`
- vqa: `question`; `answers` or `answer` (a text, texts, or objects with `answer`)
- caption: `captions`, `caption` or `text`
- grounding: `phrase`, `expression`, `sentence` or `text`; `bbox`
- counting: `count` or `label`
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import ANSWERS, Location, Source, SourceFormat
from valora_data.sources.formats import annotated, files, videos
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Shape
from valora_data.sources.formats.labelled import ImageReader, Media
from valora_data.wording import first_line, plural

NAMES: Mapping[str, tuple[str, ...]] = {
    "label": ("label", "labels", "class"),
    "objects": ("objects",),
    "question": ("question", "prompt"),
    "answers": ("answers", "answer"),
    "captions": ("captions", "caption", "text"),
    "phrase": ("phrase", "expression", "sentence", "sentences", "text"),
    "bbox": ("bbox", "box"),
    "count": ("count", "label"),
}
TASKS: Mapping[str, Task] = {
    "question": Task.VQA, "objects": Task.DETECTION, "phrase": Task.GROUNDING,
    "expression": Task.GROUNDING, "sentence": Task.GROUNDING, "caption": Task.CAPTION,
    "captions": Task.CAPTION, "text": Task.CAPTION, "count": Task.COUNTING,
}  # fmt: skip
"""Columns that tell the task, the most specific first."""
TEXTS = {"answers": ("answer",), "captions": ("raw", "caption", "text"),
         "phrase": ("sent", "raw", "phrase")}  # fmt: skip
"""Keys of texts in objects, where a field has objects instead of texts."""
PATIENCE = 100
"""Least number of rows that the share of broken images refers to: a stream has no length."""
METADATA = "metadata.jsonl"
Part = tuple[Path, str]
"""A folder, and what ids of its samples begin with."""
CATEGORIES = ("category", "categories", "label")
"""Keys of the classes of objects."""


def task_of_columns(columns: Collection[str], labelled: Task) -> Task:
    """The most likely task of a table; `labelled` if answers are labels or there are no columns."""
    for column, task in TASKS.items():
        if column in columns:
            return task
    if not columns or "label" in columns or "labels" in columns:
        return labelled
    raise DataError(
        f"columns {', '.join(sorted(columns))} do not tell the task: give one with --task"
    )


class RowReader:
    """Reads the rows of one data set, called `name` in messages, for a domain.

    Data sets may declare `names` of class indices: rows of other classes than the domain's are left
    out then, and are faults otherwise.
    """

    def __init__(
        self, source: Source, name: str, reading: ImageReader, names: Sequence[str] | None = None
    ) -> None:
        self._source, self._name, self._reading, self._names = source, name, reading, names
        self._last_label: Any = None

    def read(self, row: Mapping[str, Any], item: str, where: str) -> list[dict[str, Any]]:
        """The fields of a `Record` that a row fills in: one for each of several phrases.

        None of them if the row is of a declared class that the domain does not ask for. What it
        raises of wrong values is to be tolerated.
        """
        spec, labels = self._source.task.spec, self._source.labels
        fields: dict[str, Any] = {}
        match spec.answer:
            case "boxes" if spec.detects:
                entries = ((where, entry) for entry in self._objects(row))
                fields["shapes"] = annotated.read_shapes(self._reading, item, entries, self._object)
            case "boxes":
                edges = annotated.corners(self._get(row, "bbox"))
                return [
                    {"shapes": [Shape(text, edges, where)], "prompt": text}
                    for text in self._texts(row, "phrase")
                ]
            case "label":
                label = self._label(self._get(row, "label"))
                if self._names is not None and labels and label not in labels:
                    return []
                fields["answer"] = Answer(label=label)
            case "count":
                fields["answer"] = Answer(count=read_count(self._get(row, "count")))
            case "captions":
                fields["answer"] = Answer(captions=self._texts(row, "captions"))
            case _:
                question = self._find(row, "question")
                fields["answer"] = Answer(answers=self._texts(row, "answers"))
                fields["prompt"] = None if question is None else str(question)
        return [fields]

    def _label(self, value: Any) -> str:
        """A label's name; labels must be all numbers or all names."""
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        value = files.whole(value) if isinstance(value, float) else value  # as pandas writes them
        text = ""
        if isinstance(value, list):
            text = f"expected one label, got {value}"
        elif isinstance(value, bool) or not isinstance(value, int | str):
            text = f"label {value!r} is no name and no number"
        elif isinstance(value, int) and self._names and not 0 <= value < len(self._names):
            text = f"class index {value} lies outside the {len(self._names)} declared names"
        elif self._last_label is not None and type(self._last_label) is not type(value):
            text = f"label {value!r} and, before, {self._last_label!r}: {self._name} mixes "
            text += "numbers and names"
        if text:
            raise FaultError(FaultKind.LABEL_MALFORMED, text)
        self._last_label = value
        return self._names[value] if self._names and isinstance(value, int) else str(value)

    def _objects(self, row: Mapping[str, Any]) -> Sequence[tuple[Any, Any]]:
        """Boxes and classes, given as an object of lists or as a list of objects."""
        objects = self._get(row, "objects")
        if isinstance(objects, list) and all(isinstance(one, dict) for one in objects):
            return [(one.get("bbox"), _first(one, CATEGORIES)) for one in objects]
        if not isinstance(objects, dict):
            raise TypeError("objects are no object of lists, and no list of objects")
        boxes, labels = objects.get("bbox", []), _first(objects, CATEGORIES) or []
        if len(boxes) != len(labels):
            raise ValueError(
                f"{plural(len(boxes), 'box|boxes')} with "
                f"{plural(len(labels), 'category|categories')}"
            )
        return list(zip(boxes, labels, strict=True))

    def _object(self, entry: tuple[Any, Any]) -> tuple[str, Edges]:
        label, wanted = self._label(entry[1]), self._source.labels
        if wanted and label not in wanted and self._names is None:
            raise annotated.stray_label(label, wanted)
        return label, annotated.corners(entry[0])

    def _find(self, row: Mapping[str, Any], name: str) -> Any:
        columns = self._source.columns
        return _first(row, (columns[name],) if name in columns else NAMES[name])

    def _get(self, row: Mapping[str, Any], name: str) -> Any:
        value = self._find(row, name)
        if value is None:
            wanted = self._source.columns.get(name) or " or ".join(NAMES[name])
            text = (
                f"has no {wanted}, only {', '.join(map(str, row))} (source.columns names columns "
                "of other names)"
            )
            raise FaultError(FaultKind.ROW_INCOMPLETE, text)
        return value

    def _texts(self, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
        texts = texts_of(self._get(row, name), TEXTS[name])
        if not any(texts):
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"the {name.removesuffix('s')} is empty")
        return tuple(filter(None, texts))


def texts_of(value: Any, keys: Sequence[str]) -> list[str]:
    """Texts of a value that is a text, texts, or objects that hold one under some key."""
    entries = value if isinstance(value, list | tuple) else [value]
    found = [_first(one, keys) if isinstance(one, dict) else one for one in entries]
    return ["" if text is None else str(text).strip() for text in found]


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value that is there."""
    return next((row[key] for key in keys if row.get(key) is not None), None)


def read_count(value: Any) -> int:
    """A count, or a `FaultError`."""
    text = str(files.whole(value)).strip()
    if not text.isdecimal():
        text = f"count {value!r} is no whole number"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return int(text)


class ImagesFormat(AnnotatedFormat):
    """A folder of images, of which nothing is known: what a teacher is to label."""

    answers = frozenset({"objects", "label", "count", "captions"})
    reads = SourceFormat.reads  # all files of the folder

    def parts(self, source: Source) -> Mapping[Split | None, Part]:
        """The folders that are named like splits, or the whole folder."""
        folder = Path(source.location)
        folders = files.folder_splits(folder)
        prefix = "{}/" if len(folders) > 1 else ""
        parts = {split: (path, prefix.format(path.name)) for split, path in folders.items()}
        return files.with_rest(parts, (folder, ""))

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        """Images in the folder and below it, in the order of paths."""
        folder, prefix = part
        found = files.images_below(folder)
        reading.total += len(found)
        for path in found:
            yield Record((path,), prefix + path.relative_to(folder).as_posix(), answer=Answer())


class ImageFolderFormat(ImagesFormat):
    """A folder of images with a folder for each class, or with `metadata.jsonl`.

    That lists the files: one object per line, whose `file_name` is relative to it and whose other
    columns a `RowReader` reads. Folders at the top that are named like splits hold the splits.
    """

    answers = ANSWERS - {"video"}
    suffixes = files.IMAGES

    def recognises(self, location: Location) -> bool:
        """Folders that hold images."""
        return location.path.is_dir() and bool(location.suffixes & files.IMAGES)

    def guess_task(self, path: str) -> Task:
        """The task that the columns of the first `metadata.jsonl` belong to."""
        tables = sorted(Path(path).glob(f"**/{METADATA}"))
        rows = files.read_lines(tables[0]) if tables else []
        columns = next((row for _, row in rows if row), {})
        return task_of_columns(columns, Task.VIDEO if self.video else Task.CLASSIFICATION)

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        """One for each file, by path, or for each row of the metadata, in its order.

        Ids are paths below the folder, followed by `#` and a number where a file has several rows.
        """
        listed = (part[0] / METADATA).is_file()
        yield from (self._listed if listed else self._by_class)(source, part, reading)

    def _by_class(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        folder, prefix = part
        counts = source.task.spec.answer == "count"
        if not counts and source.task.spec.answer != "label":
            raise DataError(
                f"{folder.name} has no {METADATA}, which task {source.task} needs: write one row "
                "with file_name and the answer for each file"
            )
        what = "videos" if self.video else "images"
        found = files.images_below(folder, self.suffixes, what)
        class_of = {path: path.relative_to(folder).parts[0] for path in found}
        classes = {label for path, label in class_of.items() if path.parent != folder}
        if source.labels and classes:
            annotated.check_labels(folder.name, sorted(classes), source.labels)
            found = [p for p in found if p.parent == folder or class_of[p] in source.labels]
        reading.total += len(found)
        for path in sorted(folder.iterdir()) if reading.thorough else ():
            if path.is_dir() and files.is_data(path.name) and path.name not in classes:
                text = f"folder {path.name} holds no {what}"
                reading.add(FaultKind.CLASS_UNUSED, path.name, text)
        for path in found:
            label, beside = class_of[path], path.parent == folder
            with reading.tolerate(path.name, "" if beside else f"folder {label}"):
                if beside and classes:
                    text = f"{folder.name}/{path.name} lies beside the folders of the classes"
                    raise FaultError(FaultKind.IMAGE_UNCLASSED, text)
                answer = Answer()  # nothing but files: what they show is not known
                if classes:
                    answer = Answer(count=read_count(label)) if counts else Answer(label=label)
                key = prefix + path.relative_to(folder).as_posix()
                yield Record((path,), key, answer=answer, video=self.video)

    def _listed(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        folder, prefix = part
        name = f"{folder.name}/{METADATA}"
        rows = files.read_lines(folder / METADATA)
        if not rows:
            raise DataError(f"{folder / METADATA} is empty: write one row for each file")
        reading.total += len(rows)
        distinct = {repr(row): row for _, row in rows}
        often = Counter(str(row.get("file_name")) for row in distinct.values() if row)
        asked: Counter[str] = Counter()
        finder, reader = files.Finder(folder, self.suffixes), RowReader(source, name, reading)
        for number, row in rows:
            item, where = f"{METADATA}, row {number}", f"{name}, row {number}"
            with reading.tolerate(item, where):
                file = _file_name(row)
                where = f"{where} ({file})"
                with reading.tolerate(item, where):
                    if distinct.pop(repr(row), None) is None:
                        raise FaultError(FaultKind.ROW_REPEATED, "it repeats an earlier row")
                    found = reader.read(row or {}, item, where)
                    several = len(found) > 1 or (often[file] > 1 and source.task.spec.prompted)
                    for fields in found:
                        key = prefix + (f"{file}#{asked[file]}" if several else file)
                        asked[file] += 1
                        media = (finder.find(file),)
                        yield Record(media, key, item=item, video=self.video, **fields)
        annotated.note_unlisted(finder, reading)


class VideoFolderFormat(ImageFolderFormat):
    """A folder of videos."""

    video = True
    answers = frozenset({"video", "count", "answers", "captions"})
    suffixes = videos.SUFFIXES

    def recognises(self, location: Location) -> bool:
        """Folders that hold videos."""
        return location.path.is_dir() and bool(location.suffixes & (videos.SUFFIXES - {".gif"}))


def _file_name(row: dict[str, Any] | None) -> str:
    if row is None:
        raise TypeError("is not a valid JSON object")
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise KeyError("file_name")
    if os.path.normpath(name).startswith(("..", "/")):
        raise FaultError(FaultKind.IMAGE_OUTSIDE, f"{name} lies outside the folder")
    return name


class HubFormat(AnnotatedFormat):
    """A data set by its name on the hub, with its configuration after ``:``; or a folder.

    Rows are streamed: only a few are in memory at a time.
    """

    remote = True
    reads = SourceFormat.reads  # all files of a folder

    def recognises(self, location: Location) -> bool:
        """Folders of Arrow or Parquet files, and ``owner/name`` that is not on this machine."""
        if location.path.is_dir():
            return bool(location.suffixes & {".arrow", ".parquet"})
        return not location.path.exists() and location.text.count("/") == 1

    def guess_task(self, path: str) -> Task:
        """The task that the columns belong to."""
        rows: Any = next(iter(_load(path).values()))
        columns = set(rows.features or next(iter(rows.take(1)), {}))
        return task_of_columns(columns, Task.CLASSIFICATION)

    def parts(self, source: Source) -> Mapping[Split | None, str | None]:
        """The splits that the data set names, or its only one as one piece."""
        named: dict[Split, str] = {}
        for name in _load(source.location):
            if name in files.SPLIT_NAMES:
                named.setdefault(files.SPLIT_NAMES[name], name)
        return files.with_rest(named, None)

    def records(self, source: Source, part: str | None, reading: ImageReader) -> Iterator[Record]:
        """One per row, or per phrase.

        The id is that of the row, or its number, after the split's name where there are several.
        """
        name, columns, splits = source.location, source.columns, _load(source.location)
        if part is None and len(splits) > 1:
            raise DataError(f"{name} has splits {', '.join(splits)}: name one")
        rows: Any = splits[part] if part is not None else next(iter(splits.values()))
        features = rows.features or {}
        known = features or next(iter(rows.take(1)), {})
        wanted = [columns["image"]] if "image" in columns else ["image", "images", "video", "img"]
        column = next((each for each in wanted if each in known), None)
        if column is None:
            raise DataError(
                f"{name} has no column {' or '.join(wanted)}, only {', '.join(known)}: name the "
                "column of the images in source.columns.image"
            )
        names = _class_names(features, columns, source.task)
        if names is not None and source.labels:
            annotated.check_labels(name, names, source.labels)
        reader = RowReader(source, name, reading, names)
        before, sound = reading.total, 0
        for number, row in enumerate(_encoded(rows, features)):
            reading.total = before + max(PATIENCE, number + 1)
            item, where = f"row {number}", f"{name}, row {number}"
            with reading.tolerate(item, where):
                media, video = _media(row.pop(column))
                key = str(row.get(columns.get("id", "id"), number))
                key = key if len(splits) == 1 else f"{part}/{key}"
                found = reader.read(row, item, where)
                sound += 1
                for place, fields in enumerate(found):
                    one = key if len(found) == 1 else f"{key}#{place}"
                    yield Record(media, one, item=item, video=video, **fields)
        if not sound:
            why = next((fault.text for fault in reading.found), "it is empty")
            raise DataError(f"{name}: no row could be read ({why}): check the data set")


def _encoded(rows: Any, features: Mapping[str, Any]) -> Any:
    """Rows whose images and videos are files, and not decoded yet."""
    import datasets

    for column, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image | datasets.Video):
            raw = type(inner)(decode=False)
            rows = rows.cast_column(column, raw if inner is feature else datasets.List(raw))
    return rows


def _load(name: str) -> dict[str, Any]:
    """The data set's splits as streams."""
    import datasets

    path, _, configuration = name.partition(":")
    folder = expanded(path)
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.Dataset):
                loaded = {str(loaded.split or "all"): loaded}
            return {split: rows.to_iterable_dataset() for split, rows in loaded.items()}
        source = str(folder) if folder.is_dir() else path
        streams = datasets.load_dataset(source, configuration or None, streaming=True)
        return {str(split): rows for split, rows in streams.items()}
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data set {name} cannot be loaded ({first_line(error)}): check the name, the network, "
            "and that HF_HUB_OFFLINE is not set"
        ) from error


def _class_names(
    features: Mapping[str, Any], columns: Mapping[str, str], task: Task
) -> list[str] | None:
    """Names that the data set declares for its class indices."""
    candidates: list[Any] = [features.get(columns.get("label", "label"))]
    if task.spec.detects:
        objects: Any = features.get(columns.get("objects", "objects"), {})
        objects = getattr(objects, "feature", objects)  # a list of objects
        candidates = list(objects.values()) if isinstance(objects, dict) else []
    for candidate in candidates:
        inner = getattr(candidate, "feature", candidate)
        if hasattr(inner, "names"):
            return list(inner.names)
    return None


def _media(value: Any) -> tuple[tuple[Media, ...], bool]:
    """The images of a row, at least one, and whether they are videos."""
    found: list[Media] = []
    video = False
    for part in value if isinstance(value, list) else [value]:
        media = part
        if isinstance(part, dict):
            path = Path(str(part.get("path") or ""))
            video |= path.suffix.lower() in videos.SUFFIXES - {".gif"}
            media = part.get("bytes") or path
        if isinstance(media, Image.Image | bytes | Path) and media != Path():
            found.append(media)
    if not found:
        raise FaultError(FaultKind.IMAGE_MISSING, "has no image")
    return tuple(found), video
