"""Data sets of the Hugging Face hub, by name, or local folders that `datasets` can load.

Rows are streamed: only one is in memory at a time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.images import decode_image, to_rgb
from valora_data.schema import Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats import videos
from valora_data.sources.formats.files import SPLIT_NAMES
from valora_data.sources.formats.labelled import ImageReader, Reading, check_labels
from valora_data.sources.formats.records import RowReader, task_of_columns
from valora_data.wording import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PATIENCE = 100
"""Least number of rows that the share of broken images refers to: a stream has no length."""


class HubFormat(SourceFormat):
    """A data set by its name on the hub, or a folder of tables."""

    remote = True

    def supports(self, task: Task) -> bool:
        """All tasks."""
        return True

    def recognises(self, location: Location) -> bool:
        """Folders of Arrow or Parquet files, and ``owner/name`` that is not on this machine."""
        if location.path.is_dir():
            return bool(location.suffixes & {".arrow", ".parquet"})
        return not location.path.exists() and location.text.count("/") == 1

    def guess_task(self, path: str) -> Task:
        """The task that the columns belong to."""
        return task_of_columns(hub_columns(path), Task.CLASSIFICATION)

    def open(self, source: Source) -> Splits:
        """The splits that the data set names, or its only one as one piece."""
        name = source.location
        named = hub_splits(name)
        places: Mapping[Split | None, str | None]
        places = take_missing_from_train(named) if named else {None: None}
        return {
            split: partial(
                read_hub,
                name,
                theirs,
                source.task,
                source.labels or None,
                columns=source.columns,
                frames=source.frames,
                reader=source.reader,
            )
            for split, theirs in places.items()
        }


def hub_splits(name: str) -> dict[Split, str]:
    """Our splits and what the data set calls them.

    Args:
        name: Name on the hub, with its configuration after ``:`` where it has several, or a folder.

    Raises:
        DataError: If it cannot be loaded.
    """
    found: dict[Split, str] = {}
    for split in _load(name):
        ours = SPLIT_NAMES.get(split)
        if ours is not None:
            found.setdefault(ours, split)
    return found


def hub_columns(name: str) -> set[str]:
    """Columns that the rows of a data set have.

    Raises:
        DataError: If it cannot be loaded.
    """
    rows: Any = next(iter(_load(name).values()))
    return set(rows.features or next(iter(rows.take(1)), {}))


def read_hub(
    name: str,
    split: str | None,
    task: Task,
    labels: Sequence[str] | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    frames: int = videos.FRAMES,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Stream the rows of a data set with an `image`, `images` or `video` column.

    Args:
        name: As in `hub_splits`.
        split: The data set's own name of the split; None where there is only one.
        task: Task of the samples, which decides on the columns (see `RowReader`).
        labels: Labels of the domain; rows of other declared classes are left out. None
            for all.
        columns: A column's name for a field (of `records.NAMES`, `image` or `id`), where it
            differs.
        frames: Frames to take of a video.
        reader: Counts the images that cannot be decoded; by default one that tolerates few.

    Yields:
        One sample per row, or per phrase; the id is that of the row, or its number, after the
        split's name where there are several.

    Raises:
        DataError: If the data set or a column is missing, a row cannot be read, or too many images
            cannot be decoded.
    """
    import datasets

    columns = dict(columns or {})
    splits = _load(name)
    if split is None and len(splits) > 1:
        raise DataError(f"{name} has splits {', '.join(splits)}: name one")
    if split is not None and split not in splits:
        raise DataError(f"{name} has no split {split!r}, only {', '.join(splits)}: name one")
    rows: Any = splits[split] if split is not None else next(iter(splits.values()))
    features = rows.features or {}
    media = _media_column(name, features or next(iter(rows.take(1)), {}), columns)
    for column, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image | datasets.Video):
            raw = type(inner)(decode=False)
            rows = rows.cast_column(column, raw if inner is feature else datasets.List(raw))
    names = _class_names(features, columns, task)
    if names is not None and labels:
        check_labels(name, names, labels)
    any_read = False
    with Reading(reader, name, 0) as reading:
        record = RowReader(name, task, labels, columns, names, reading)
        before = reading.total
        for number, row in enumerate(rows):
            reading.total = before + max(PATIENCE, number + 1)
            with reading.tolerate(f"row {number}"):
                images = _images(row.pop(media), frames, f"{name}, row {number}")
                key = str(row.get(columns.get("id", "id"), number))
                key = key if len(splits) == 1 else f"{split}/{key}"
                found = record.read(row, images[0].size, f"{name}, row {number}")
                for place, (prompt, answer) in enumerate(found):
                    sample_id = key if len(found) == 1 else f"{key}#{place}"
                    yield Sample(sample_id, images[0], answer, prompt, tuple(images[1:]))
                any_read = True
    if not any_read:
        why = reading.faults.found[0].text if reading.faults.found else "it is empty"
        raise DataError(f"{name}: no row could be read ({why}): check the data set")


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
        reason = first_line(error)
        raise DataError(
            f"data set {name} cannot be loaded ({reason}): check the name, the network, and that "
            "HF_HUB_OFFLINE is not set"
        ) from error


def _media_column(name: str, known: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    wanted = [columns["image"]] if "image" in columns else ["image", "images", "video", "img"]
    for column in wanted:
        if column in known:
            return column
    raise DataError(
        f"{name} has no column {' or '.join(wanted)}, only {', '.join(known)}: name the column of "
        "the images in source.columns.image"
    )


def _class_names(
    features: Mapping[str, Any], columns: Mapping[str, str], task: Task
) -> list[str] | None:
    """Names that the data set declares for its class indices."""
    if task.spec.detects:
        objects: Any = features.get(columns.get("objects", "objects"), {})
        objects = getattr(objects, "feature", objects)  # a list of objects
        candidates = list(objects.values()) if isinstance(objects, dict) else []
    else:
        candidates = [features.get(columns.get("label", "label"))]
    for candidate in candidates:
        inner = getattr(candidate, "feature", candidate)
        if hasattr(inner, "names"):
            return list(inner.names)
    return None


def _images(value: Any, frames: int, where: str) -> list[Image.Image]:
    """The images of a row, at least one."""
    images: list[Image.Image] = []
    for part in value if isinstance(value, list) else [value]:
        try:
            images += _decoded(part, frames)
        except FaultError:
            raise
        except (DataError, OSError, TypeError, AttributeError) as error:
            kind = FaultKind.IMAGE_UNREADABLE
            raise FaultError(kind, f"{where} cannot be decoded ({error})") from error
    if not images:
        raise FaultError(FaultKind.IMAGE_MISSING, f"{where} has no image")
    return images


def _decoded(part: Any, frames: int) -> list[Image.Image]:
    if isinstance(part, Image.Image):
        return [to_rgb(part, part.format)]
    content = part if isinstance(part, bytes) else part.get("bytes")
    path = "" if isinstance(part, bytes) else str(part.get("path") or "")
    if content is None:
        content = Path(path).read_bytes()
    if path and Path(path).suffix.lower() in videos.SUFFIXES - {".gif"}:
        return videos.read_frames(content, frames, Path(path).name)
    return [decode_image(content)]
