"""Folders of images or videos in the layout of Hugging Face's `imagefolder` and `videofolder`.

Either each class has a folder, or a `metadata.jsonl` lists the files: one object per line, whose
`file_name` is relative to that file and whose other columns a `RowReader` reads. Folders at the
top that are named like splits hold the splits.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats import videos
from valora_data.sources.formats.labelled import ImageReader, check_labels
from valora_data.sources.formats.records import RowReader, read_count, task_of_columns
from valora_data.sources.formats.yolo import SUFFIXES as IMAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL import Image

METADATA = "metadata.jsonl"
SPLIT_NAMES: Mapping[str, Split] = {
    "train": Split.TRAIN, "training": Split.TRAIN, "unlabelled": Split.UNLABELLED,
    "unlabeled": Split.UNLABELLED, "unsupervised": Split.UNLABELLED, "val": Split.VAL,
    "validation": Split.VAL, "valid": Split.VAL, "dev": Split.VAL, "test": Split.TEST,
    "testing": Split.TEST, "testA": Split.TEST, "testB": Split.TEST,
}  # fmt: skip
"""Split by the names that other tools use."""


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
        lines = files[0].read_text(encoding="utf-8").splitlines() if files else []
        columns = json.loads(lines[0]) if lines else {}
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


def folder_splits(folder: Path) -> dict[Split, Path]:
    """Folders of the splits, if any are named so.

    Raises:
        DataError: If the folder does not exist, or two folders stand for one split.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist: check the path")
    found: dict[Split, Path] = {}
    for item in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(item.name)
        if item.is_dir() and split is not None:
            if split in found:
                raise DataError(
                    f"{folder.name} has folders {found[split].name} and {item.name} for the split "
                    f"{split}: keep one"
                )
            found[split] = item
    return found


def read_folder(
    folder: Path,
    task: Task,
    labels: Sequence[str] | None = None,
    *,
    frames: int | None = None,
    columns: Mapping[str, str] | None = None,
    reader: ImageReader | None = None,
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
        reader: Opens the files; by default a reader that tolerates few broken files.

    Yields:
        One sample per file that decodes, by path, or per row of the metadata, in its order. The id
        is the path below `folder`, followed by `#` and a number where a file has several rows.

    Raises:
        DataError: If there are no files, a label is missing or stray, a row is malformed or a file
            is listed twice, or too many files cannot be decoded.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist: check the path")
    reader = reader or ImageReader(folder.name)
    opener = _Opener(reader, frames)
    if (folder / METADATA).is_file():
        rows = RowReader(f"{folder.name}/{METADATA}", task, labels, columns or {})
        yield from _listed(folder, rows, opener)
    else:
        yield from _by_class(folder, task, labels, opener)
    reader.finish()


class _Opener:
    """Opens images, or frames of videos, through one reader that counts failures."""

    def __init__(self, reader: ImageReader, frames: int | None) -> None:
        self.reader = reader
        self.frames = frames
        self.suffixes = IMAGES if frames is None else videos.SUFFIXES
        self.what = "images" if frames is None else "videos"

    def open(self, path: Path) -> list[Image.Image]:
        if self.frames is None:
            picture = self.reader.open(path)
            return [] if picture is None else [picture]
        try:
            return videos.read_frames(path, self.frames)
        except DataError as error:
            self.reader.skip(path.name, error)
            return []


def _files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file()
    )


def _by_class(
    folder: Path, task: Task, labels: Sequence[str] | None, opener: _Opener
) -> Iterator[Sample]:
    if task.spec.answer not in ("label", "count"):
        raise DataError(
            f"{folder.name} has no {METADATA}, which task {task} needs: write one row with "
            "file_name and the answer for each file"
        )
    files = _files(folder, opener.suffixes)
    if not files:
        raise DataError(f"{folder} holds no {opener.what}: the data set is empty")
    loose = [path for path in files if path.parent == folder]
    if len(loose) == len(files):  # nothing but files: what they show is not known
        class_of: dict[Path, str | None] = dict.fromkeys(files)
    elif loose:
        raise DataError(
            f"{folder.name}/{loose[0].name} lies beside the folders of the classes: move it into "
            "one of them"
        )
    else:
        class_of = {path: path.relative_to(folder).parts[0] for path in files}
        found = list(dict.fromkeys(str(label) for label in class_of.values()))
        labels = found if labels is None else labels
        check_labels(folder.name, found, labels)
        class_of = {path: label for path, label in class_of.items() if label in labels}
    opener.reader.total += len(class_of)
    for path, label in class_of.items():
        images = opener.open(path)
        if images:
            answer = Answer(label=label)
            if task.spec.answer == "count" and label is not None:
                answer = Answer(count=read_count(label, labels, f"folder {label}"))
            name = path.relative_to(folder).as_posix()
            yield Sample(name, images[0], answer, rest=tuple(images[1:]))


def _listed(folder: Path, rows: RowReader, opener: _Opener) -> Iterator[Sample]:
    entries = _metadata(folder / METADATA)
    opener.reader.total += len(entries)
    often = Counter(str(entry["file_name"]) for entry in entries)
    several = rows.task.spec.prompted
    for name, count in often.items():
        if count > 1 and not several:
            raise DataError(f"{folder.name}/{METADATA} lists {name} {count} times: keep one row")
    seen: Counter[str] = Counter()
    last: tuple[str, list[Image.Image]] = ("", [])
    for number, entry in enumerate(entries, start=1):
        name = str(entry["file_name"])
        if name != last[0]:  # rows of one file often follow each other
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise DataError(
                    f"{folder.name}/{METADATA}, row {number}: {name} lies outside the folder: "
                    "move it inside"
                )
            last = (name, opener.open(path))
        images = last[1]
        if not images:
            continue
        where = f"{folder.name}/{METADATA}, row {number} ({name})"
        found = rows.read(entry, images[0].size, where)
        for prompt, answer in found:
            key = f"{name}#{seen[name]}" if often[name] > 1 or len(found) > 1 else name
            seen[name] += 1
            yield Sample(key, images[0], answer, prompt, tuple(images[1:]))


def _metadata(path: Path) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path.parent.name}/{path.name}, row {number} is not valid JSON ({error}): fix it"
            ) from error
        if not isinstance(entry, dict) or "file_name" not in entry:
            raise DataError(
                f"{path.parent.name}/{path.name}, row {number} has no file_name: name its file"
            )
        entries.append(entry)
    if not entries:
        raise DataError(f"{path} is empty: write one row for each file")
    return entries
