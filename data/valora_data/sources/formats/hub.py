"""Data sets of the Hugging Face hub, by name, or local folders that `datasets` can load.

Rows are streamed: only a few are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import Location, Source, SourceFormat
from valora_data.sources.formats import videos
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, check_labels
from valora_data.sources.formats.files import SPLIT_NAMES, with_rest
from valora_data.sources.formats.labelled import ImageReader, Media
from valora_data.sources.formats.records import RowReader, task_of_columns
from valora_data.wording import first_line

PATIENCE = 100
"""Least number of rows that the share of broken images refers to: a stream has no length."""


class HubFormat(AnnotatedFormat):
    """A data set by its name on the hub, with its configuration after ``:``; or a folder."""

    remote = True

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
            if name in SPLIT_NAMES:
                named.setdefault(SPLIT_NAMES[name], name)
        return with_rest(named, None)

    def reads(self, source: Source) -> Iterator[Path]:
        """All files of a folder."""
        return SourceFormat.reads(self, source)

    def records(self, source: Source, part: str | None, reading: ImageReader) -> Iterator[Record]:
        """One per row, or per phrase.

        The id is that of the row, or its number, after the split's name where there are several.
        """
        import datasets

        name, columns = source.location, source.columns
        splits = _load(name)
        if part is None and len(splits) > 1:
            raise DataError(f"{name} has splits {', '.join(splits)}: name one")
        rows: Any = splits[part] if part is not None else next(iter(splits.values()))
        features = rows.features or {}
        column = _media_column(name, features or next(iter(rows.take(1)), {}), columns)
        for each, feature in features.items():
            inner = getattr(feature, "feature", feature)
            if isinstance(inner, datasets.Image | datasets.Video):
                raw = type(inner)(decode=False)
                rows = rows.cast_column(each, raw if inner is feature else datasets.List(raw))
        names = _class_names(features, columns, source.task)
        if names is not None and source.labels:
            check_labels(name, names, source.labels)
        reader = RowReader(source, name, reading, names)
        before, sound = reading.total, 0
        for number, row in enumerate(rows):
            reading.total = before + max(PATIENCE, number + 1)
            item, where = f"row {number}", f"{name}, row {number}"
            with reading.tolerate(item):
                media, video = _media(row.pop(column), where)
                key = str(row.get(columns.get("id", "id"), number))
                key = key if len(splits) == 1 else f"{part}/{key}"
                found = reader.read(row, item, where)
                sound += 1
                for place, fields in enumerate(found):
                    one = key if len(found) == 1 else f"{key}#{place}"
                    yield Record(media, one, item=item, video=video, **fields)
        if not sound:
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
        raise DataError(
            f"data set {name} cannot be loaded ({first_line(error)}): check the name, the network, "
            "and that HF_HUB_OFFLINE is not set"
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


def _media(value: Any, where: str) -> tuple[tuple[Media, ...], bool]:
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
        raise FaultError(FaultKind.IMAGE_MISSING, f"{where} has no image")
    return tuple(found), video
