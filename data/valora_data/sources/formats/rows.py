"""Tables of images or videos: folders with `metadata.jsonl`, and data sets on the hub."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader, Media
from valora_data.hashing import hub_name
from valora_data.schema import Answer, Split, Task
from valora_data.shards import is_shard, open_shard
from valora_data.sources.base import ANSWERS, Location, Source, SourceFormat, Splits
from valora_data.sources.formats import annotated, files, videos
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape
from valora_data.wording import first_line

# Columns of each field, the first that exists is read.
NAMES: Mapping[str, tuple[str, ...]] = {
    "label": ("label", "labels", "class"),
    "objects": ("objects",),
    "question": ("question", "prompt"),
    "answers": ("answers", "answer"),
    "captions": ("captions", "caption", "text"),
    "phrase": ("phrase", "expression", "sentence", "sentences", "text"),
    "bbox": ("bbox", "box"),
    "count": ("count", "label"),
    "image": ("image", "images", "video", "img"),
}
TASKS: Mapping[str, Task] = {
    "question": Task.VQA, "objects": Task.DETECTION, "phrase": Task.GROUNDING,
    "expression": Task.GROUNDING, "sentence": Task.GROUNDING, "caption": Task.CAPTION,
    "captions": Task.CAPTION, "text": Task.CAPTION, "count": Task.COUNTING,
}  # fmt: skip
"""Columns that tell the task, the most specific first."""
TEXTS = ("answer", "sent", "raw", "caption", "text", "phrase")
"""Keys of texts in objects, where a field has objects instead of texts."""
CATEGORIES = ("category", "categories", "label")  # Keys of the classes of objects
PATIENCE = 100
"""Least number of rows that the share of broken images refers to: a stream has no length."""
METADATA = "metadata.jsonl"
Part = tuple[Path, str]  # A folder, and what ids of its samples begin with


def task_of_columns(columns: Collection[str], labelled: Task) -> Task:
    """The most likely task of a table; `labelled` if answers are labels or there are no columns."""
    found = next((task for column, task in TASKS.items() if column in columns), None)
    if found is None and columns and not {"label", "labels"} & {*columns}:
        names = ", ".join(sorted(columns))
        raise DataError(f"columns {names} do not tell the task: give one with --task")
    return found or labelled


class RowReader:
    """Reads the rows of one data set; with declared `names`, those of classes asked for."""

    def __init__(self, source: Source, name: str, names: Sequence[str] | None = None) -> None:
        self._task, self._labels, self._columns = source.task, source.labels, source.columns
        self._name, self._names = name, names
        self._last_label: Any = None

    def read(self, row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Fields of a `Record`, for each of several phrases; none if the class is not asked for."""
        match self._task.spec.answer:
            case "boxes" if self._task.spec.detects:
                entries = [(where, entry) for entry in self._objects(row)]
                return [{"entries": entries, "shape": self._object}]
            case "boxes":
                edges = annotated.corners(self._get(row, "bbox"))
                phrases = self._texts(row, "phrase")
                return [{"entries": [(where, (text, edges))], "prompt": text} for text in phrases]
            case "label":
                label = self._label(self._get(row, "label"))
                left_out = self._names is not None and self._labels and label not in self._labels
                return [] if left_out else [{"answer": Answer(label=label)}]
            case "count":
                return [{"answer": Answer(count=read_count(self._get(row, "count")))}]
            case "captions":
                return [{"answer": Answer(captions=self._texts(row, "captions"))}]
        question = self._get(row, "question", optional=True)
        answers = self._texts(row, "answers")
        prompt = None if question is None else (as_text(question) or None)
        return [{"answer": Answer(answers=answers), "prompt": prompt}]

    def _label(self, value: Any) -> str:
        """A label's name; labels must be all numbers or all names."""
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        value = files.whole(value) if isinstance(value, float) else value  # as pandas writes them
        text, last = "", self._last_label
        if isinstance(value, bool) or not isinstance(value, int | str):
            text = f"label {value!r} is no name and no number"
        elif isinstance(value, int) and self._names and not 0 <= value < len(self._names):
            text = f"class index {value} lies outside the {len(self._names)} declared names"
        elif last is not None and type(last) is not type(value):
            text = f"label {value!r} and, before, {last!r}: {self._name} mixes numbers and names"
        if text:
            raise FaultError(FaultKind.LABEL_MALFORMED, text)
        self._last_label = value
        return self._names[value] if self._names and isinstance(value, int) else str(value)

    def _objects(self, row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        objects = self._get(row, "objects")
        if isinstance(objects, list) and all(isinstance(one, dict) for one in objects):
            return [(one.get("bbox"), _first(one, CATEGORIES)) for one in objects]
        if not isinstance(objects, dict):
            raise TypeError("objects are no object of lists, and no list of objects")
        boxes, labels = objects.get("bbox", []), _first(objects, CATEGORIES) or []
        if len(boxes) != len(labels):
            raise ValueError(f"{len(boxes)} bbox with {len(labels)} category")
        return list(zip(boxes, labels, strict=True))

    def _object(self, entry: tuple[Any, Any]) -> Shape:
        label = self._label(entry[1])
        if self._labels and label not in self._labels and self._names is None:
            raise annotated.stray_label(label, self._labels)
        return label, annotated.corners(entry[0])

    def _get(self, row: Mapping[str, Any], name: str, *, optional: bool = False) -> Any:
        columns = names_of(name, self._columns)
        value = _first(row, columns)
        if value is None and not optional:
            text = f"has no {' or '.join(columns)}, only {', '.join(map(str, row))}"
            text += " (source.columns names columns of other names)"
            raise FaultError(FaultKind.ROW_INCOMPLETE, text)
        return value

    def _texts(self, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """Texts of a field that is a text, texts, or objects that hold one under some key."""
        value = self._get(row, name)
        entries = value if isinstance(value, list | tuple) else [value]
        found = [_first(one, TEXTS) if isinstance(one, dict) else one for one in entries]
        texts = [as_text(text).strip() for text in found if text is not None]
        if not any(texts):
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"the {name.removesuffix('s')} is empty")
        return tuple(filter(None, texts))


def names_of(name: str, columns: Mapping[str, str]) -> Sequence[str]:
    """Names that the column of a field may have, with those of `Source.columns`."""
    return [columns[name]] if name in columns else NAMES[name]


def as_text(value: Any) -> str:
    """A text, or a number as one; a `TypeError` for what is neither."""
    if not isinstance(value, str | int | float) or repr(value) == "nan":  # as pandas writes none
        raise TypeError(f"{value!r} is no text")
    return str(value)


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def read_count(value: Any) -> int:
    """A count, or a `FaultError`."""
    text = str(files.whole(value)).strip()
    if not text.isdecimal() or len(text) > 9:  # what shards hold
        raise FaultError(FaultKind.LABEL_MALFORMED, f"count {value!r} is no whole number")
    return int(text)


class ImagesFormat(AnnotatedFormat):
    """A folder of images, of which nothing is known: what a teacher is to label."""

    answers = frozenset({"objects", "label", "count", "captions"})
    reads = SourceFormat.reads  # all files of the folder

    def parts(self, source: Source) -> Mapping[Split | None, Part]:
        folder = Path(source.location)
        folders = files.folder_splits(folder).items()
        many = len(folders) > 1
        parts = {split: (path, f"{path.name}/" if many else "") for split, path in folders}
        return files.with_rest(parts, (folder, ""))

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        folder, prefix = part
        found = files.images_below(folder)
        reading.total += len(found)
        for path in found:
            yield Record((path,), prefix + path.relative_to(folder).as_posix(), answer=Answer())


class ImageFolderFormat(ImagesFormat):
    """A folder of images with a folder for each class, or with rows in `metadata.jsonl`."""

    answers = ANSWERS - {"video"}
    suffixes = files.IMAGES

    def recognises(self, location: Location) -> bool:
        return location.path.is_dir() and bool(location.suffixes & files.IMAGES)

    def guess_task(self, path: str) -> Task:
        tables = sorted(Path(path).glob(f"**/{METADATA}"))[:1]
        columns = next((row for table in tables for _, row in files.read_lines(table) if row), {})
        return task_of_columns(columns, Task.VIDEO if self.video else Task.CLASSIFICATION)

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        """One for each file or row of the metadata; ids of several rows end in ``#number``."""
        listed = (part[0] / METADATA).is_file()
        return (self._listed if listed else self._by_class)(source, part, reading)

    def _by_class(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        folder, prefix = part
        if source.task.spec.answer != "label":
            text = f"{folder.name} has no {METADATA}, which task {source.task} needs: write a row"
            raise DataError(f"{text} with file_name and the answer for each file")
        what = "videos" if self.video else "images"
        found = files.images_below(folder, self.suffixes, what)
        class_of = {path: path.relative_to(folder).parts[0] for path in found}
        classes = {label for path, label in class_of.items() if path.parent != folder}
        if odd := [label for label in classes if files.readable(label) != label]:
            text = f"class folder {files.readable(odd[0])} of {folder.name} has a name that is no"
            raise DataError(f"{text} UTF-8: give it another")
        if source.labels and classes:
            annotated.check_labels(folder.name, sorted(classes), source.labels)
            found = [p for p in found if p.parent == folder or class_of[p] in source.labels]
        reading.total += len(found)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and files.is_data(path.name) and path.name not in classes:
                text = f"folder {files.readable(path.name)} holds no {what}"
                reading.add(FaultKind.CLASS_UNUSED, path.name, text)
        for path in found:
            label, beside = class_of[path], path.parent == folder
            with reading.tolerate(path.name, "" if beside else f"folder {label}"):
                if beside and classes:
                    text = f"{folder.name}/{path.name} lies beside the folders of the classes"
                    raise FaultError(FaultKind.IMAGE_UNCLASSED, text)
                # Nothing but files: what they show is not known.
                answer = Answer(label=label) if classes else Answer()
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
        finder, reader = files.Finder(folder, self.suffixes), RowReader(source, name)
        for number, row in rows:
            item, where = f"{METADATA}, row {number}", f"{name}, row {number}"
            with reading.tolerate(item, where):
                file = files.as_object(row).get("file_name")
                if not isinstance(file, str) or not file:
                    raise KeyError("file_name")
                if os.path.normpath(file).startswith(("..", "/")):
                    raise FaultError(FaultKind.IMAGE_OUTSIDE, f"{file} lies outside the folder")
                where = f"{where} ({file})"
                with reading.tolerate(item, where):
                    if distinct.pop(repr(row), None) is None:
                        raise FaultError(FaultKind.ROW_REPEATED, "it repeats an earlier row")
                    found = reader.read(row or {}, where)
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
        return location.path.is_dir() and bool(location.suffixes & (videos.SUFFIXES - {".gif"}))


class HubFormat(AnnotatedFormat):
    """A data set on the hub (``name@revision:configuration``) or folder of `datasets`; streamed."""

    remote = texts = True
    reads = SourceFormat.reads  # all files of a folder

    def recognises(self, location: Location) -> bool:
        """Folders of Arrow or Parquet files, and ``owner/name`` that is not on this machine."""
        if location.path.is_dir():
            return bool(location.suffixes & {".arrow", ".parquet"})
        return not location.path.exists() and location.text.count("/") == 1

    def guess_task(self, path: str) -> Task:
        return task_of_columns(_columns(next(iter(_load(path).values()))), Task.CLASSIFICATION)

    def parts(self, source: Source) -> Mapping[Split | None, str | None]:
        named: dict[Split, str] = {}
        for name in _load(source.location):
            if name in files.SPLIT_NAMES:
                named.setdefault(files.SPLIT_NAMES[name], name)
        return files.with_rest(named, None)

    def records(self, source: Source, part: str | None, reading: ImageReader) -> Iterator[Record]:
        """One per row or phrase; the id is the row's or its number, after the split's name."""
        name, columns, splits = source.location, source.columns, _load(source.location)
        if part is None and len(splits) > 1:
            raise DataError(f"{name} has splits {', '.join(splits)}: name one")
        rows: Any = splits[part] if part is not None else next(iter(splits.values()))
        known = _columns(rows)
        wanted, questions = (names_of(name, columns) for name in ("image", "question"))
        column = next((each for each in wanted if each in known), None)
        alone = source.task.spec.answer == "answers" and any(one in known for one in questions)
        if column is None and not (alone and "image" not in columns):
            text = f"{name} has no column {' or '.join(wanted)}, only {', '.join(known)}"
            raise DataError(f"{text}: name the column of the images in source.columns.image")
        names = _class_names(rows.features or {}, columns, source.task)
        if names is not None and source.labels:
            annotated.check_labels(name, names, source.labels)
        reader = RowReader(source, name, names)
        before, sound = reading.total, 0
        for number, row in enumerate(_encoded(rows)):
            reading.total = before + max(PATIENCE, number + 1)
            item, where = f"row {number}", f"{name}, row {number}"
            with reading.tolerate(item, where):
                media, video = ((), False) if column is None else _media(row.pop(column))
                key = str(row.get(columns.get("id", "id"), number))
                key = key if len(splits) == 1 else f"{part}/{key}"
                found = reader.read(row, where)
                sound += 1
                for index, fields in enumerate(found):
                    one = key if len(found) == 1 else f"{key}#{index}"
                    yield Record(media, one, item=item, video=video, **fields)
        if not sound:
            why = next((fault.text for fault in reading.found), "it is empty")
            raise DataError(f"{name}: no row could be read ({why}): check the data set")


def _columns(rows: Any) -> list[str]:
    return list(rows.features or next(iter(rows.take(1)), {}))


def _encoded(rows: Any) -> Any:
    """Rows whose images and videos are files, and not decoded yet."""
    import datasets

    for column, feature in (rows.features or {}).items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image | datasets.Video):
            raw = type(inner)(decode=False)
            rows = rows.cast_column(column, raw if inner is feature else datasets.List(raw))
    return rows


def _load(name: str) -> dict[str, Any]:
    import datasets

    path, _, configuration = name.partition(":")
    folder = expanded(path)
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.Dataset):
                loaded = {str(loaded.split or "all"): loaded}
            return {split: rows.to_iterable_dataset() for split, rows in loaded.items()}
        source, revision = (str(folder), None) if folder.is_dir() else hub_name(path)
        streams = datasets.load_dataset(
            source, configuration or None, revision=revision, streaming=True
        )
        return {str(split): rows for split, rows in streams.items()}
    except (OSError, ValueError, RuntimeError) as error:
        text = f"data set {name} cannot be loaded ({first_line(error)}): check the name, the"
        raise DataError(f"{text} network, and that HF_HUB_OFFLINE is not set") from error


def _class_names(
    features: Mapping[str, Any], columns: Mapping[str, str], task: Task
) -> list[str] | None:
    """Names that the data set declares for its class indices."""
    field = "objects" if task.spec.detects else "label"
    held: Any = next((features[x] for x in names_of(field, columns) if x in features), None)
    held = getattr(held, "feature", held) if task.spec.detects else held  # a list of objects
    candidates = list(held.values()) if isinstance(held, dict) else [held]
    inner = (getattr(candidate, "feature", candidate) for candidate in candidates)
    return next((list(one.names) for one in inner if hasattr(one, "names")), None)


def _media(value: Any) -> tuple[tuple[Media, ...], bool]:
    """The images of a row, at least one, and whether they are videos."""
    found, video = list[Media](), False
    for media in value if isinstance(value, list) else [value]:
        if isinstance(media, dict):
            path = Path(str(media.get("path") or ""))
            video |= path.suffix.lower() in videos.SUFFIXES - {".gif"}
            media = media.get("bytes") or path  # noqa: PLW2901
        if isinstance(media, Image.Image | bytes | Path) and media != Path():
            found.append(media)
    if not found:
        raise FaultError(FaultKind.IMAGE_MISSING, "has no image")
    return tuple(found), video


class ShardsFormat(SourceFormat):
    """The folder of one split, or a folder with one folder for each split."""

    texts = True

    def recognises(self, location: Location) -> bool:
        return any(is_shard(location.path / (split or "")) for split in (None, *Split))

    def open(self, source: Source) -> Splits:
        path = Path(source.location)
        splits = [None] if is_shard(path) else [one for one in Split if is_shard(path / one)]
        if not splits:
            text = f"{path} holds no shards: name the folder of a `data` stage, or one split"
            raise DataError(text)
        return {split: open_shard(path / (split or "")).__iter__ for split in splits}
