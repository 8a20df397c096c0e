"""Folders of images or videos in the layout of Hugging Face's `imagefolder` and `videofolder`.

Either each class has a folder, or a `metadata.jsonl` lists the files: one object per line, whose
`file_name` is relative to that file and whose other columns a `RowReader` reads. Folders at the
top that are named like splits hold the splits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import ANSWERS, Location, Source
from valora_data.sources.formats import videos
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    check_labels,
    note_unlisted,
)
from valora_data.sources.formats.files import (
    IMAGES,
    Finder,
    files_below,
    folder_splits,
    images_below,
    is_data,
    with_rest,
)
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.records import RowReader, read_count, task_of_columns
from valora_data.sources.formats.tables import read_lines

METADATA = "metadata.jsonl"
Part = tuple[Path, str]
"""A folder, and what ids of its samples begin with."""


class ImagesFormat(AnnotatedFormat):
    """A folder of images, of which nothing is known: what a teacher is to label."""

    answers = frozenset({"objects", "label", "count", "captions"})

    def parts(self, source: Source) -> Mapping[Split | None, Part]:
        """The folders that are named like splits, or the whole folder."""
        whole = Path(source.location)
        folders = folder_splits(whole)
        prefix = "{}/" if len(folders) > 1 else ""
        parts = {split: (path, prefix.format(path.name)) for split, path in folders.items()}
        return with_rest(parts, (whole, ""))

    def reads(self, source: Source) -> Iterator[Path]:
        """All files of the folder."""
        yield from files_below(Path(source.location))

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        """Images in the folder and below it, in the order of paths."""
        folder, prefix = part
        files = images_below(folder)
        reading.total += len(files)
        for path in files:
            yield Record((path,), prefix + path.relative_to(folder).as_posix(), answer=Answer())


class ImageFolderFormat(ImagesFormat):
    """A folder of images with a folder for each class, or with `metadata.jsonl`."""

    answers = ANSWERS - {"video"}
    suffixes = IMAGES

    def recognises(self, location: Location) -> bool:
        """Folders that hold images."""
        return location.path.is_dir() and bool(location.suffixes & IMAGES)

    def guess_task(self, path: str) -> Task:
        """The task that the columns of the first `metadata.jsonl` belong to."""
        files = sorted(Path(path).glob(f"**/{METADATA}"))
        rows = read_lines(files[0]) if files else []
        columns = next((row for _, row in rows if isinstance(row, dict)), {})
        return task_of_columns(columns, Task.VIDEO if self.video else Task.CLASSIFICATION)

    def records(self, source: Source, part: Part, reading: ImageReader) -> Iterator[Record]:
        """One for each file, by path, or for each row of the metadata, in its order.

        Ids are paths below the folder, followed by `#` and a number where a file has several rows.
        """
        listed = (part[0] / METADATA).is_file()
        read = self._listed if listed else self._by_class
        for path, key, fields in read(source, part[0], reading):
            yield Record((path,), part[1] + key, video=self.video, **fields)

    def _by_class(
        self, source: Source, folder: Path, reading: ImageReader
    ) -> Iterator[tuple[Path, str, dict[str, Any]]]:
        counts = source.task.spec.answer == "count"
        if not counts and source.task.spec.answer != "label":
            raise DataError(
                f"{folder.name} has no {METADATA}, which task {source.task} needs: write one row "
                "with file_name and the answer for each file"
            )
        what = "videos" if self.video else "images"
        class_of = {
            path: path.relative_to(folder).parts[0]
            for path in images_below(folder, self.suffixes, what)
        }
        classes = {label for path, label in class_of.items() if path.parent != folder}
        if source.labels and classes:
            check_labels(folder.name, sorted(classes), source.labels)
        wanted = {*source.labels} or classes
        files = [path for path in class_of if path.parent == folder or class_of[path] in wanted]
        reading.total += len(files)
        for path in sorted(folder.iterdir()) if reading.thorough else ():
            if path.is_dir() and is_data(path.name) and not files_below(path, self.suffixes):
                text = f"folder {path.name} holds no {what}"
                reading.add(FaultKind.CLASS_UNUSED, path.name, text)
        for path in files:
            label, key = class_of[path], path.relative_to(folder).as_posix()
            with reading.tolerate(path.name):
                if not classes:  # nothing but files: what they show is not known
                    answer = Answer()
                elif path.parent == folder:
                    text = f"{folder.name}/{path.name} lies beside the folders of the classes"
                    raise FaultError(FaultKind.IMAGE_UNCLASSED, text)
                elif counts:
                    answer = Answer(count=read_count(label, f"folder {label}"))
                else:
                    answer = Answer(label=label)
                yield path, key, {"answer": answer}

    def _listed(
        self, source: Source, folder: Path, reading: ImageReader
    ) -> Iterator[tuple[Path, str, dict[str, Any]]]:
        name = f"{folder.name}/{METADATA}"
        rows = read_lines(folder / METADATA)
        if not rows:
            raise DataError(f"{folder / METADATA} is empty: write one row for each file")
        reading.total += len(rows)
        distinct = {repr(row): row for _, row in rows}
        often = Counter(
            str(row.get("file_name")) for row in distinct.values() if isinstance(row, dict)
        )
        asked: Counter[str] = Counter()
        finder, reader = Finder(folder, self.suffixes), RowReader(source, name, reading)
        for number, row in rows:
            item, where = f"{METADATA}, row {number}", f"{name}, row {number}"
            with reading.tolerate(item):
                file = _file_name(row, where)
                where = f"{where} ({file})"
                if distinct.pop(repr(row), None) is None:
                    raise FaultError(FaultKind.ROW_REPEATED, f"{where} repeats an earlier row")
                found = reader.read(row, item, where)
                several = len(found) > 1 or (often[file] > 1 and source.task.spec.prompted)
                for fields in found:
                    key = f"{file}#{asked[file]}" if several else file
                    asked[file] += 1
                    yield finder.find(file), key, fields | {"item": item}
        note_unlisted(finder, reading)


class VideoFolderFormat(ImageFolderFormat):
    """A folder of videos."""

    video = True
    answers = frozenset({"video", "count", "answers", "captions"})
    suffixes = videos.SUFFIXES

    def recognises(self, location: Location) -> bool:
        """Folders that hold videos."""
        return location.path.is_dir() and bool(location.suffixes & (videos.SUFFIXES - {".gif"}))


def _file_name(row: Any, where: str) -> str:
    if not isinstance(row, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is not valid JSON")
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no file_name")
    if os.path.normpath(name).startswith(("..", "/")):
        raise FaultError(FaultKind.IMAGE_OUTSIDE, f"{where}: {name} lies outside the folder")
    return name
