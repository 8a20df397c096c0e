"""COCO exports of Roboflow: a folder for each split, with its images and one COCO JSON."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Sample, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.coco import listed_images, read_coco
from valora_data.sources.formats.folders import folder_splits
from valora_data.sources.formats.tables import load_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from valora_data.schema import Split

ANNOTATIONS = "_annotations.coco.json"


class RoboflowFormat(SourceFormat):
    """The folder of an export; `train`, `valid` and `test` in it are the splits."""

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """Folders with Roboflow's file of annotations in them, or in a folder of a split."""
        return location.path.is_dir() and any(
            next(location.path.glob(pattern), None) for pattern in (ANNOTATIONS, f"*/{ANNOTATIONS}")
        )

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION

    def open(self, source: Source) -> Splits:
        """The splits that folders are named after, or the folder itself as one piece."""
        folders = _folders(Path(source.location))
        return {
            split: partial(_read, folder, source, "" if len(folders) < 2 else f"{folder.name}/")
            for split, folder in folders.items()
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The annotations and the images of all splits."""
        for folder in _folders(Path(source.location)).values():
            yield folder / ANNOTATIONS
            yield from listed_images(load_json(folder / ANNOTATIONS), folder)


def _folders(whole: Path) -> Mapping[Split | None, Path]:
    if (whole / ANNOTATIONS).is_file():
        return {None: whole}
    folders = take_missing_from_train(folder_splits(whole))
    if not folders:
        raise DataError(
            f"{whole} has no folder train, valid or test with {ANNOTATIONS}: name the folder of an "
            "export in the format COCO JSON"
        )
    return folders


def _read(folder: Path, source: Source, prefix: str) -> Iterator[Sample]:
    path = folder / ANNOTATIONS
    for sample in read_coco(path, folder, source.labels or None, source.reader):
        yield replace(sample, id=prefix + sample.id)
