"""Every kind of source behind one door: from a few words of configuration to samples by split."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.formats.videos import FRAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from valora_data.sources.formats.labelled import ImageReader


class _Except:
    """All task types but some."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = frozenset(tasks)

    def __contains__(self, task: object) -> bool:
        return task not in self._tasks


READS: Mapping[str, Container[Task]] = {
    "scenes": _Except(),
    "coco": frozenset({Task.DETECTION, Task.CAPTION}),
    "yolo": frozenset({Task.DETECTION}),
    "imagefolder": _Except(Task.VIDEO),
    "videofolder": frozenset({Task.VIDEO, Task.VQA, Task.CAPTION, Task.COUNTING}),
    "llava": _Except(Task.DETECTION),
    "vqa": frozenset({Task.VQA}),
    "refcoco": frozenset({Task.GROUNDING}),
    "hub": _Except(),
    "shards": _Except(),
}
"""Kinds of sources, and for which tasks each has answers."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a domain's samples come from.

    Attributes:
        kind: Key of `READS`. `scenes` are the built-in domains; the others read people's files.
        task: The domain's task.
        labels: The domain's labels; empty where answers are language, or to take all.
        name: The domain's name, for `scenes`.
        path: File or folder; for `hub` a name on the hub, ``name:configuration`` or a folder, for
            `shards` what `valora_data.shards` wrote, or a folder with one for each split.
        images: Folder of the images, for `coco`, `llava`, `vqa` and `refcoco`; where the file
            lies if None.
        annotations: File of the annotations, for `vqa`.
        columns: A column's name for a field of `records.NAMES`, where it differs.
        frames: Frames to take of each video.
        counts: Samples to draw for each split, for `scenes`.
        seed: Seed of what is drawn.
        reader: Opens images and counts broken ones; by default one that tolerates few.
    """

    kind: str
    task: Task
    labels: tuple[str, ...] = ()
    name: str = ""
    path: str | None = None
    images: str | None = None
    annotations: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    frames: int = FRAMES
    counts: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    reader: ImageReader | None = None


T = TypeVar("T")
Splits = dict[Split | None, "Callable[[], Iterator[Sample]]"]


def open_source(source: Source) -> Splits:
    """The splits that a source has, as streams that start when they are called.

    Args:
        source: What to read.

    Returns:
        A stream for each split; under None the samples of a set that comes in one piece, or the
        rest of it where only some splits are named.

    Raises:
        DataError: If the kind is unknown or has no answers for the task, or a file is missing or
            corrupt. The streams raise what their readers do.
    """
    if source.kind not in READS:
        raise DataError(f"unknown kind of source {source.kind!r}: choose from {', '.join(READS)}")
    if source.task not in READS[source.kind]:
        kinds = [kind for kind, tasks in READS.items() if source.task in tasks]
        raise DataError(
            f"a source of kind {source.kind} has no answers for task {source.task}: choose from "
            f"{', '.join(kinds)}"
        )
    if source.kind == "scenes":
        return _scenes(source)
    if source.path is None:
        raise DataError(f"a source of kind {source.kind} needs a path: set source.path")
    opener: Callable[[Source, str], Splits] = {
        "coco": _coco,
        "yolo": _yolo,
        "imagefolder": _folder,
        "videofolder": _folder,
        "llava": _llava,
        "vqa": _vqa,
        "refcoco": _refcoco,
        "hub": _hub,
        "shards": _shards,
    }[source.kind]
    return opener(source, source.path)


def detect_kind(path: Path) -> str:
    """The kind of source that a file or folder is.

    Raises:
        DataError: If it does not exist or is of no known kind.
    """
    if path.is_dir():
        return _kind_of_folder(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist: check the path")
    by_suffix = {".yaml": "yolo", ".yml": "yolo", ".jsonl": "llava"}
    kind = by_suffix.get(path.suffix) or (_kind_of_json(path) if path.suffix == ".json" else None)
    if kind is not None:
        return kind
    raise DataError(
        f"{path.name} is of no known kind: expected a folder, an Ultralytics YAML, or JSON of "
        "COCO, LLaVA, VQA or RefCOCO"
    )


def _kind_of_json(path: Path) -> str | None:
    """By the keys that a kind alone has."""
    from valora_data.sources.formats.tables import load_json

    content = load_json(path)
    first = content[0] if isinstance(content, list) and content else content
    marks = {"conversations": "llava", "sentences": "refcoco", "refs": "refcoco",
             "questions": "vqa", "images": "coco"}  # fmt: skip
    return next((kind for key, kind in marks.items() if key in first), None)


def _kind_of_folder(path: Path) -> str:
    from valora_data.sources.formats import videos, yolo

    if shard_folders(path):
        return "shards"
    suffixes = {item.suffix.lower() for item in path.rglob("*") if item.is_file()}
    if ".arrow" in suffixes or ".parquet" in suffixes:
        return "hub"
    if suffixes & (videos.SUFFIXES - {".gif"}):
        return "videofolder"
    if suffixes & yolo.SUFFIXES:
        return "imagefolder"
    raise DataError(f"folder {path} holds no images, videos or tables: check the path")


def _images_of(source: Source, path: str) -> Path:
    return Path(source.images) if source.images else Path(path).parent


def _scenes(source: Source) -> Splits:
    from valora_data.sources.scenes.builtin import builtin_samples

    return {
        split: partial(
            builtin_samples, source.task, source.name, split, source.counts[split], source.seed
        )
        for split in Split
        if source.counts.get(split)
    }


def _coco(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.coco import read_coco, read_coco_captions

    file, images = Path(path), _images_of(source, path)
    if source.task is Task.CAPTION:
        return {None: partial(read_coco_captions, file, images, source.reader)}
    return {None: partial(read_coco, file, images, source.labels or None, source.reader)}


def _yolo(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.yolo import read_yolo, yolo_splits

    return {
        key: partial(read_yolo, Path(path), split, source.labels or None, source.reader)
        for key, split in _with_rest({split: split for split in yolo_splits(Path(path))}).items()
    }


def _folder(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.folders import folder_splits, read_folder

    folders: dict[Split, Path] = folder_splits(Path(path))
    frames = source.frames if source.kind == "videofolder" else None
    places = _with_rest(folders) if folders else {None: Path(path)}
    return {
        split: partial(
            read_folder,
            folder,
            source.task,
            source.labels or None,
            frames=frames,
            columns=source.columns,
            reader=source.reader,
        )
        for split, folder in places.items()
    }


def _with_rest(splits: Mapping[Split, T]) -> dict[Split | None, T]:
    """The training split as the rest, of which missing splits are taken; others as they are."""
    if all(split in splits for split in Split):
        return {split: part for split, part in splits.items()}  # noqa: C416
    return {(None if split is Split.TRAIN else split): part for split, part in splits.items()}


def _llava(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.llava import read_llava

    return {
        None: partial(
            read_llava,
            Path(path),
            _images_of(source, path),
            source.task,
            source.labels or None,
            frames=source.frames,
            reader=source.reader,
        )
    }


def _vqa(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.vqa import read_vqa

    if source.annotations is None:
        raise DataError(
            f"{Path(path).name} holds questions without answers: set source.annotations to the "
            "file of annotations"
        )
    return {
        None: partial(
            read_vqa,
            Path(path),
            Path(source.annotations),
            _images_of(source, path),
            source.labels or None,
            source.reader,
        )
    }


def _refcoco(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.refcoco import read_refcoco, refcoco_splits

    named = {split: split for split in refcoco_splits(Path(path))}
    places: Mapping[Split | None, Split | None] = _with_rest(named) if named else {None: None}
    return {
        key: partial(read_refcoco, Path(path), _images_of(source, path), split, source.reader)
        for key, split in places.items()
    }


def shard_folders(path: Path) -> dict[Split | None, Path]:
    """Shards of a folder by split; under None if it is one itself. Empty if there are none."""
    from valora_data.shards import is_shard

    if is_shard(path):
        return {None: path}
    return {split: path / split for split in Split if is_shard(path / split)}


def _shards(source: Source, path: str) -> Splits:
    from valora_data.shards import open_shard

    folders = shard_folders(Path(path))
    if not folders:
        raise DataError(f"{path} holds no shards: name the folder of a `data` stage, or one split")
    return {split: partial(_iterate, partial(open_shard, at)) for split, at in folders.items()}


def _iterate(opened: Callable[[], Iterable[Sample]]) -> Iterator[Sample]:
    yield from opened()


def _hub(source: Source, path: str) -> Splits:
    from valora_data.sources.formats.hub import hub_splits, read_hub

    named = hub_splits(path)
    places: Mapping[Split | None, str | None] = _with_rest(named) if named else {None: None}
    return {
        split: partial(
            read_hub,
            path,
            theirs,
            source.task,
            source.labels or None,
            columns=source.columns,
            frames=source.frames,
            reader=source.reader,
        )
        for split, theirs in places.items()
    }
