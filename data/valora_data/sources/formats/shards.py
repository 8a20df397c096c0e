"""Samples that a `data` stage wrote (`valora_data.shards`), as a source of another project."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.shards import is_shard, open_shard
from valora_data.sources.base import Location, Source, SourceFormat, Splits

if TYPE_CHECKING:
    from collections.abc import Iterator


class ShardsFormat(SourceFormat):
    """The folder of one split, or a folder with one folder for each split."""

    def recognises(self, location: Location) -> bool:
        """Folders that hold shards."""
        return bool(shard_folders(location.path))

    def guess_task(self, path: str) -> Task:
        """The task that the first answer belongs to."""
        return _task_of(open_shard(next(iter(_existing(path).values())))[0])

    def open(self, source: Source) -> Splits:
        """The splits that the folder holds; under None the shard itself, if it is one."""
        return {
            split: partial(_iterate, folder) for split, folder in _existing(source.location).items()
        }


def shard_folders(path: Path) -> dict[Split | None, Path]:
    """Shards of a folder by split; under None if it is one itself. Empty if there are none."""
    return {split: place for split in (None, *Split) if is_shard(place := path / (split or ""))}


def _existing(path: str) -> dict[Split | None, Path]:
    folders = shard_folders(Path(path))
    if not folders:
        raise DataError(f"{path} holds no shards: name the folder of a `data` stage, or one split")
    return {None: folders[None]} if None in folders else folders


def _iterate(folder: Path) -> Iterator[Sample]:
    yield from open_shard(folder)


def _task_of(sample: Sample) -> Task:
    answer = sample.answer
    fitting = {
        Task.GROUNDING if sample.prompt else Task.DETECTION: answer.boxes,
        Task.VIDEO if sample.rest else Task.CLASSIFICATION: answer.label is not None,
        Task.CAPTION: answer.captions, Task.VQA: answer.answers,
        Task.COUNTING: answer.count is not None,
    }  # fmt: skip
    for task, held in fitting.items():
        if held:
            return task
    raise DataError(f"sample {sample.id} holds no answer: give the task with --task")
