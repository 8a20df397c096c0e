"""What this project makes itself: drawn domains, and the shards of a `data` stage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.shards import is_shard, open_shard
from valora_data.sources.base import Location, Source, SourceFormat, Splits


class ScenesFormat(SourceFormat):
    """The built-in domains: `Source.name` names one, `Source.counts` says how many samples."""

    drawn = True

    def supports(self, task: Task) -> bool:
        from valora_data.sources.scenes.builtin import SCENES

        return task is Task.DETECTION or task in SCENES

    def open(self, source: Source) -> Splits:
        from valora_data.sources.scenes.builtin import builtin_samples

        draw = partial(builtin_samples, source.task, source.name)
        counts = {split: source.counts.get(split, 0) for split in Split}
        return {
            split: partial(draw, split, count, source.seed)
            for split, count in counts.items() if count
        }  # fmt: skip


class ShardsFormat(SourceFormat):
    """The folder of one split, or a folder with one folder for each split."""

    texts = True

    def recognises(self, location: Location) -> bool:
        return any(is_shard(location.path / (split or "")) for split in (None, *Split))

    def guess_task(self, path: str) -> Task:
        sample = open_shard(next(iter(_shards(path).values())))[0]
        answer = sample.answer
        fitting = {
            Task.GROUNDING if sample.prompt else Task.DETECTION: answer.boxes,
            Task.VIDEO if sample.rest else Task.CLASSIFICATION: answer.label is not None,
            Task.CAPTION: answer.captions, Task.VQA: answer.answers,
            Task.COUNTING: answer.count is not None,
        }  # fmt: skip
        found = [task for task, held in fitting.items() if held]
        return found[0] if found else super().guess_task(path)

    def open(self, source: Source) -> Splits:
        """The splits that the folder holds; under None the shard itself, if it is one."""
        found = _shards(source.location)
        return {split: partial(_samples, folder) for split, folder in found.items()}


def _samples(folder: Path) -> Iterator[Sample]:
    yield from open_shard(folder)


def _shards(path: str) -> dict[Split | None, Path]:
    """Shards of a folder by split; under None alone if it is one itself."""
    places = {split: Path(path, split or "") for split in (None, *Split)}
    found = {split: place for split, place in places.items() if is_shard(place)}
    if not found:
        raise DataError(f"{path} holds no shards: name the folder of a `data` stage, or one split")
    return {None: found[None]} if None in found else found
