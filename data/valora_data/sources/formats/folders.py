"""Folders of images or videos in the layout of Hugging Face's `imagefolder` and `videofolder`.

Either each class has a folder, or a `metadata.jsonl` lists the files: one object per line, whose
`file_name` is relative to that file and whose other columns a `RowReader` reads. Folders at the
top that are named like splits hold the splits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats import videos
from valora_data.sources.formats.files import IMAGES, files_below, folder_splits, is_data
from valora_data.sources.formats.labelled import ImageReader, Reading, check_labels
from valora_data.sources.formats.records import RowReader, read_count, task_of_columns
from valora_data.sources.formats.tables import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from PIL import Image

METADATA = "metadata.jsonl"


class ImageFolderFormat(SourceFormat):
    """A folder of images."""

    def supports(self, task: Task) -> bool:
        """All tasks but those about videos."""
        return not task.spec.video

    def recognises(self, location: Location) -> bool:
        """Folders that hold images."""
        return location.path.is_dir() and bool(location.suffixes & IMAGES)

    def guess_task(self, path: str) -> Task:
        """The task that the columns of the first `metadata.jsonl` belong to."""
        files = sorted(Path(path).glob(f"**/{METADATA}"))
        rows = read_lines(files[0]) if files else []
        columns = next((row for _, row in rows if isinstance(row, dict)), {})
        return task_of_columns(columns, Task.VIDEO if self.video else Task.CLASSIFICATION)

    def open(self, source: Source) -> Splits:
        """The splits that folders are named after, or all files as one piece."""
        whole = Path(source.location)
        folders = folder_splits(whole)
        places = take_missing_from_train(folders) if folders else {None: whole}
        return {
            split: partial(
                read_folder,
                folder,
                source.task,
                source.labels or None,
                frames=source.frames if self.video else None,
                columns=source.columns,
                reader=source.reader,
                prefix="" if len(folders) < 2 else f"{folder.name}/",
            )
            for split, folder in places.items()
        }


class VideoFolderFormat(ImageFolderFormat):
    """A folder of videos."""

    video = True

    def supports(self, task: Task) -> bool:
        """Tasks about videos, and those that are asked about any image but give no boxes."""
        return task.spec.video or task.spec.answer not in ("label", "boxes")

    def recognises(self, location: Location) -> bool:
        """Folders that hold videos."""
        return location.path.is_dir() and bool(location.suffixes & (videos.SUFFIXES - {".gif"}))


def read_folder(
    folder: Path,
    task: Task,
    labels: Sequence[str] | None = None,
    *,
    frames: int | None = None,
    columns: Mapping[str, str] | None = None,
    reader: ImageReader | None = None,
    prefix: str = "",
) -> Iterator[Sample]:
    """Read a folder of images or of videos.

    Args:
        folder: The folder of one split, or of a set that comes in one piece.
        task: Task of the samples. Only classification, video and counting can do without a
            `metadata.jsonl`.
        labels: Labels of the domain; folders of other classes are left out. None for
            all.
        frames: Frames to take of each video, which makes it a folder of videos; None for images.
        columns: A column's name for a field of `records.NAMES`, where it differs.
        reader: Opens the files; by default a reader that tolerates few faults.
        prefix: What ids begin with, so that files of one name in two splits have two ids.

    Yields:
        One sample per file that decodes, by path, or per row of the metadata, in its order. The id
        is the prefix and the path below `folder`, followed by `#` and a number where a file has
        several rows.

    Raises:
        DataError: If there are no files, a label is missing or stray, a row is malformed or a file
            is listed twice, or too many files cannot be decoded.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist: check the path")
    with Reading(reader, folder.name, 0) as reading:
        opener = _Opener(reading, frames)
        if (folder / METADATA).is_file():
            rows = RowReader(
                f"{folder.name}/{METADATA}", task, labels, columns or {}, reader=reading
            )
            samples = _listed(folder, rows, opener)
        else:
            samples = _by_class(folder, task, labels, opener)
        for sample in samples:
            yield replace(sample, id=prefix + sample.id)


class _Opener:
    """Opens images, or frames of videos, through one reader that collects faults."""

    def __init__(self, reader: ImageReader, frames: int | None) -> None:
        self.reader = reader
        self.frames = frames
        self.suffixes = IMAGES if frames is None else videos.SUFFIXES
        self.what = "images" if frames is None else "videos"

    def open_all(self, paths: Iterable[Path]) -> Iterator[list[Image.Image]]:
        """The image or frames of each path; none if it cannot be decoded."""
        if self.frames is None:
            for picture in self.reader.open_all(paths):
                yield [] if picture is None else [picture]
            return
        last: tuple[Path | None, list[Image.Image]] = (None, [])
        for path in paths:
            if path != last[0]:
                images: list[Image.Image] = []
                with self.reader.tolerate(path.name):
                    images = videos.read_frames(path, self.frames)
                last = (path, images)
            yield last[1]


def _by_class(
    folder: Path, task: Task, labels: Sequence[str] | None, opener: _Opener
) -> Iterator[Sample]:
    if task.spec.answer not in ("label", "count"):
        raise DataError(
            f"{folder.name} has no {METADATA}, which task {task} needs: write one row with "
            "file_name and the answer for each file"
        )
    files = files_below(folder, opener.suffixes)
    if not files:
        raise DataError(f"{folder} holds no {opener.what}: the data set is empty")
    loose = [path for path in files if path.parent == folder]
    if len(loose) == len(files):  # nothing but files: what they show is not known
        class_of: dict[Path, str | None] = dict.fromkeys(files)
    else:
        files = [path for path in files if path.parent != folder]
        class_of = {path: path.relative_to(folder).parts[0] for path in files}
        found = list(dict.fromkeys(str(label) for label in class_of.values()))
        labels = found if labels is None else labels
        check_labels(folder.name, found, labels)
        class_of = {path: label for path, label in class_of.items() if label in labels}
    opener.reader.total += len(class_of)
    if None not in class_of.values():
        opener.reader.total += len(loose)
        for path in loose:
            text = f"{folder.name}/{path.name} lies beside the folders of the classes"
            opener.reader.add(FaultKind.IMAGE_UNCLASSED, path.name, text)
    if opener.reader.thorough:
        _note_unused(folder, class_of.values(), opener)
    for (path, label), images in zip(
        class_of.items(), opener.open_all(class_of), strict=True
    ):  # fmt: skip
        name = path.relative_to(folder).as_posix()
        with opener.reader.tolerate(name):
            if images:
                answer = Answer(label=label)
                if task.spec.answer == "count" and label is not None:
                    answer = Answer(count=read_count(label, labels, f"folder {label}"))
                yield Sample(name, images[0], answer, rest=tuple(images[1:]))


def _note_unused(folder: Path, used: Iterable[str | None], opener: _Opener) -> None:
    """Note folders without samples, and files that are of another kind."""
    labels = set(used)
    for path in filter(Path.is_dir, sorted(folder.iterdir())):
        known = path.name in labels or not is_data(path.name)
        if not known and not files_below(path, opener.suffixes):
            text = f"folder {path.name} holds no {opener.what}"
            opener.reader.add(FaultKind.CLASS_UNUSED, path.name, text)


def _listed(folder: Path, rows: RowReader, opener: _Opener) -> Iterator[Sample]:
    reader = opener.reader
    lines = read_lines(folder / METADATA)
    if not lines:
        raise DataError(f"{folder / METADATA} is empty: write one row for each file")
    reader.total += len(lines)
    entries: list[tuple[int, str, dict[str, Any]]] = []
    seen: set[str] = set()
    for number, entry in lines:
        with reader.tolerate(f"{METADATA}, row {number}"):
            name = _file_name(folder, number, entry)
            key = repr(entry)
            if key in seen:
                raise FaultError(
                    FaultKind.ROW_REPEATED,
                    f"{folder.name}/{METADATA}, row {number} ({name}) repeats an earlier row",
                )
            seen.add(key)
            entries.append((number, name, entry))
    often = Counter(name for _, name, _ in entries)
    if not rows.task.spec.prompted:
        entries = list(_once(folder, entries, often, reader))
        often = Counter(name for _, name, _ in entries)
    if reader.thorough:
        for path in files_below(folder, opener.suffixes):
            name = path.relative_to(folder).as_posix()
            if name not in often:
                reader.add(FaultKind.IMAGE_UNLISTED, name, f"{name} is not listed")
    asked: Counter[str] = Counter()
    opened = opener.open_all(folder / name for _, name, _ in entries)
    for (number, name, entry), images in zip(entries, opened, strict=True):
        if not images:
            continue
        where = f"{folder.name}/{METADATA}, row {number} ({name})"
        with reader.tolerate(f"{METADATA}, row {number}"):
            found = rows.read(entry, images[0].size, where)
            for prompt, answer in found:
                key = f"{name}#{asked[name]}" if often[name] > 1 or len(found) > 1 else name
                asked[name] += 1
                yield Sample(key, images[0], answer, prompt, tuple(images[1:]))


def _file_name(folder: Path, number: int, entry: Any) -> str:
    where = f"{folder.name}/{METADATA}, row {number}"
    if not isinstance(entry, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is not valid JSON")
    if not isinstance(entry.get("file_name"), str) or not entry["file_name"]:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no file_name")
    name = str(entry["file_name"])
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise FaultError(FaultKind.IMAGE_OUTSIDE, f"{where}: {name} lies outside the folder")
    return name


def _once(
    folder: Path,
    entries: list[tuple[int, str, dict[str, Any]]],
    often: Counter[str],
    reader: ImageReader,
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Entries whose file no earlier one names."""
    seen: set[str] = set()
    for number, name, entry in entries:
        if name not in seen:
            yield number, name, entry
        elif often[name]:
            text = f"{folder.name}/{METADATA} lists {name} {often[name]} times"
            reader.add(FaultKind.IMAGE_TWICE, f"{METADATA}, row {number}", text)
        seen.add(name)
